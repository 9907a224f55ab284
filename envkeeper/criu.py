"""Dump the processes of a sandbox with CRIU, driven by its RPC.

Why not `runc checkpoint` or Docker's API: both start CRIU inside the freeze, dump a network namespace and control
groups that the new container gets anyway, and cost five times the frozen time. Here CRIU runs *inside the sandbox's
own network namespace* (so there is none to dump and no firewall to lock), is started before the freeze, and stops at
two notifications: ``pre-dump`` (we freeze, and start copying the upper layer) and ``post-dump`` (all is written, tasks
still stopped: we wait for the copy). Any error in a callback makes CRIU give up.

The watchdog: one deadline for the whole dump. A CRIU that passes it is killed while the group is frozen, so that what
its death lets go of stands still until it was looked at. One that waits in ptrace for a task that cannot stop takes the
kill only once the group is thawed; it has not touched a task yet. (First the kill: thawed alive, it would dump on.)

Such images carry no network namespace. Docker's own ``start --checkpoint`` would restore them into the *host's*
network; the store keeps them in a form that it cannot consume (no descriptors.json).

Field numbers: CRIU's RPC, https://criu.org/RPC.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from belayer.clock import monotonic
from belayer.errors import BelayerError, CheckpointIncomplete, CheckpointRefused, HostUnfit, SandboxLost
from envkeeper import passing, pbuf, reasons
from envkeeper.disk import FULL, is_full

OLDEST = (4, 2)  # 4.1 fails on any inet socket on kernels >= 6.16, although its own check passes

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000  # linux/sched.h

_DUMP, _NOTIFY = 1, 6  # request types
_IGNORE_CGROUPS = 0
_SKIP_NETWORK_LOCK = 3
_GHOST_LIMIT = 1 << 30  # bytes of a deleted but open file that may go into the images

# What a restore needs; it reaches runc's CRIU as a configuration file. Cgroups: the new container has its own, and
# the recorded ones name a container that no longer is.
RESTORE_CONFIG = (
    "tcp-established\nfile-locks\nlink-remap\nghost-limit 1073741824\nmanage-cgroups=ignore\nnetwork-lock skip\n"
)

_KEPT = "the sandbox runs on and the previous checkpoint stays READY"
_PF_EXITING = 4  # linux/sched.h; its signal is no longer pending, and it is no zombie yet
_GLANCE_S = 0.2  # how often a silent dump is looked at

_GRACE_S = 0.5  # how long CRIU may take to end by itself, and to take a kill that nothing holds up
_REAP_S = 5.0  # how long a killed CRIU may take to be gone
_OWN_ALARM_S = 10  # CRIU's own deadline for a freeze lies behind ours: what it says of it would be taken for a refusal

# All that decides what is in the images and how it is read again; its hash is in every manifest.
_SETTINGS = f"leave-running tcp-established file-locks link-remap orphan-pts-master ghost-limit={_GHOST_LIMIT}"
SETTINGS_SHA256 = hashlib.sha256(
    f"{_SETTINGS} manage-cgroups={_IGNORE_CGROUPS} network-lock={_SKIP_NETWORK_LOCK}\n{RESTORE_CONFIG}".encode()
).hexdigest()


class DumpCut(CheckpointIncomplete):
    """What made the dump died in the middle of it: whether the tasks are whole is not known."""


class DumpHung(DumpCut):
    """The dump did not end in time, and what made it was killed."""


class Dumper(Protocol):
    """What writes the images of a frozen sandbox."""

    def dump(self, plan: DumpPlan, moment: Moment) -> None: ...


class Moment(Protocol):
    """What a dump calls, in this order; ``thaw`` always, and more than once does no harm."""

    def start(self) -> None:
        """The frozen time begins."""

    def begin(self) -> None:
        """Freeze, look whether this can be dumped, start copying. What it raises ends the dump."""

    def end(self) -> None:
        """All images are written and the tasks still stopped: wait for the copy."""

    def hold(self) -> None:
        """What makes the dump is about to be killed: what it lets go of must not run."""

    def cut(self) -> None:
        """It is dead, in the middle of its work: look at the tasks before they run."""

    def thaw(self) -> None:
        """The tasks may run. Never raises for a sandbox that is gone."""


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """``root``: the container's merged root on the host. ``external``: mount points that the new container brings
    itself (bind mounts, control groups). ``masked``: files that the runtime hides behind /dev/null.

    ``watched``: paths under inotify (envkeeper.watches)."""

    pid: int
    root: Path
    images: Path
    freezer: Path
    external: tuple[str, ...]
    masked: tuple[str, ...]
    timeout_s: float
    container_id: str = ""
    watched: tuple[str, ...] = ()


class Criu:
    """One CRIU binary. ``search``: PATH for the helpers that CRIU runs (tar, iptables)."""

    def __init__(self, binary: Path, search: str) -> None:
        self.binary, self.search = binary, search

    def version(self) -> tuple[int, ...]:
        """Raises HostUnfit when the binary is missing, does not run, or is too old."""
        if not os.access(self.binary, os.X_OK):
            raise HostUnfit(f"no CRIU at {self.binary}", remedy="run `make setup`, or set envkeeper.criu")
        done = subprocess.run([self.binary, "--version"], capture_output=True, text=True, check=False, timeout=20)
        found = re.search(r"Version:\s*(\d+)\.(\d+)(?:\.(\d+))?", done.stdout)
        if not found:
            raise HostUnfit(
                f"{self.binary} --version answers {(done.stdout + done.stderr).strip()[:200]!r}",
                remedy="run `make setup` to unpack CRIU again",
            )
        version = tuple(int(part) for part in found.groups() if part)
        if version[:2] < OLDEST:
            raise HostUnfit(
                f"CRIU {'.'.join(map(str, version))} at {self.binary} is too old for this kernel: 4.2 is needed",
                remedy="run `make setup`, or set envkeeper.criu to a newer one",
            )
        return version

    def cache_kernel_facts(self) -> bool:
        """Keep CRIU's probe of the kernel (45 ms of each start) on a tmpfs; true when a cache is in place.

        CRIU only writes /run/criu.kdat when /run is a tmpfs, but reads it from anywhere. Elsewhere we make the file
        once on /dev/shm and leave a symlink. Never on a persistent disk: the file would outlive this kernel.
        """
        cache, target = Path("/run/criu.kdat"), Path("/dev/shm/belayer-criu.kdat")
        if cache.exists():
            return True
        script = (
            'mount -t tmpfs t /run && "$0" check >/dev/null 2>&1; test -s /run/criu.kdat && '
            'cp /run/criu.kdat "$1.$$" && mv "$1.$$" "$1"'
        )
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script, str(self.binary), str(target)],
            capture_output=True,
            check=False,
            timeout=30,
        )
        if done.returncode or not target.exists():
            return False
        cache.unlink(missing_ok=True)  # a symlink whose target a reboot took
        cache.symlink_to(target)
        return True

    def dump(self, plan: DumpPlan, moment: Moment) -> None:
        """Dump, and let the tasks run. Blocking; thawed in every case when this returns or raises.

        Raises what ``moment`` raised; CheckpointRefused when CRIU names something it cannot dump; SandboxLost when
        PID 1 was killed meanwhile; DumpHung after ``plan.timeout_s``; DumpCut when CRIU died; CheckpointIncomplete when
        the disk is full, or the host was short of something else.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        images = os.open(plan.images, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with ours, theirs:
                child = self._spawn(plan.pid, theirs)
                theirs.close()  # so that a dead CRIU is an end of file here
                try:
                    ours.settimeout(_GLANCE_S)
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the same
                        ours.send(_dump_request(plan, images))
                    failed = self._converse(ours, plan, moment)
                    moment.thaw()  # it has answered, so the tasks are detached: its own end is not waited for
                finally:
                    ours.close()  # one that waits for our answer to a notification gives up now
                    _end(child, moment)
                if failed is not None:
                    raise failed
        except DumpCut:
            moment.cut()
            raise
        finally:
            moment.thaw()
            os.close(images)

    def _spawn(self, pid: int, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fd = theirs.fileno()
        with _network_of(pid):
            return subprocess.Popen(
                [self.binary, "swrk", str(fd)],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": self.search},
                start_new_session=True,
            )

    @staticmethod
    def _converse(sock: socket.socket, plan: DumpPlan, moment: Moment) -> BelayerError | None:
        """Up to CRIU's last word: None, or why it could not."""
        end = monotonic() + plan.timeout_s
        while True:
            data = _next(sock, plan, end)
            if not data:
                if kill_pending(plan.pid):
                    raise SandboxLost(f"PID 1 (pid {plan.pid}) was killed during the dump")
                raise DumpCut(f"CRIU ended in the middle of a dump{first_error(plan.images)}", kept=_KEPT)
            reply, script = _read(data)
            if reply[1] != [_NOTIFY]:
                break
            if script == "pre-dump":
                moment.start()
                _begin(moment)
            elif script == "post-dump":
                moment.end()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: the next read says so
                sock.send(pbuf.encode([(1, _NOTIFY), (3, True)]))
        if reply[2] == [1]:
            return None
        return _why_failed(plan, b"".join(_bytes(part) for part in reply.get(9, [])).decode(errors="replace"))


@contextlib.contextmanager
def _network_of(pid: int) -> Iterator[None]:
    """This thread is in the network namespace of ``pid``, and so is what it starts (setns(2) is of the thread alone):
    a program in between that does only this would be started for every dump."""
    with contextlib.ExitStack() as held:
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        held.callback(os.close, home)
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        held.callback(os.close, there)
        _enter(there)
        try:
            yield
        finally:
            try:
                _enter(home)
            except OSError as why:  # it must not do anything else there: the daemon ends, and adopts what runs
                raise RuntimeError(f"a thread is caught in the network of pid {pid}") from why


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _why_failed(plan: DumpPlan, said: str) -> BelayerError:
    if kill_pending(plan.pid):  # its complaint is then about a process that goes away under its hands
        return SandboxLost(f"PID 1 (pid {plan.pid}) was killed during the dump")
    why = first_error(plan.images) or ": " + (said or "no reason given")
    found = errors(plan.images) or why
    if any(os.strerror(code) in found for code in FULL) or is_full(plan.images):
        return CheckpointIncomplete(
            f"no space left for the dump{why}", kept=_KEPT, remedy="free disk space below the checkpoint folder"
        )
    if passing.is_short(found):
        return CheckpointIncomplete(f"CRIU was short of something{why}", kept=_KEPT, remedy=passing.AGAIN)
    named = reasons.name(why)
    words = f"CRIU cannot dump this sandbox{why}"
    return CheckpointRefused(f"{named} ({words})" if named else words, kept=_KEPT)


def _begin(moment: Moment) -> None:
    """A refusal thaws at once: CRIU has touched nothing before we answer."""
    try:
        moment.begin()
    except BelayerError:
        moment.thaw()
        raise


def _next(sock: socket.socket, plan: DumpPlan, end: float) -> bytes:
    """CRIU's next message, b"" when it has ended. A sandbox that is killed while it is frozen dies only after the thaw,
    and CRIU would wait for it for ever: so look for the pending SIGKILL now and then."""
    while True:
        try:
            return sock.recv(1 << 16)
        except ConnectionResetError:  # it died with a message of ours unread
            return b""
        except TimeoutError:
            if kill_pending(plan.pid):
                raise SandboxLost(f"PID 1 (pid {plan.pid}) was killed while it was frozen") from None
            if monotonic() > end:
                raise DumpHung(
                    f"the dump was not over after {plan.timeout_s:g} s, and CRIU was killed{first_error(plan.images)}",
                    kept="the previous checkpoint stays READY",
                    remedy="checkpoint again later; raise envkeeper.checkpoint_timeout_s if the host is only slow",
                ) from None


def kill_pending(pid: int) -> bool:
    """``pid`` is dead, or dies as soon as it runs."""
    try:
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        flags = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])
    except (FileNotFoundError, ProcessLookupError):
        return True
    if flags & _PF_EXITING or any(row.startswith(("State:\tZ", "State:\tX")) for row in rows):
        return True
    masks = [int(row.split()[1], 16) for row in rows if row.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask & 1 << signal.SIGKILL - 1 for mask in masks)


