"""Waiting for a fact instead of sleeping: the one poll loop of the tests, and what is removed while others let go."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from belayer.clock import monotonic

T = TypeVar("T")


def eventually(probe: Callable[[], T], *, within: float = 300.0, what: str = "", every: float = 0.01) -> T:
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


def remove_tree(path: Path) -> None:
    """A folder in which a process that is dying may still make or remove a name."""

    def gone() -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    eventually(gone, what=f"{path} is removed")


def remove_group(path: Path) -> None:
    """A control group whose last process is dying: it is listed no more a moment before the group is empty."""

    def gone() -> bool:
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:  # EBUSY
            return False
        return True

    eventually(gone, what=f"{path} is empty")
