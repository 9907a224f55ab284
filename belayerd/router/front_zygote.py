"""Forks the fronts of a router: a process that has imported vLLM and does nothing else.

The router forks it before it has an event loop, so it has one thread and a fork copies it whole; a front is there in
about a second where an import takes ten. Fronts die with it, and it with the router (PR_SET_PDEATHSIG). Both hold
``run/fronts.lock``: while any of them lives, no next life of the router begins, so no front is ever between two.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from belayer import procs
from belayer.clock import monotonic
from belayer.config import Config
from belayer.errors import ConfigInvalid, HostUnfit
from belayer.paths import Paths
from belayerd.router.front_loads import Loads

EXIT_UNFIT = 2
_MAX_PACKET = 64 << 10
_MAX_WORDS = 4096
_PR_SET_NAME = 15
_PREDECESSORS_S = 10.0


class Spawn(msgspec.Struct, frozen=True):
    """``identity`` names this life of front ``number`` at the router's door."""

    number: int
    identity: str


class Born(msgspec.Struct, frozen=True, tag=True):
    identity: str
    pid: int


class Died(msgspec.Struct, frozen=True, tag=True):
    """``code``: as subprocess.returncode. ``said``: one sentence, when it cannot serve at all."""

    identity: str
    code: int
    said: str = ""


@dataclass(frozen=True)
class Kit:
    """What fronts inherit: nothing of it can be sent."""

    config: Config
    paths: Paths
    args: Namespace
    sock: socket.socket
    slots: dict[str, socket.socket]
    loads: Loads


Run = Callable[[Kit, int, str], None]  # kit, number, identity: a whole front. Raises HostUnfit


def take_lock(run: Path) -> int:
    """Wait until no front of an earlier life lives: they die with their router, in milliseconds. Raises HostUnfit."""
    fd = os.open(run / "fronts.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = monotonic() + _PREDECESSORS_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError as why:
            if monotonic() > deadline:
                os.close(fd)
                raise HostUnfit(
                    f"a front of an earlier router below {run} has not died in {_PREDECESSORS_S:g} s",
                    remedy=f"kill what holds {run}/fronts.lock (fuser)",
                ) from why
            select.select([], [], [], 0.02)


def start(kit: Kit, run: Run, router_lock: int) -> socket.socket:
    """Fork it. Returns the router's end: Spawn in, Born and Died out; its end is the zygote's death. Raises HostUnfit
    when this process has more than one thread."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise HostUnfit(f"{threads} threads after importing vLLM: a fork would not be safe", remedy="set fronts = 1")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    router = os.getpid()
    if os.fork() == 0:
        _be_zygote(kit, run, router, router_lock, ours, theirs)
    theirs.close()
    return ours


def _be_zygote(
    kit: Kit, run: Run, router: int, router_lock: int, ours: socket.socket, theirs: socket.socket
) -> NoReturn:
    code = 1
    try:
        procs.die_with_parent(router)
        _name("belayer-fronts")
        ours.close()
        os.close(router_lock)  # or the next life would find this one alive
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it goes when the router hangs up, after the last front
        gc.freeze()  # keep what was imported out of the fronts' collections, and its pages shared
        Zygote(kit, run, theirs).serve()
        code = 0
    except BaseException:  # noqa: BLE001 the router's stack must never be unwound in the child
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class _Child:
    identity: str
    pid: int
    words: int  # pipe


class Zygote:
    def __init__(self, kit: Kit, run: Run, sock: socket.socket) -> None:
        self._kit, self._run, self._sock = kit, run, sock
        self._children: dict[int, _Child] = {}  # by pidfd
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def serve(self) -> None:
        """Until the router hangs up."""
        while True:
            for fd, _ in self._poll.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                data = self._sock.recv(_MAX_PACKET)
                if not data:
                    return
                self._fork(msgspec.msgpack.decode(data, type=Spawn))

    def _fork(self, wanted: Spawn) -> None:
        words, theirs = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_front(wanted, parent, theirs)
        os.close(theirs)
        pidfd = os.pidfd_open(pid)  # it cannot have been reaped: only we reap it
        self._children[pidfd] = _Child(wanted.identity, pid, words)
        self._poll.register(pidfd, select.POLLIN)
        self._sock.send(msgspec.msgpack.encode(Born(wanted.identity, pid)))

    def _be_front(self, wanted: Spawn, parent: int, words: int) -> NoReturn:
        code = 1
        try:
            procs.die_with_parent(parent)
            _name(f"belayer-front{wanted.number}")
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._sock.close()
            for pidfd, child in self._children.items():
                os.close(pidfd)
                os.close(child.words)
            self._run(self._kit, wanted.number, wanted.identity)
            code = 0
        except (ConfigInvalid, HostUnfit) as error:
            os.write(words, str(error).encode()[:_MAX_WORDS])
            code = EXIT_UNFIT
        except BaseException:  # noqa: BLE001 the zygote's stack must never be unwound in the child
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        said = os.read(child.words, _MAX_WORDS).decode(errors="replace")
        os.close(child.words)
        with contextlib.suppress(BrokenPipeError):  # the router has ended; so will we
            self._sock.send(msgspec.msgpack.encode(Died(child.identity, os.waitstatus_to_exitcode(status), said)))


def _name(name: str) -> None:
    """As ps and top show it (prctl(2), PR_SET_NAME: 15 characters)."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def read(data: bytes) -> Any:
    """Raises msgspec.MsgspecError."""
    return msgspec.msgpack.decode(data, type=Born | Died)
