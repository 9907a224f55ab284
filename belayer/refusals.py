"""Why a daemon does not answer: it refused to start, is on its way, or does not run.

A daemon that ends on an operator's mistake leaves its sentence beside its lock, and the next one that gets the lock
takes it away. So it can be told from one that is still loading, which is as silent.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from belayer import progress, statefile
from belayer.clock import wall

# By the name of its lock: what the daemon is called, and words of its command line that it is known by.
_DAEMONS: dict[str, tuple[str, frozenset[str]]] = {
    "owner-weights": ("gpuowner@weights", frozenset({"gpuowner"})),
    "owner-kv": ("gpuowner@kv", frozenset({"gpuowner"})),
    "router": ("belayer-router", frozenset({"belayerd.router", "belayer-router"})),
    "belayerd": ("belayerd", frozenset({"belayerd"})),
    "envkeeper": ("envkeeper", frozenset({"envkeeper"})),
}
_REFUSED = 2  # exit code: nothing starts it again by itself


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """``at``: wall time. ``code``: its exit status. ``said``: its sentence, as it stood on stderr."""

    at: float
    code: int
    said: str

    @property
    def final(self) -> bool:
        """Whether an operator has to mend something first."""
        return self.code == _REFUSED


def leave(run: Path, name: str, code: int, said: str) -> None:
    """Where there is no folder yet, nothing is made for it; another instance that runs has nothing to do with it. A
    disk that takes nothing must not hide what stderr gets."""
    if run.is_dir() and _holder(run, name) in (0, os.getpid()):
        with contextlib.suppress(OSError):
            statefile.save(_path(run, name), Refusal(at=wall(), code=code, said=said), durable=False)


def clear(run: Path, name: str) -> None:
    """By who got the lock: what was wrong with the last one is over."""
    _path(run, name).unlink(missing_ok=True)


def read(run: Path, name: str) -> Refusal | None:
    """None: none was left, or it is not ours to read."""
    try:
        return statefile.load(_path(run, name), Refusal)  # type: ignore[no-any-return]
    except (PermissionError, statefile.StateDamaged):
        return None


def title(name: str) -> str:
    return _DAEMONS[name][0]


def why_silent(run: Path, name: str) -> str:
    """One sentence on a daemon that does not answer, which begins with what it is called."""
    called, refused, pid = title(name), read(run, name), _holder(run, name)
    if refused is not None:
        ago = f"{max(0.0, wall() - refused.at):.0f} s ago"
        how = "refused to start" if refused.final else f"could not start (exit {refused.code}; worth another try)"
        return f"{called} {how} {ago}: {refused.said}"
    coming = progress.read(run / f"{name}.progress")
    if coming is not None:
        return f"{called} does not answer yet: {coming}"
    if pid:
        return f"{called} does not answer: pid {pid} is loading, or hangs"
    return f"{called} does not run"


def _path(run: Path, name: str) -> Path:
    return run / f"{name}.refused"


def _holder(run: Path, name: str) -> int:
    """Pid of who holds the lock, 0: nobody. The lock is not tried: to hold it for a moment could refuse a daemon that
    starts just then."""
    try:
        pid = int((run / f"{name}.lock").read_text() or 0)
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:8] if pid else []
    except (OSError, ValueError):
        return 0
    return pid if any(Path(word).name in _DAEMONS[name][1] for word in words) else 0
