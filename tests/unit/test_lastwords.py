"""Why a process ended: the first words stay, and a kill by the kernel for memory is told from any other kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer import lastwords
from belayer.errors import HostUnfit
from tests.support import oom


def test_the_first_words_stay_whole_and_nothing_is_left_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "w.words"
    assert lastwords.read(path) == ""
    lastwords.leave(path, lastwords.words_of(HostUnfit("no device\n  of that name", remedy="mend it")))
    lastwords.leave(path, "an echo")
    assert lastwords.read(path) == "HostUnfit: no device of that name; mend it"
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.words"]


def test_words_are_bounded_and_an_error_without_a_text_has_its_name() -> None:
    assert lastwords.words_of(KeyError()) == "KeyError"
    assert len(lastwords.words_of(ValueError("x" * 10_000))) == 400


def end_of(act: Callable[[], None]) -> tuple[int, str]:
    """(pid, how it ended) of a forked child."""
    before = lastwords.oom_kills("")
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return pid, lastwords.how(os.waitstatus_to_exitcode(status), pid, before, lastwords.oom_kills(""))


def test_a_status_and_a_signal_are_named() -> None:
    assert end_of(lambda: os._exit(3))[1] == "ended with status 3"
    assert end_of(lambda: os.kill(os.getpid(), signal.SIGTERM))[1] == "killed by signal 15 (SIGTERM)"
    assert end_of(lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1))[1].startswith("killed by signal 35")


@pytest.mark.skipif(not oom.available(), reason="no memory control group can be made here")
def test_a_kill_for_memory_is_told_from_another_kill_on_the_same_host() -> None:
    before = lastwords.oom_kills("")
    try:
        _, said = end_of(oom.run_out_of_memory)
    finally:
        swept = oom.sweep()
    assert swept == 1
    assert said.startswith("killed by signal 9 (SIGKILL)")
    assert "OOM killer" in said
    after = lastwords.oom_kills("")
    assert after.host > before.host, "the kernel has counted it"
    other = os.fork()
    if other == 0:
        signal.pause()
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    said = lastwords.how(-9, other, before, after)
    readable = os.access("/dev/kmsg", os.R_OK)
    assert said == "killed by signal 9 (SIGKILL)" if readable else "out of memory?" in said


def test_of_a_group_with_a_count_of_its_own_the_count_decides() -> None:
    before, after = lastwords.Kills(0, 5), lastwords.Kills(1, 6)
    assert "its control group had no memory left" in lastwords.how(-9, 1 << 30, before, after)
