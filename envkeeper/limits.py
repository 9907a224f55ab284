"""The limits of a sandbox, and their return after a restore.

A restore needs more of them than the life did that was captured: CRIU runs below them, and each task takes memory of
its own before it is itself again. A sandbox at its limit of processes or memory can be dumped (CRIU stands outside
then), and could not come back. So our OCI runtime restores below raised ones (runtime/runtime.c), and the true ones are
put on here, before the life is proven: a daemon that dies in between has served nothing, and its next start removes it.
"""

from __future__ import annotations

import contextlib
import errno
import time
from pathlib import Path

from belayer.errors import RestoreFailed
from envkeeper.recipe import Recipe
from envkeeper.usage import groups

PERIOD_US = 100_000
_TRIES, _PATIENT, _PAUSE_S = 20, 5, 0.02  # page cache of the images is the group's own, and may be in use for a moment
_STEP = 1 << 20  # bytes above what is held, a multiple of every page size
_KEPT = "the checkpoint"


def memory(recipe: Recipe) -> int:
    """Bytes; with swap it is as much, so there is none."""
    return recipe.memory_mb << 20


def quota_us(recipe: Recipe) -> int:
    return max(1_000, int(recipe.cpus * PERIOD_US))


def put_on(pid: int, recipe: Recipe) -> str:
    """The limits of ``recipe`` on the control groups of ``pid``, read back; what differs, for people, or "". Blocking.
    Raises RestoreFailed when the kernel does not take one, OSError when the groups are gone.

    What came back may hold more memory than what was captured (pages that were shared after a fork are less so), and
    killing it for that would lose the work: its limit is then what it holds."""
    found = groups(pid)
    v2 = "memory" not in found
    shelf = found.get("") if v2 else None
    _write((shelf or found["pids"]) / "pids.max", recipe.pids)
    if shelf is not None:
        _write(shelf / "cpu.max", quota_us(recipe), f"{quota_us(recipe)} {PERIOD_US}")
    else:
        _write(found["cpu"] / "cpu.cfs_quota_us", quota_us(recipe))
    most, used = memory(recipe), _shrink(shelf or found["memory"], memory(recipe), v2=v2)
    return f"limit of memory {used >> 20} MiB, which it holds, where {most >> 20} were asked for" if used > most else ""


def _write(file: Path, value: int, text: str = "") -> None:
    file.write_text(text or str(value))
    seen = file.read_text().split()[0]
    if seen != str(value):
        raise RestoreFailed(f"{file} is {seen} and not {value}: the sandbox would run beyond its limit")


def _shrink(group: Path, most: int, *, v2: bool) -> int:
    """Bytes that the limit is now. cgroup v1 refuses one below what cannot be given back; v2 would kill for it, so that
    is asked before."""
    goal = most
    for tried in range(_TRIES):
        try:
            _limit(group, goal, v2=v2)
            return goal
        except OSError as why:
            if why.errno != errno.EBUSY:
                raise
        if tried >= _PATIENT:
            goal = max(most, _held(group, v2=v2) // _STEP * _STEP + 2 * _STEP)
        else:
            time.sleep(_PAUSE_S)
    raise RestoreFailed(f"what came back grows faster than its limit of {most >> 20} MiB can be put on", kept=_KEPT)


def _limit(group: Path, most: int, *, v2: bool) -> None:
    """Raises OSError (EBUSY) where it holds more."""
    if v2:
        _reclaim(group, most)
        _write(group / "memory.max", most)
        return
    _write(group / "memory.limit_in_bytes", most)
    with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
        _write(group / "memory.memsw.limit_in_bytes", most)


def _held(group: Path, *, v2: bool) -> int:
    return int((group / ("memory.current" if v2 else "memory.usage_in_bytes")).read_text())


def _reclaim(group: Path, most: int) -> None:
    """Raises OSError (EBUSY) while it holds more than ``most``."""
    over = _held(group, v2=True) - most
    if over > 0:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # not all of it; a kernel before 5.19
            (group / "memory.reclaim").write_text(str(over))
    if _held(group, v2=True) > most:
        raise OSError(errno.EBUSY, "it holds more than its limit", str(group))
