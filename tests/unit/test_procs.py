"""Trees seen dead: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from belayer import procs
from belayer.errors import WorkerGone
from tests.support.wait import eventually

_TREE = (
    "import subprocess,sys,time; c=[subprocess.Popen(['sleep','600']) for _ in range(3)]; "
    "print('up',flush=True); time.sleep(600)"
)


@pytest.fixture
def tree() -> subprocess.Popen[bytes]:
    """A leader in a session of its own with three children."""
    child = subprocess.Popen([sys.executable, "-c", _TREE], stdout=subprocess.PIPE, start_new_session=True)
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    yield child
    for pid in procs.session_pids(child.pid):
        os.kill(pid, signal.SIGKILL)
    child.wait(5)
    child.stdout.close()


class _NoCgroup(procs.Cgroups):
    def __init__(self) -> None:
        self.base, self.kind = None, "session"


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("kind", ["session", "cgroup2"])
def test_a_whole_tree_is_seen_dead(tree: subprocess.Popen[bytes], kind: str, stopped: bool) -> None:
    groups = _NoCgroup() if kind == "session" else procs.Cgroups(f"test-{os.getpid()}")
    if groups.kind != kind:
        pytest.fail(f"this host offers {groups.kind} where the test machine offers cgroup2")
    pids = procs.session_pids(tree.pid)
    assert len(pids) == 4
    if groups.base is not None:
        folder = groups.make("slot0-aa")
        for pid in pids:
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write(str(pid))
        assert sorted(groups.pids("slot0-aa")) == sorted(pids)
    if stopped:
        os.kill(tree.pid, signal.SIGSTOP)
        eventually(lambda: procs.state(tree.pid) == "T", what="stopped")
    pidfd = procs.open_pidfd(tree.pid, procs.start_time(tree.pid))
    dead, left = procs.kill_tree(groups, "slot0-aa", tree.pid, pidfd, 5.0)
    assert (dead, left) == (4, [])
    assert procs.is_dead(pidfd)
    os.close(pidfd)
    assert tree.wait(5) == -signal.SIGKILL
    eventually(lambda: procs.session_pids(tree.pid) == [], what="an empty session")
    if groups.base is not None:
        groups.remove("slot0-aa")
        groups.base.rmdir()


def test_a_tree_that_outlives_its_leader_is_found(tree: subprocess.Popen[bytes]) -> None:
    os.kill(tree.pid, signal.SIGKILL)
    tree.wait(5)
    dead, left = procs.kill_tree(_NoCgroup(), "slot0-aa", tree.pid, None, 5.0)
    assert (dead, left) == (3, [])


def test_a_pid_alone_is_never_trusted(tree: subprocess.Popen[bytes]) -> None:
    with pytest.raises(WorkerGone, match="has ended"):
        procs.open_pidfd(tree.pid, procs.start_time(tree.pid) + 1)


def test_what_does_not_die_is_named() -> None:
    alive = os.pidfd_open(os.getpid())
    assert procs.wait_dead([alive], 0.05) == [alive]
    os.close(alive)


def test_the_cpu_time_of_a_process_is_that_of_all_its_threads() -> None:
    """And nothing of a process that has ended: its number may be another's."""
    script = "import hashlib, threading\ndef burn():\n while True: hashlib.sha256(bytes(1 << 20)).digest()\n"
    script += "threading.Thread(target=burn, daemon=True).start()\nthreading.Event().wait()"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        first = procs.cpu_s(child.pid)
        eventually(lambda: procs.cpu_s(child.pid) > first + 0.3, within=60.0)
        ticks = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert procs.cpu_s(child.pid) >= sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") - 0.05
    finally:
        child.kill()
        child.wait(10)
    assert procs.cpu_s(child.pid) == 0.0
