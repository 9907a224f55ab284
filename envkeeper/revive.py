"""Start a created container as the continuation of a checkpoint, by our OCI runtime.

The runtime finds a claim of ours for the container's id and lets runc restore from a folder of links to the images. No
experimental mode of Docker, no copies through containerd, and it works where Docker's own restore does not (28).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Protocol

from belayer.errors import RestoreFailed
from belayer.statefile import write_bytes
from envkeeper import marks, passing, relocks
from envkeeper.checkpoint import CRIU_FOLDER
from envkeeper.criu import RESTORE_CONFIG, errors, first_error
from envkeeper.docker_port import TIMEOUT_S
from envkeeper.engine import Engine
from envkeeper.failpoints import Point, reach
from envkeeper.store import Manifest


class Reviver(Protocol):
    """The part of a restore that depends on how the images were made."""

    @property
    def path(self) -> str:
        """Name of the engine path whose images it takes."""

    def revive(self, manifest: Manifest, plain: Path, container_id: str) -> None:
        """Start the container from the images below ``plain``. Blocking. Raises RestoreFailed, Hindered; the caller
        removes the container then, and proves what runs otherwise."""

    def forget(self, container_id: str) -> None:
        """Remove what ``revive`` made beside the container."""

    def sweep(self) -> None:
        """Forget what a former life of the daemon left half made."""


class RuntimeReviver:
    """``work``: a folder on the store's file system (images are hard-linked from it) for image links and logs.
    ``search``: PATH for runc and CRIU. ``plugins``: folder of CRIU's (envkeeper.relocks), None where there are none.
    ``start_s``: what is not started by then hangs, and is killed."""

    path = "fast"

    def __init__(
        self, engine: Engine, work: Path, search: str, plugins: Path | None = None, start_s: float = TIMEOUT_S
    ) -> None:
        self._engine, self._work, self._search, self._plugins = engine, work, search, plugins
        self._start_s = start_s
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        marks.make_folder()
        self._config = work / "criu.conf"
        more = f"libdir {plugins}\n" if plugins is not None else ""
        write_bytes(self._config, f"{RESTORE_CONFIG}{more}".encode(), durable=False)

    def revive(self, manifest: Manifest, plain: Path, container_id: str) -> None:
        """The store's images lack descriptors.json, so that Docker's own restore cannot take them (it would put the
        sandbox into the host's network); runc needs it, so it lies beside links to them for this one start."""
        if self._plugins is None and "relock_sha256" in manifest.versions:
            raise RestoreFailed(
                "it was captured where restores take record locks again, and this machine has no such plugin",
                kept="the checkpoint",
            )
        folder = self._work / container_id
        images, logs = folder / "images", folder / "work"
        for path in (folder, logs):
            path.mkdir(mode=0o700)
        if manifest.key_id:  # decrypted for this restore only, on another file system
            images = plain / CRIU_FOLDER
        else:
            images.mkdir(mode=0o700)
            for image in (plain / CRIU_FOLDER).iterdir():
                os.link(image, images / image.name)
        (images / "descriptors.json").write_text(json.dumps(list(manifest.stdio)))
        marks.arm(
            container_id,
            f"images={images}\nwork={logs}\nconfig={self._config}\npath={self._search}\nnetwork=none\nroom=1\n",
        )
        reach(Point.RESTORE_ARMED)
        try:
            self._engine.start(container_id, self._start_s)
        except RestoreFailed as why:
            if isinstance(why, passing.Hindered) and not why.again:
                raise
            words = f"{why.message}{first_error(logs, 'restore.log')}"
            said = errors(logs, "restore.log")  # a CRIU that ends of itself has said why, whatever runc makes of it
            short = passing.is_short(said) or (isinstance(why, passing.Hindered) and not said)
            raise (passing.Hindered if short else RestoreFailed)(words, kept="the checkpoint") from why
        if not marks.taken(container_id):
            raise RestoreFailed(
                "the container started without the OCI runtime `belayer` taking its claim: that is a cold start",
                remedy="check `docker info` for the runtime and its path",
            )
        if self._plugins is not None:
            relocks.prove(images)

    def forget(self, container_id: str) -> None:
        marks.disarm(container_id)
        shutil.rmtree(self._work / container_id, ignore_errors=True)

    def sweep(self) -> None:
        for folder in self._work.iterdir():
            if folder.is_dir():
                self.forget(folder.name)
