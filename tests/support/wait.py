"""Waiting for a fact instead of sleeping: the one poll loop of the tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from belayer.clock import monotonic

T = TypeVar("T")


def eventually(probe: Callable[[], T], *, within: float = 60.0, what: str = "", every: float = 0.01) -> T:
    """The first truthy answer of ``probe``; AssertionError naming ``what`` after ``within`` seconds: many, since a
    loaded machine is slow and a fact that comes costs none of them."""
    deadline = monotonic() + within
    pause = threading.Event()
    while True:
        answer = probe()
        if answer:
            return answer
        if monotonic() > deadline:
            raise AssertionError(f"did not happen within {within:g} s: {what or probe}")
        pause.wait(every)