def _read(data: bytes) -> tuple[dict[int, list[int | bytes]], str]:
    """An answer, and the name of the script when it is a notification."""
    try:
        reply = pbuf.decode(data)
        notice = pbuf.decode(_bytes(reply[5][0])) if 5 in reply else {}
        return reply, _bytes(notice.get(1, [b""])[0]).decode()
    except (pbuf.PbufError, UnicodeDecodeError) as why:
        raise CheckpointIncomplete(f"CRIU answered something that is no message: {why}") from why


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise pbuf.PbufError("a number where bytes were expected")
    return value


def _dump_request(plan: DumpPlan, images: int) -> bytes:
    options: list[tuple[int, pbuf.Value]] = [
        (1, images),
        (2, plan.pid),
        (3, True),  # leave_running
        (5, True),  # tcp_established: loopback connections live inside
        (8, True),  # file_locks
        (9, 2),  # log_level: errors and warnings
        (10, "dump.log"),
        (12, True),  # notify_scripts
        (13, str(plan.root)),
        (18, True),  # link_remap
        (34, _IGNORE_CGROUPS),
        (35, _GHOST_LIMIT),
        (44, str(plan.freezer)),
        (45, math.ceil(plan.timeout_s) + _OWN_ALARM_S),
        (50, True),  # orphan_pts_master
        (64, _SKIP_NETWORK_LOCK),
    ]
    if plan.watched:
        options += [(21, True), *((36, path) for path in plan.watched)]  # force_irmap, irmap_scan_paths
    options += [(37, f"mnt[{point}]:{point}") for point in plan.external]
    options += [(37, f"mnt[{point}]:/dev/null") for point in plan.masked]
    return pbuf.encode([(1, _DUMP), (2, pbuf.encode(options))])


