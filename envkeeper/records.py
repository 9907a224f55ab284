"""What envkeeper must know about its sandboxes after kill -9 (promise O1): one state file each.

The boundary is written before its observation is released, without fsync: a page-cache write survives the death of
this process, and the death of the host takes the sandbox with it anyway. What must be known after that one too (that a
sandbox exists, which life it is in, that it is lost or destroyed) is written with fsync.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer import statefile
from envkeeper.core import State
from envkeeper.recipe import Recipe


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
    """One file per sandbox below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, record: SandboxRecord, *, durable: bool) -> None:
        statefile.save(self._folder / f"{record.sandbox_id}.msgpack", record, durable=durable)

    def load_all(self) -> list[SandboxRecord]:
        """Raises StateDamaged naming the file."""
        return [statefile.load(path, SandboxRecord) for path in sorted(self._folder.glob("[!.]*.msgpack"))]

    def forget(self, sandbox_id: str) -> None:
        (self._folder / f"{sandbox_id}.msgpack").unlink(missing_ok=True)
