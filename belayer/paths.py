"""Where things lie on a host (file hierarchy of docs/operations.md).

``BELAYER_ROOT`` moves everything below one directory, so that tests and a non-root demo run anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from belayer.errors import ConfigInvalid

# sun_path holds 108 bytes with its NUL (unix(7)); run/w/<slot>-<8 hex>.sock must fit below the root.
_SUN_PATH_MAX = 107


class Paths:
    """Directories and sockets of one host. Making a ``Paths`` touches nothing; ``make()`` creates directories."""

    def __init__(self, root: str | Path | None = None) -> None:
        chosen = root if root is not None else os.environ.get("BELAYER_ROOT")
        if chosen:
            base = Path(chosen).absolute()
            if base.exists() and not base.is_dir():
                raise ConfigInvalid(f"root {base} is not a directory", remedy="set BELAYER_ROOT to one")
            self.run, self.state, self.config = base / "run", base / "state", base / "belayer.toml"
        else:
            self.run, self.state = Path("/run/belayer"), Path("/var/lib/belayer")
            self.config = Path("/etc/belayer/belayer.toml")
        longest = len(os.fsencode(self.worker_sock("x" * 48 + "-00000000")))
        if longest > _SUN_PATH_MAX:
            raise ConfigInvalid(
                f"root {self.run.parent} is too long for unix sockets ({longest} > {_SUN_PATH_MAX} bytes)",
                remedy="set BELAYER_ROOT to a shorter path",
            )

    def make(self) -> Paths:
        """Create the directories, closed to other users (promise E8). Idempotent."""
        for folder in (self.run, self.state):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as why:
                raise ConfigInvalid(
                    f"cannot create {folder}: {why.strerror}", remedy="set BELAYER_ROOT to a writable place"
                ) from why
            folder.chmod(0o700)
        for folder in (self.run / "w", self.run / "hb", self.state / "journal", self.state / "log"):
            folder.mkdir(mode=0o700, exist_ok=True)
        return self

    def owner_sock(self, kind: str) -> Path:
        return self.run / f"owner-{kind}.sock"

    def owner_holder_sock(self, kind: str) -> Path:
        """The process that keeps an owner's descriptors where systemd does not."""
        return self.run / f"owner-{kind}-holder.sock"

    def owner_ledger(self, kind: str) -> Path:
        """What the next life of an owner must know; it means nothing after a reboot, as the memory is gone then."""
        return self.run / f"owner-{kind}.ledger"

    def owner_progress(self, kind: str) -> Path:
        """How far an owner is that does not answer yet (belayer.progress)."""
        return self.run / f"owner-{kind}.progress"

    @property
    def zygote_sock(self) -> Path:
        return self.run / "zygote.sock"

    @property
    def belayerd_sock(self) -> Path:
        return self.run / "belayerd.sock"

    @property
    def router_sock(self) -> Path:
        return self.run / "router.sock"

    @property
    def fronts_sock(self) -> Path:
        """Where the router's fronts find it, when they are processes of their own."""
        return self.run / "fronts.sock"

    @property
    def fronts_metrics(self) -> Path:
        """What these fronts count, one file per process and kind (prometheus-client's multiprocess mode)."""
        return self.run / "fronts"

    @property
    def envkeeper_sock(self) -> Path:
        return self.run / "envkeeper.sock"

    def worker_sock(self, worker_id: str) -> Path:
        return self.run / "w" / f"{worker_id}.sock"

    def worker_tmp(self, worker_id: str) -> Path:
        """The worker's own TMPDIR: vLLM leaves files behind when it is killed; they go with the folder."""
        return self.run / "w" / f"{worker_id}.tmp"

    def last_words(self, name: str) -> Path:
        """Why a worker, or the zygote, ended, in its own words (belayer.lastwords)."""
        return self.run / "w" / f"{name}.words"

    def heartbeat(self, worker_id: str) -> Path:
        return self.run / "hb" / worker_id

    def log(self, name: str) -> Path:
        return self.state / "log" / f"{name}.log"

    @property
    def journal(self) -> Path:
        return self.state / "journal"

    @property
    def fleet_life(self) -> Path:
        """The number of this host's router's last life."""
        return self.state / "fleet.life"

    @property
    def checkpoints(self) -> Path:
        return self.state / "checkpoints"

    @property
    def incidents(self) -> Path:
        return self.state / "incidents.db"

    def slot_state(self, slot: str) -> Path:
        """The saved pair (belayerd.saved), of this boot only."""
        return self.run / "slots" / f"{slot}.msgpack"

    def slot_generation(self, slot: str) -> Path:
        """What of a slot outlives a boot."""
        return self.state / "slots" / f"{slot}.msgpack"

    @property
    def trainers(self) -> Path:
        """What belayerd owes to trainers (belayerd.replacements), of this boot only."""
        return self.run / "trainers.msgpack"

    @property
    def status_file(self) -> Path:
        """Last status that belayerd wrote: readable when the daemon is down (promise O3)."""
        return self.run / "status.msgpack"


def ipc(path: Path) -> str:
    """ZeroMQ endpoint of a socket file."""
    return f"ipc://{path}"
