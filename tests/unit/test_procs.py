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
    child.wait(60)
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
    started = procs.start_time(tree.pid)
    pidfd = procs.open_pidfd(tree.pid, started)
    dead, left = procs.kill_tree(groups, "slot0-aa", tree.pid, started, pidfd, 5.0)
    assert (dead, left) == (4, [])
    assert procs.is_dead(pidfd)
    os.close(pidfd)
    assert tree.wait(60) == -signal.SIGKILL
    eventually(lambda: procs.session_pids(tree.pid) == [], what="an empty session")
    if groups.base is not None:
        groups.remove("slot0-aa")
        groups.base.rmdir()


def test_a_tree_that_outlives_its_leader_is_found(tree: subprocess.Popen[bytes]) -> None:
    started = procs.start_time(tree.pid)
    os.kill(tree.pid, signal.SIGKILL)
    tree.wait(60)
    dead, left = procs.kill_tree(_NoCgroup(), "slot0-aa", tree.pid, started, None, 5.0)
    assert (dead, left) == (3, [])


def test_a_stranger_that_has_the_pid_now_is_left_alone(tree: subprocess.Popen[bytes]) -> None:
    """The leader began at another time: this session, of the same number, is somebody else's. Nor is session 0 ours."""
    started = procs.start_time(tree.pid)
    assert procs.kill_tree(_NoCgroup(), "slot0-aa", tree.pid, started - 1, None, 60.0) == (0, [])
    assert len(procs.session_pids(tree.pid)) == 4
    assert _NoCgroup().tree("slot0-aa", 0, 0) == []


def test_a_worker_of_another_cgroup_folder_is_still_its_session(tree: subprocess.Popen[bytes]) -> None:
    """A belayerd that is started again from another login has another folder than the life that made the worker."""
    groups = procs.Cgroups(f"test-{os.getpid()}")
    assert groups.base is not None
    started = procs.start_time(tree.pid)
    pidfd = procs.open_pidfd(tree.pid, started)
    try:
        assert procs.kill_tree(groups, "slot0-aa", tree.pid, started, pidfd, 60.0) == (4, [])
    finally:
        os.close(pidfd)
        groups.base.rmdir()


def test_a_group_that_cannot_be_removed_yet_goes_with_a_later_one(tree: subprocess.Popen[bytes]) -> None:
    groups = procs.Cgroups(f"test-{os.getpid()}")
    assert groups.base is not None
    folder = Path(groups.make("slot0-aa"))
    (folder / "cgroup.procs").write_text(str(tree.pid))
    groups.remove("slot0-aa")
    assert folder.exists(), "a process was in it"
    os.kill(tree.pid, signal.SIGKILL)
    tree.wait(60)
    eventually(lambda: "populated 0" in (folder / "cgroup.events").read_text(), what="an empty group")
    groups.make("slot0-bb")
    groups.remove("slot0-bb")
    assert not folder.exists()
    groups.base.rmdir()


def test_who_listens_at_a_socket_is_named_though_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert procs.listener(path) == 0
    script = (
        "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen(1)\n"
        "print('up', flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        os.kill(child.pid, signal.SIGSTOP)
        eventually(lambda: procs.state(child.pid) == "T", what="stopped")
        assert procs.listener(path) == child.pid
        child.kill()
    assert path.exists()
    assert procs.listener(path) == 0, "a killed one leaves its file behind"


def test_a_tree_that_forks_while_it_is_killed_is_waited_for() -> None:
    """What is forked after the listing dies of cgroup.kill like the rest, and a moment later: no failed fence."""
    groups = procs.Cgroups(f"test-{os.getpid()}")
    assert groups.base is not None
    script = (
        "import os, sys\nopen(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "big = bytearray(os.urandom(1 << 20)) * 64\nprint('up', flush=True)\n"
        "while True:\n    if os.fork() == 0:\n        if os.fork():\n            os._exit(0)\n"
        "        big[::4096] = bytes(16384)\n        os._exit(0)\n    os.wait()\n"
    )
    try:
        for number in range(20):
            name = f"slot0-{number}"
            child = subprocess.Popen([sys.executable, "-c", script, groups.make(name)], stdout=subprocess.PIPE)
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            _, left = procs.kill_tree(groups, name, child.pid, procs.start_time(child.pid), None, 30.0)
            assert left == []
            assert child.wait(60) == -signal.SIGKILL
            child.stdout.close()
    finally:
        groups.remove_all()
    assert not groups.base.exists()


def test_in_a_session_what_is_forked_while_it_is_killed_dies_too() -> None:
    """No cgroup.kill reaches it there: it takes another look."""
    script = (
        "import os, signal\nprint('up', flush=True)\n"
        "for _ in range(500):\n    if os.fork() == 0:\n        signal.pause()\nsignal.pause()\n"
    )
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        _, left = procs.kill_tree(_NoCgroup(), "slot0-aa", child.pid, procs.start_time(child.pid), None, 60.0)
        rest = procs.session_pids(child.pid)
        for pid in rest:
            os.kill(pid, signal.SIGKILL)
        assert (left, rest) == ([], [])
        assert child.wait(60) == -signal.SIGKILL
        child.stdout.close()


def test_a_process_lives_until_its_last_thread_has_ended() -> None:
    """A leader that has ended shows "Z" while the others run on: what it has mapped is still written."""
    script = (
        "import ctypes, os, threading\ndef on():\n    os.read(0, 1)\n    print('on', flush=True)\n    os.read(0, 1)\n"
        "threading.Thread(target=on).start()\nctypes.CDLL(None).syscall(60, 0)\n"  # exit(2): of this thread alone
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    started = procs.start_time(child.pid)
    try:
        eventually(lambda: procs.state(child.pid) == "Z", what="the leader has ended")
        child.stdin.write(b"x")
        child.stdin.flush()
        assert child.stdout.readline() == b"on\n", "another thread runs"
        assert procs.lives(child.pid)
        assert procs.lives(child.pid, started)
        assert not procs.lives(child.pid, started + 1)
        assert procs.session_pids(child.pid) == [child.pid]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        eventually(lambda: not procs.lives(child.pid), what="the whole process has ended")
        child.wait(60)
        child.stdin.close()
        child.stdout.close()
    assert not procs.lives(child.pid, started)


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
        eventually(lambda: procs.cpu_s(child.pid) > first + 0.3)
        ticks = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        assert procs.cpu_s(child.pid) >= sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") - 0.05
    finally:
        child.kill()
        child.wait(60)
    assert procs.cpu_s(child.pid) == 0.0
