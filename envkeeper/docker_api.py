"""The fallback: Docker's own checkpoint API, as the paper has it, for hosts where our way of dumping does not work.

Slower by an order of magnitude (the engine copies the images twice, all of it frozen), needs an experimental dockerd
older than 28 (which cannot bring back a container with its own network namespace), and leaks copies into dockerd's
TMPDIR (swept here). What it promises is the same: one frozen instant of processes and upper layer, the same preflight,
watchdog and proof. Chosen by ``envkeeper.engine_path``, never by itself; its images carry a network namespace and ours
do not, so neither is restored by the other.

Docker pauses the container if it is not paused, and then thaws it after the dump, before the upper layer is copied: so
it is paused by us first. Our OCI runtime hands its CRIU the same settings as ours has (``SETTINGS`` names the file).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import struct
import time
from pathlib import Path

from belayer.errors import BelayerError, CheckpointIncomplete, CheckpointRefused, HostUnfit, RestoreFailed, SandboxLost
from belayer.statefile import write_bytes
from envkeeper import marks, passing
from envkeeper.checkpoint import CRIU_FOLDER
from envkeeper.criu import DumpCut, DumpHung, DumpPlan, Moment, errors, first_error, kill_pending
from envkeeper.disk import FULL
from envkeeper.docker_port import DockerPort, EngineAway, EngineFault
from envkeeper.failpoints import Point, reach
from envkeeper.hung import end_dump, end_restore
from envkeeper.store import Manifest

SETTINGS = marks.CLAIMS.parent / "docker-api"  # read by the OCI runtime for `create`, `checkpoint` and `restore`
CRIU_SETTINGS = "tcp-established\nfile-locks\nlink-remap\nghost-limit 1073741824\n"

_KEPT = "the sandbox runs on and the previous checkpoint stays READY"
_NEEDED = ("inventory.img", "pstree.img")  # an engine has answered "created" over an empty folder
_TOO_NEW = 28
_SHORT_S = 20.0
# containerd writes the container's own settings beside each dump, and refuses bytes that it still has: those of the
# dump before, which its collector has not taken away yet. One more dump was enough where it was seen (a busy host).
# Nor does it take an index whose writer of before is not closed yet (its lock has the container's name), or an image of
# the same second (dumps are named for it). All of it comes after the dump: the tasks were let go of in order.
_STALE = re.compile(r"content (sha256:[0-9a-f]{64}): already exists|ref \S+ locked|image \S+: already exists")
_UNPAUSED = re.compile(r"[Cc]ontainer \S+ is not paused")  # Docker's word for its own mark
_STALE_TRIES = 6
_STALE_WAIT_S = 0.1


class StaleContent(CheckpointIncomplete):
    """The engine's own leftovers were in its way: nothing is wrong with the sandbox."""


