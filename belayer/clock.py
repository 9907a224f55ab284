"""The one place for time.

Durations and ages are seconds as float from the monotonic clock; wall time is for humans, file names and
records that another boot must read. Pure cores take ``now`` as an argument and never import this file.
"""

from __future__ import annotations

import time
from typing import Protocol


def monotonic() -> float:
    """Seconds on CLOCK_MONOTONIC: for deadlines and ages; never stored across boots."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the Unix epoch: for people and for records."""
    return time.time()


def cpu_clock_s(number: int) -> float:
    """Seconds on the CPU clock ``number`` of a process. Raises OSError when that has ended."""
    return time.clock_gettime(number)


class Clock(Protocol):
    """What a shell needs of time, so that a test can hold the hands still."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return monotonic()

    def wall(self) -> float:
        return wall()


class Stopwatch:
    """Milliseconds since it was made; ``lap()`` gives those since the last lap."""

    def __init__(self) -> None:
        self._start = self._last = monotonic()

    def ms(self) -> float:
        return (monotonic() - self._start) * 1e3

    def lap(self) -> float:
        now = monotonic()
        out, self._last = (now - self._last) * 1e3, now
        return out