def _end(child: subprocess.Popen[bytes], moment: Moment) -> None:
    """See CRIU gone: it ends by itself after its answer; otherwise kill it, then thaw (in this order: see above)."""
    if _gone(child, _GRACE_S):
        return
    moment.hold()
    os.killpg(child.pid, signal.SIGKILL)
    if _gone(child, _GRACE_S):
        return
    moment.thaw()
    if not _gone(child, _REAP_S):
        raise DumpHung(
            f"CRIU (pid {child.pid}) is not gone {_REAP_S:g} s after SIGKILL and the thaw",
            kept="the previous checkpoint stays READY",
            remedy=f"see /proc/{child.pid}/stack and the log of the kernel",
        )


def _gone(child: subprocess.Popen[bytes], within_s: float) -> bool:
    try:
        child.wait(timeout=within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def first_error(folder: Path, name: str = "dump.log") -> str:
    """': <first error line>' of a CRIU log, or an empty string."""
    line = errors(folder, name).partition("\n")[0]
    return ": " + re.sub(r"^\(\s*[\d.]+\)\s*", "", line).strip() if line else ""


def errors(folder: Path, name: str = "dump.log") -> str:
    """All error lines of a CRIU log: the first one names what failed, a later one may say for want of what."""
    try:
        text = (folder / name).read_text(errors="replace")
    except FileNotFoundError:
        return ""
    # Raising its own descriptor limit is the first thing CRIU fails at without CAP_SYS_RESOURCE, and harmless.
    return "\n".join(row for row in text.splitlines() if "Error" in row and "RLIMIT_NOFILE" not in row)


def search_path(binary: Path, helpers: Path) -> str:
    """PATH for CRIU, and for the runc that must find it: our stand-in for tar first when it is there."""
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    parts = [str(helpers)] if shutil.which("tar", path=str(helpers)) else []
    return ":".join([*parts, str(binary.parent), system])