class DockerApi:
    """Docker's checkpoint calls, which its client library lacks. ``data_root``: Docker's, on this host."""

    def __init__(self, url: str, data_root: Path) -> None:
        self._docker, self._data_root = DockerPort(url), data_root

    def check(self, versions: dict[str, str], search: str) -> None:
        """Raises HostUnfit. Leaves the settings of CRIU where the OCI runtime finds them."""
        with self._docker.reading("for its mode"):
            experimental = self._docker.client(_SHORT_S).info().get("ExperimentalBuild")
        if not experimental:
            raise HostUnfit(
                'envkeeper.engine_path = "docker_api" needs an experimental dockerd',
                remedy='set "experimental": true in /etc/docker/daemon.json and start dockerd again, or take "fast"',
            )
        if int(versions["docker"].split(".")[0]) >= _TOO_NEW:
            raise HostUnfit(
                f"Docker {versions['docker']} cannot restore a container with its own network namespace",
                remedy='set envkeeper.engine_path = "fast", which can',
            )
        config = SETTINGS.with_name("docker-api.conf")
        marks.make_folder()
        write_bytes(config, CRIU_SETTINGS.encode(), durable=False)
        write_bytes(SETTINGS, f"config={config}\npath={search}\nroom=1\n".encode(), durable=False)

    def folder(self, container_id: str) -> Path:
        return self._data_root / "containers" / container_id / "checkpoints"

    def pause(self, container_id: str) -> None:
        self._call("pause", container_id)

    def unpause(self, container_id: str) -> None:
        self._call("unpause", container_id)

    def create(self, container_id: str, name: str, timeout_s: float) -> None:
        """Dump and leave running. Raises EngineFault with the engine's words, EngineAway."""
        with self._docker.reading("for a checkpoint"):
            client = self._docker.client(timeout_s)
            url = client._url("/containers/{0}/checkpoints", container_id)
            client._raise_for_status(client._post_json(url, data={"CheckpointID": name, "Exit": False}))

    def delete(self, container_id: str, name: str) -> None:
        with self._docker.reading("to delete a checkpoint"):
            client = self._docker.client(_SHORT_S)
            client._raise_for_status(client._delete(client._url("/containers/{0}/checkpoints/{1}", container_id, name)))

    def start(self, container_id: str, name: str, timeout_s: float) -> None:
        with self._docker.reading("to start from a checkpoint"):
            client = self._docker.client(timeout_s)
            url = client._url("/containers/{0}/start", container_id)
            client._raise_for_status(client._post(url, params={"checkpoint": name}))

    def leaks(self) -> Path:
        """Where dockerd leaves the copies that it makes of images: its TMPDIR."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self._docker.url.removeprefix("unix://"))
            pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        rows = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return Path(next((os.fsdecode(row[7:]) for row in rows if row.startswith(b"TMPDIR=")), "/tmp"))

    def _call(self, verb: str, container_id: str) -> None:
        with self._docker.reading(f"to {verb}"):
            client = self._docker.client(_SHORT_S)
            client._raise_for_status(client._post(client._url("/containers/{0}/" + verb, container_id)))


class ApiDumper:
    """A Dumper that lets Docker dump."""

    def __init__(self, api: DockerApi) -> None:
        self._api = api

    def dump(self, plan: DumpPlan, moment: Moment) -> None:
        """As Criu.dump; the images are in ``plan.images`` when it returns."""
        name = plan.images.parent.name
        moment.start()
        self._pause(plan, moment)
        try:
            moment.begin()
            self._create(plan, name, moment)
            self._collect(plan, name)
            moment.end()
        finally:
            self._unpause(plan, moment)
        with contextlib.suppress(EngineAway, EngineFault):  # it is ours already; Docker's copy goes with the container
            self._api.delete(plan.container_id, name)

    def _pause(self, plan: DumpPlan, moment: Moment) -> None:
        """A mark of Docker's that outlived its pause (the unpause was not answered, twice) is taken away first: with it
        the sandbox would never be dumped again."""
        try:
            try:
                self._api.pause(plan.container_id)
            except EngineFault as why:
                if "already paused" not in why.said:
                    raise
                moment.hold()  # Docker's runtime does not unpause what runs
                self._api.unpause(plan.container_id)
                self._api.pause(plan.container_id)
        except (EngineFault, EngineAway) as why:
            with contextlib.suppress(BelayerError):  # only its answer may have been lost
                self._unpause(plan, moment)
            raise _undone("pause", plan, why) from why

    def _collect(self, plan: DumpPlan, name: str) -> None:
        """Still frozen: what has to be copied beside the images is read from them. Docker's folders may be another
        mount: no link and no rename."""
        made = self._api.folder(plan.container_id) / name
        missing = [part for part in _NEEDED if not (made / part).exists()]
        if missing:
            raise CheckpointIncomplete(
                f"Docker says that it made a checkpoint, without {missing[0]}", kept=_KEPT, remedy=passing.AGAIN
            )
        for image in made.iterdir():
            shutil.copyfile(image, plan.images / image.name)

    def _create(self, plan: DumpPlan, name: str, moment: Moment) -> None:
        for _ in range(_STALE_TRIES - 1):
            try:
                self._create_once(plan, name, moment)
                return
            except StaleContent:
                time.sleep(_STALE_WAIT_S)  # still frozen: a thaw would only make the moment longer
        self._create_once(plan, name, moment)

    def _create_once(self, plan: DumpPlan, name: str, moment: Moment) -> None:
        try:
            self._api.create(plan.container_id, name, plan.timeout_s)
        except EngineAway as why:
            if not why.late:
                moment.cut()
                raise DumpCut(f"Docker did not answer for its checkpoint any more: {why.message}", kept=_KEPT) from why
            moment.hold()
            ended = end_dump(plan.container_id)
            moment.cut()
            moment.thaw()
            raise DumpHung(
                f"Docker's checkpoint was not over after {plan.timeout_s:g} s; its CRIU (pids {ended}) was killed",
                kept=_KEPT,
                remedy="checkpoint again later; raise envkeeper.checkpoint_timeout_s if the host is only slow",
            ) from why
        except EngineFault as why:
            raise self._why(plan, why.said or why.message, moment) from why

    @staticmethod
    def _why(plan: DumpPlan, said: str, moment: Moment) -> BelayerError:
        if kill_pending(plan.pid):
            return SandboxLost(f"PID 1 (pid {plan.pid}) was killed during the dump")
        log, found = re.search(r"log file: (\S+)", said), ""
        why = (said.splitlines() or ["it gave no reason"])[0][:300]
        if log:
            where = (Path(log[1]).parent, Path(log[1]).name)
            why, found = why + first_error(*where), errors(*where)
        if any(os.strerror(code).lower() in f"{said}{found}".lower() for code in FULL):
            return CheckpointIncomplete(f"no space left for the dump: {why}", kept=_KEPT, remedy="free disk space")
        if stale := _STALE.search(said):
            return StaleContent(
                f"containerd still has what the dump before this one left: {why}",
                kept=_KEPT,
                remedy="checkpoint again later"
                + (f"; if it stays so: ctr -n moby content rm {stale[1]}" if stale[1] else ""),
            )
        if not passing.of_criu(said) or "EOF" in said or "signal: killed" in said or "swrk" in said:
            moment.cut()  # nobody says whether the dump had ended: a shim that went, a connection, a deadline
            return DumpCut(f"Docker did not end its dump: {why}", kept=_KEPT, remedy=passing.AGAIN)
        if passing.is_short(found or why):
            return CheckpointIncomplete(
                f"Docker's CRIU was short of something: {why}", kept=_KEPT, remedy=passing.AGAIN
            )
        return CheckpointRefused(f"Docker cannot dump this sandbox: {why}", kept=_KEPT)

    def _unpause(self, plan: DumpPlan, moment: Moment) -> None:
        """Docker's mark has to go as well. A CRIU that died leaves the group running under it, and Docker then refuses
        to unpause what is not paused: so it is frozen for that moment."""
        try:
            self._api.unpause(plan.container_id)
        except (EngineFault, EngineAway):
            if kill_pending(plan.pid):
                return  # nothing to unpause: Docker notices by itself
            moment.hold()
            try:
                self._api.unpause(plan.container_id)
            except (EngineFault, EngineAway) as why:
                if not _UNPAUSED.search(why.message):  # it was done, and only the answer lost
                    raise _undone("unpause", plan, why) from why
        finally:
            moment.thaw()


def _undone(what: str, plan: DumpPlan, why: BelayerError) -> BelayerError:
    if kill_pending(plan.pid):
        return SandboxLost(f"PID 1 (pid {plan.pid}) is dead")
    return CheckpointIncomplete(f"Docker did not {what}: {why.message}", kept=_KEPT, remedy=passing.AGAIN)


class ApiReviver:
    """A Reviver that lets Docker start from a checkpoint folder of its own."""

    path = "docker_api"

    def __init__(self, api: DockerApi, timeout_s: float = 600.0) -> None:
        self._api, self._timeout_s = api, timeout_s

    def revive(self, manifest: Manifest, plain: Path, container_id: str) -> None:
        """A file of ours among the images: two starts from equal bytes delete each other's copy in containerd."""
        name, nonce = manifest.checkpoint_id, f"nonce-{secrets.token_hex(8)}"
        staged = self._api.folder(container_id) / name
        staged.mkdir(parents=True, mode=0o700)
        for image in (plain / CRIU_FOLDER).iterdir():
            shutil.copyfile(image, staged / image.name)
        if not (staged / "descriptors.json").exists():
            (staged / "descriptors.json").write_text(json.dumps(list(manifest.stdio)))
        (staged / nonce).touch()
        reach(Point.RESTORE_ARMED)
        try:
            self._api.start(container_id, name, self._timeout_s)
        except EngineAway as why:
            if not why.late or not (ended := end_restore(container_id)):
                raise
            raise passing.hung(container_id, self._timeout_s, ended) from why
        except EngineFault as why:
            said = why.said or why.message
            log = re.search(r"log file: (\S+)", said)
            found = errors(Path(log[1]).parent, Path(log[1]).name) if log else ""
            kind = RestoreFailed if passing.of_criu(said) and not passing.is_short(found or said) else passing.Hindered
            raise kind(f"Docker could not start {container_id[:12]} from it: {said}", kept="the checkpoint") from why
        finally:
            self._sweep_leaks(nonce)

    def forget(self, container_id: str) -> None:
        shutil.rmtree(self._api.folder(container_id), ignore_errors=True)

    def sweep(self) -> None:
        """Half-made containers are removed with all that Docker has of them."""

    def _sweep_leaks(self, nonce: str) -> None:
        try:
            folder = self._api.leaks()
        except OSError:  # Docker is away, which its own error tells
            return
        for leak in folder.glob("ctrd-checkpoint*"):
            if (leak / nonce).exists():  # ours for certain
                shutil.rmtree(leak, ignore_errors=True)
