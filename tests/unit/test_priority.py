"""A standby steps aside while it starts, not for ever, and again once it is ready. Each in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from belayerd.worker import priority
from tests.support.wait import eventually

pytestmark = pytest.mark.skipif(not priority.may_come_back(), reason="needs CAP_SYS_NICE, as a standby does")


def in_child(act: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()  # an autogroup of its own, as a worker has
            act()
            code = 0
        except AssertionError:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_one_that_is_not_ready_in_time_gets_the_share_of_a_main_and_waits_aside_afterwards() -> None:
    def start() -> None:
        priority.step_aside(patience_s=0.05)
        eventually(lambda: nice() == 0, what="it comes back by itself")
        priority.wait_aside()
        assert nice() == 5
        priority.come_back()
        assert nice() == 0

    in_child(start)


def test_one_that_is_ready_in_time_stays_aside_until_it_takes_over() -> None:
    def start() -> None:
        priority.step_aside(patience_s=600.0)
        assert nice() == 5
        priority.wait_aside()
        assert nice() == 5
        priority.come_back()
        assert nice() == 0

    in_child(start)
