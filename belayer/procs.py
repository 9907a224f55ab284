"""Processes that outlive us: pidfds, start times, control groups, and killing a whole tree until it is seen dead.

A pid alone is never trusted: pid and start time together name a process (proc(5), field 22), and a pidfd keeps
naming it (pidfd_open(2)). Fence = SIGKILL to every process of the tree, then *every* pidfd readable (promise R1).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from belayer.clock import cpu_clock_s, monotonic
from belayer.errors import WorkerGone

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def start_time(pid: int) -> int:
    """Start time of ``pid`` in clock ticks since boot; 0 when there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def state(pid: int) -> str:
    """Scheduling state letter of proc(5) ("T" stopped, "Z" zombie); "" when there is no such process."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def lives(pid: int, started: int | None = None) -> bool:
    """Whether any thread of ``pid`` can still run; with ``started``, of the process that began at that tick.

    The letter alone does not say it: a leader that has ended is "Z" while its other threads run on, for microseconds
    after a SIGKILL or for ever after pthread_exit(3), and what they have mapped is written on."""
    if started is not None and start_time(pid) != started:
        return False
    letter = state(pid)
    if letter != "Z":
        return letter not in ("", "X")
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(_task_state(pid, tid) not in ("", "Z", "X") for tid in threads)


def _task_state(pid: int, tid: str) -> str:
    try:
        stat = (_PROC / str(pid) / "task" / tid / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return stat.rpartition(")")[2].split()[0]


def cpu_s(pid: int) -> float:
    """User and system CPU seconds that all threads of ``pid`` have used; 0 when there is no such process.

    By its CPU clock (clock_getcpuclockid(3)): two system calls and nanoseconds, where /proc costs an open file and has
    hundredths of a second. belayerd asks this of every worker at each of its beats."""
    clock = ctypes.c_int()
    if _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
        return 0.0
    try:
        return cpu_clock_s(clock.value)
    except OSError:  # it ended between the two calls
        return 0.0


def rss_mb(pid: int) -> float:
    try:
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def own_cgroup() -> str:
    """Folder of this process's version 2 control group, "" where there is none."""
    own = Cgroups._own()
    return str(own) if own is not None else ""


