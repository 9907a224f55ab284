"""A standby steps aside: while it starts and while it waits, a main that wants the core gets it (promise R8).

nice(2) is per thread and inherited by threads made later; with sched_autogroup it only counts inside a session, so the
session's group is made nice as well (sched(7)). Coming back needs CAP_SYS_NICE: without it a standby never steps
aside, since as a main it could not come back.
"""

from __future__ import annotations

import os
from pathlib import Path

_ASIDE = 5  # a third of the share of a main: it must still get ready on a crowded host
_CAP_SYS_NICE = 23
_AUTOGROUP = Path("/proc/self/autogroup")


def may_come_back() -> bool:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)


def step_aside() -> None:
    """Call with one thread only."""
    if may_come_back():
        _set(_ASIDE)


def come_back() -> None:
    """All threads of this process at normal priority again. Idempotent."""
    if may_come_back():
        _set(0)


def _set(nice: int) -> None:
    for task in os.listdir("/proc/self/task"):
        try:
            os.setpriority(os.PRIO_PROCESS, int(task), nice)
        except ProcessLookupError:
            continue  # that thread has just ended
    if _AUTOGROUP.exists():
        _AUTOGROUP.write_text(str(nice))
