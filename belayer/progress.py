"""How far a daemon is that does not answer yet: a small file that it writes on, for who waits for it.

An owner that came back verifies every byte that it holds before it answers anybody: minutes for hundreds of gigabytes.
From outside that is as silent as one that is gone. So it says how far it is, and whoever waits counts how long that
stood still, not how long it took. What a killed one left behind counts for nothing: its process is looked for.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from belayer import procs, statefile


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """``doing``: of the process ``pid`` (``start_time`` in clock ticks beside it). ``done`` of ``of`` bytes, 0 where
    they are not known yet. ``within_s``: this much standing still is announced (a question to vLLM, say)."""

    pid: int
    start_time: int
    doing: str
    done: int = 0
    of: int = 0
    within_s: float = 0.0

    def __str__(self) -> str:
        how_far = f", {self.done / 1e9:.1f} of {self.of / 1e9:.1f} GB" if self.of else ""
        return f"pid {self.pid} {self.doing}{how_far}"


class Teller:
    """The writer. A disk that takes nothing must not end what is only told of: then nobody hears how far it is."""

    def __init__(self, path: Path) -> None:
        me = os.getpid()
        self._path, self._me = path, Progress(pid=me, start_time=procs.start_time(me), doing="")

    def tell(self, doing: str, done: int = 0, of: int = 0, within_s: float = 0.0) -> None:
        now = msgspec.structs.replace(self._me, doing=doing, done=done, of=of, within_s=within_s)
        with contextlib.suppress(OSError):
            statefile.save(self._path, now, durable=False)

    def over(self) -> None:
        """From here on it answers by itself."""
        self._path.unlink(missing_ok=True)


def read(path: Path) -> Progress | None:
    """None: nobody is on the way."""
    try:
        found: Progress | None = statefile.load(path, Progress)
    except (statefile.StateDamaged, PermissionError):
        return None
    return found if found is not None and procs.lives(found.pid, found.start_time) else None


class Patience:
    """Judges by ``now`` (monotonic seconds) alone: how long what was seen of a progress has stood still. Pure."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: Progress | None = None
        self._since = 0.0

    def moves(self, seen: Progress | None, now: float) -> bool:
        """Whether to wait on: somebody is on the way, and it has not stood still for longer than may be."""
        if seen != self._seen:
            self._seen, self._since = seen, now
        return seen is not None and now - self._since <= max(self._limit_s, seen.within_s)

    def stood_s(self, now: float) -> float:
        return now - self._since