def die_with_parent(parent: int) -> None:
    """In a child right after the fork: SIGKILL for this process when ``parent`` ends (prctl(2), PR_SET_PDEATHSIG)."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the signal was asked for
        os.kill(os.getpid(), signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Pids of the children that the main thread of ``pid`` has made; none when there is no such process."""
    try:
        return [int(child) for child in (_PROC / str(pid) / "task" / str(pid) / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def open_pidfd(pid: int, started: int) -> int:
    """A pidfd of exactly that process. Raises WorkerGone when it has ended or the pid is another's now."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError as why:
        raise WorkerGone(f"process {pid} has ended") from why
    if start_time(pid) != started or is_dead(fd):
        os.close(fd)
        raise WorkerGone(f"process {pid} (started at tick {started}) has ended")
    return fd


def is_dead(pidfd: int) -> bool:
    poll = select.poll()  # select(2) knows no descriptor above 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def wait_dead(pidfds: list[int], deadline_s: float) -> list[int]:
    """Wait until every pidfd is readable; returns those still alive at the deadline. Blocking: use a thread."""
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    alive, end = set(pidfds), monotonic() + deadline_s
    while alive:
        left = end - monotonic()
        if left <= 0:
            break
        for fd, _ in poll.poll(left * 1000):
            poll.unregister(fd)
            alive.discard(fd)
    return sorted(alive)


def listener(path: Path) -> int:
    """Pid of the process that listens at a stream socket; 0 when none does. It need not answer: a stopped one is named
    too (unix(7), SO_PEERCRED)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            return 0
        return int(struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def boot_id() -> str:
    """Differs in each boot: pids and monotonic times in a state file mean nothing after one."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def tag_of(run: Path) -> str:
    """Short name of the host whose run folder this is, for its control groups."""
    return hashlib.sha256(str(run).encode()).hexdigest()[:8]


class Cgroups:
    """Where workers' control groups go: a folder of ours in the cgroup2 hierarchy, or none.

    Without a writable cgroup2 hierarchy (unprivileged demo, some containers) a worker's tree is its session:
    ``kind`` says which, and the status shows it.
    """

    def __init__(self, tag: str) -> None:
        self.base: Path | None = None
        self.kind = "session"
        self._busy: set[str] = set()  # groups that could not be removed yet
        own = self._own()
        if own is None:
            return
        try:
            base = own / f"belayer-{tag}"
            base.mkdir(exist_ok=True)
        except OSError:
            return  # read-only or not delegated: the session is the tree
        if (base / "cgroup.kill").exists():  # Linux 5.14
            self.base, self.kind = base, "cgroup2"

    @staticmethod
    def _own() -> Path | None:
        line = next((row for row in Path("/proc/self/cgroup").read_text().splitlines() if row.startswith("0::")), None)
        if line is None:
            return None
        for mount in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
            if (mount / "cgroup.procs").exists():
                return mount / line[3:].lstrip("/")
        return None

    def make(self, worker_id: str) -> str:
        """Folder for a new worker, "" when trees are sessions."""
        if self.base is None:
            return ""
        folder = self.base / worker_id
        folder.mkdir(exist_ok=True)
        return str(folder)

    def pids(self, worker_id: str) -> list[int]:
        if self.base is None:
            return []
        try:
            return [int(pid) for pid in (self.base / worker_id / "cgroup.procs").read_text().split()]
        except FileNotFoundError:
            return []

    def kill(self, worker_id: str) -> None:
        """SIGKILL every process of the group at once, also those that fork meanwhile (cgroup-v2.rst, cgroup.kill)."""
        if self.base is None:
            return
        try:
            (self.base / worker_id / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            return

    def kill_all(self) -> None:
        """SIGKILL every process below the folder of this host."""
        if self.base is not None:
            (self.base / "cgroup.kill").write_text("1")

    def all_pids(self) -> list[int]:
        """Of all groups of this host, ended ones not counted."""
        if self.base is None:
            return []
        pids = [pid for folder in self.base.iterdir() if folder.is_dir() for pid in self.pids(folder.name)]
        return [pid for pid in pids if lives(pid)]

    def remove_all(self) -> None:
        """The whole folder, once every worker of the host is dead; a group that still holds a process stays. Blocking,
        ten seconds at the most: a process that is seen dead may be a moment away from having left its group."""
        if self.base is None:
            return
        _wait_unpopulated(self.base, 10.0)
        for folder in [*self.base.iterdir(), self.base]:
            with contextlib.suppress(OSError):
                if folder.is_dir():
                    folder.rmdir()

    def empty(self, worker_id: str) -> bool:
        return not self.pids(worker_id)

    def remove(self, worker_id: str) -> None:
        """The group of a dead worker. A process that was seen dead may be a moment away from having left it (EBUSY):
        then it is removed with a later one."""
        if self.base is None:
            return
        self._busy.add(worker_id)
        for name in tuple(self._busy):
            try:
                (self.base / name).rmdir()
            except FileNotFoundError:
                pass
            except OSError as why:
                if why.errno != errno.EBUSY:
                    raise
                continue
            self._busy.discard(name)

    def tree(self, worker_id: str, pid: int, started: int) -> list[int]:
        """Pids of a worker's tree that can still run: of its control group; where it has none, of the session of its
        leader ``pid``, which began at tick ``started``. A session keeps its number from being given again while it has
        a process (POSIX, process ID reuse): a ``pid`` that began at another time says that nothing is left."""
        if self.base is not None and (self.base / worker_id).is_dir():
            return self.pids(worker_id)
        # Session 0 is that of strangers: kernel threads, and what came into a container from outside.
        return [] if pid <= 0 or start_time(pid) not in (0, started) else session_pids(pid)


def _wait_unpopulated(folder: Path, deadline_s: float) -> bool:
    """Wait until no process is below ``folder``: cgroup.events says so, and wakes poll(2) (cgroup-v2.rst)."""
    end = monotonic() + deadline_s
    with (folder / "cgroup.events").open() as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while "populated 0" not in events.read():
            if not poll.poll(max(0.0, end - monotonic()) * 1000):
                return False
            events.seek(0)
    return True


def session_pids(leader: int) -> list[int]:
    """Pids whose session is ``leader`` (setsid(2)) and that can still run: the tree of a worker without a control
    group."""
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = stat.rpartition(")")[2].split()
        if int(fields[3]) == leader and lives(int(entry.name)):
            found.append(int(entry.name))
    return found


def kill_tree(
    cgroups: Cgroups, worker_id: str, pid: int, started: int, pidfd: int | None, deadline_s: float
) -> tuple[int, list[int]]:
    """SIGKILL the whole tree of a worker and wait until all of it is dead. Blocking: use a thread.

    ``pid``, ``started``: of its leader, as ``Cgroups.tree`` takes them. ``pidfd`` None: nobody holds one, mostly since
    the leader has ended; what it left behind has not necessarily. Returns (processes seen dead, pids still alive at
    the deadline). A stopped process dies of SIGKILL as well.
    """
    end = monotonic() + deadline_s
    fds: dict[int, int] = {} if pidfd is None else {pidfd: pid}
    own: list[int] = []
    for other in cgroups.tree(worker_id, pid, started):
        if other == pid and pidfd is not None:
            continue
        try:
            own.append(os.pidfd_open(other))
        except ProcessLookupError:
            continue  # it ended between the listing and here
        fds[own[-1]] = other
    try:
        cgroups.kill(worker_id)
        for fd in fds:
            _sigkill(fd)
        left = [fds[fd] for fd in wait_dead(list(fds), end - monotonic())]
    finally:
        for fd in own:
            os.close(fd)
    left = left or _end_rest(lambda: cgroups.tree(worker_id, pid, started), end)
    return len(fds) - len(left), left


def _end_rest(tree: Callable[[], list[int]], end: float) -> list[int]:
    """Kill and wait for what was forked while the tree was being killed: cgroup.kill reaches it in a group, nothing has
    in a session, and no pidfd of ours does. Returns what still lives at ``end`` (monotonic)."""
    while pids := tree():
        fds = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
        try:
            for fd in fds:
                _sigkill(fd)
            alive = wait_dead(fds, max(0.0, end - monotonic()))
        finally:
            for fd in fds:
                os.close(fd)
        if alive or monotonic() >= end:
            return tree()
    return []


def _sigkill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
