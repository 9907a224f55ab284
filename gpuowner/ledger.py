"""What the owner must know again after kill -9: which descriptor is what, and in which state.

A file beside the sockets, replaced whole by rename before anything is told to a peer. Not fsynced: the page cache
outlives the process, and after a reboot neither memory nor workers are left that it could describe. The descriptors
themselves are in the store (``gpuowner.store``), under the names given here, which are never used twice.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer import procs, statefile
from belayer.messages.owner import TensorSpec
from gpuowner import core


class ArenaRow(msgspec.Struct, frozen=True, kw_only=True):
    """``memory``: its name in the store. ``pid`` and ``start_time`` name the holder's process, 0 when there is none."""

    slot: str
    rank: int
    nbytes: int
    memory: str
    state: core.ArenaState
    epoch: int
    who: str = ""
    pid: int = 0
    start_time: int = 0
    reason: str = ""


class WeightsRow(msgspec.Struct, frozen=True, kw_only=True):
    """``from_files``: the bytes are those of the configured files, so that a lost memory can be loaded again."""

    model: str
    rank: int
    nbytes: int
    memory: str
    state: core.WeightsState
    version: int
    whole: bool
    from_files: bool
    in_place: bool = False
    reason: str = ""
    layout: tuple[TensorSpec, ...] = ()
    chunks: tuple[bytes, ...] = ()
    digest: str = ""
    load_ms: float = 0.0
    mb_per_s: float = 0.0
    source: str = ""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """``stopped``: the life that wrote it was ended by an operator."""

    boot_id: str
    generation: int
    arenas: tuple[ArenaRow, ...] = ()
    weights: tuple[WeightsRow, ...] = ()
    stopped: bool = False


def save(path: Path, ledger: Ledger) -> None:
    statefile.save(path, ledger, durable=False)


def last(path: Path) -> Ledger | None:
    """The ledger of the last life in this boot, or None. Raises StateDamaged: an unreadable one is never "none"."""
    found: Ledger | None = statefile.load(path, Ledger)
    return found if found is not None and found.boot_id == procs.boot_id() else None
