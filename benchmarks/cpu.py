"""CPU time and wakeups of processes, from the scheduler's own books: what noise beside them does not change much.

``/proc/PID/task/*/schedstat`` counts nanoseconds on a core, where ``stat`` has hundredths of a second. A wakeup is a
voluntary context switch: a thread that slept until something, or nothing, happened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from belayer.clock import monotonic


@dataclass(frozen=True)
class Spent:
    """``cpu_ms`` and ``wakeups`` by name, in ``seconds``."""

    seconds: float
    cpu_ms: dict[str, float]
    wakeups: dict[str, float]


class Meter:
    """Reads once when made and once for each ``spent``. Threads that ended in between are not counted."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._from, self._before = monotonic(), self._read()

    def _read(self) -> dict[str, dict[str, tuple[float, int]]]:
        return {name: _threads(pid) for name, pid in self._pids.items()}

    def spent(self) -> Spent:
        seconds, after = monotonic() - self._from, self._read()
        cpu: dict[str, float] = {}
        woken: dict[str, float] = {}
        for name, threads in after.items():
            before = self._before[name]
            rows = [(now, before.get(task, (0.0, 0))) for task, now in threads.items()]
            cpu[name] = sum(now[0] - then[0] for now, then in rows)
            woken[name] = sum(now[1] - then[1] for now, then in rows)
        return Spent(seconds, cpu, woken)


def _threads(pid: int) -> dict[str, tuple[float, int]]:
    """Of each thread: milliseconds on a core, voluntary switches."""
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        folder = Path(f"/proc/{pid}/task/{task}")
        try:
            cpu_ns = int((folder / "schedstat").read_text().split()[0])
            rows = (folder / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        switches = next(row for row in rows if row.startswith("voluntary_ctxt_switches"))
        found[task] = (cpu_ns / 1e6, int(switches.split()[1]))
    return found
