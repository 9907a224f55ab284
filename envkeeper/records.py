"""What envkeeper must know about its sandboxes after kill -9 (promise O1): one state file each.

The boundary is written before its observation is released, without fsync: a page-cache write survives the death of
this process, and the death of the host takes the sandbox with it anyway. What must be known after that one too (that a
sandbox exists, which life it is in, that it is lost or destroyed) is written with fsync.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from belayer import statefile
from envkeeper.core import State
from envkeeper.disk import FULL
from envkeeper.recipe import Recipe

RESERVE, _SLICE = 4 << 20, 64 << 10


class SandboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``lives`` counts incarnations. ``making``: a container that is being made by a restore, not yet proven.
    ``forked_from``: the sandbox that it began as. ``keep``: of a destroyed one, its checkpoints stay."""

    sandbox_id: str
    state: State
    incarnation: str
    lives: int
    recipe: Recipe
    container_id: str = ""
    pid: int = 0
    start_time: int = 0
    boot_id: str = ""
    boundary: int = 0
    context_digest: str = ""
    making: str = ""
    reason: str = ""
    forked_from: str = ""
    keep: bool = False


class Records:
    """One file per sandbox below ``folder``, and a reserve of ``RESERVE`` bytes: on a full disk the end of an action,
    or that a sandbox is lost, must still be written; slices of the reserve are given up for that, and taken again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._reserve = folder, folder / ".reserve"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._whole = self.refill()

    def save(self, record: SandboxRecord, *, durable: bool) -> None:
        """Raises OSError when even the reserve does not help: the daemon ends, and re-adopts what it can prove."""
        path = self._folder / f"{record.sandbox_id}.msgpack"
        while True:
            try:
                statefile.save(path, record, durable=durable)
            except OSError as why:
                if why.errno not in FULL or not self._give_up_a_slice():
                    raise
            else:
                break
        if not self._whole:
            self.refill()

    def _give_up_a_slice(self) -> bool:
        """Not all at once: others that write eat what is free."""
        self._whole = False
        try:
            size = self._reserve.stat().st_size
        except FileNotFoundError:
            return False
        if size < _SLICE:
            return False
        os.truncate(self._reserve, size - _SLICE)
        return True

    def refill(self) -> bool:
        """True when the reserve is whole."""
        with self._reserve.open("ab") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, RESERVE)
            except OSError:  # still full
                return False
        self._whole = True
        return True

    def load_all(self) -> list[SandboxRecord]:
        """Raises StateDamaged naming the file."""
        return [statefile.load(path, SandboxRecord) for path in sorted(self._folder.glob("[!.]*.msgpack"))]

    def forget(self, sandbox_id: str) -> None:
        (self._folder / f"{sandbox_id}.msgpack").unlink(missing_ok=True)
