"""A standby steps aside: while it starts and while it waits, a main that wants the core gets it (promise R8).

Not for ever: a slot whose shadow starts is exposed. One that has not got ready in the time that a start takes on a free
core goes on with the same share as a main, and steps aside again once it is ready.

nice(2) is per thread and inherited by threads made later; with sched_autogroup it only counts inside a session, so the
session's group is made nice as well (sched(7)). Coming back needs CAP_SYS_NICE: without it a standby never steps
aside, since as a main it could not come back.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

_ASIDE = 5  # a third of the share of a main: it must still get ready on a crowded host
_PATIENCE_S = 3.0
_CAP_SYS_NICE = 23
_AUTOGROUP = Path("/proc/self/autogroup")
_timers: list[threading.Timer] = []


def may_come_back() -> bool:
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)


def step_aside(patience_s: float = _PATIENCE_S) -> None:
    """Call with one thread only. ``patience_s``: after this long, unless ``wait_aside`` was called, it comes back."""
    if may_come_back():
        _set(_ASIDE)
        timer = threading.Timer(patience_s, come_back)
        timer.daemon = True
        timer.start()
        _timers.append(timer)


def wait_aside() -> None:
    """It is ready: from now on it only waits."""
    for timer in _timers:
        timer.cancel()
        timer.join()  # or one that has just begun would undo it
    if _timers:
        _set(_ASIDE)
    _timers.clear()


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
