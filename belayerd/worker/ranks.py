"""The other processes of a worker with several tensor-parallel ranks: forked first, watched, gone with it.

The worker that everybody knows is rank 0, the leader. It forks the others before it has a thread, a socket or an
engine, into its own control group, so that a fence reaches all of them. From then on they are one: a rank dies with
the leader (the kernel sees to it), and the leader ends at once when a rank does, saying so, also while it is blocked
inside a step. So belayerd sees one dead worker, and a blocked leader is a silent one.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import structlog

from belayer.errors import WorkerFailed
from belayer.procs import die_with_parent

logger = structlog.get_logger(daemon="worker")

RANK_ENDED = 71  # exit status of a leader whose rank has ended
_LENGTH = struct.Struct("<I")


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Leader to rank: do ``method``. ``args``: MessagePack."""

    method: str
    args: bytes = b""


class Line:
    """One end of the stream between the leader and a rank. Blocking. Raises WorkerFailed when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def send(self, data: bytes) -> None:
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as why:
            raise WorkerFailed(f"a rank of this worker is gone: {why}") from why

    def receive(self) -> bytes:
        head = self._file.read(_LENGTH.size)
        data = self._file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if len(head) < _LENGTH.size or len(data) < _LENGTH.unpack(head)[0]:
            raise WorkerFailed("a rank of this worker is gone")
        return data


@dataclass(frozen=True)
class Ranks:
    """``lines``: of ranks 1 and up, in order; ``pids`` likewise. ``size``: with the leader."""

    lines: tuple[Line, ...]
    pids: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.lines) + 1

    def tell(self, call: Call) -> None:
        """Every rank begins; it may be waited for by the leader inside the same call, so no answer is taken here."""
        data = msgspec.msgpack.encode(call)
        for line in self.lines:
            line.send(data)

    def answers(self) -> list[bytes]:
        return [line.receive() for line in self.lines]

    def watch(self) -> None:
        """From now on the end of a rank is the end of this process. A thread, since the loop may be blocked in a step;
        it runs no engine and beats for nobody."""
        threading.Thread(target=_end_with, args=(self.pids,), name="ranks", daemon=True).start()


def fork(size: int, body: Callable[[int, Line], None]) -> Ranks:
    """Fork ranks 1 to ``size`` - 1, each of which runs ``body(rank, line)`` and never returns. The caller has one
    thread."""
    lines: list[Line] = []
    pids: list[int] = []
    me = os.getpid()
    for rank in range(1, size):
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            _run(me, rank, Line(theirs), body)
        theirs.close()
        lines.append(Line(mine))
        pids.append(pid)
    return Ranks(tuple(lines), tuple(pids))


def _run(parent: int, rank: int, line: Line, body: Callable[[int, Line], None]) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        body(rank, line)
        code = 0
    except BaseException:  # the leader's stack must never be unwound in the child
        logger.exception("rank_failed", rank=rank)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(pids: Sequence[int]) -> None:
    poll = select.poll()
    ranks = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids, start=1)}
    for fd in ranks:
        poll.register(fd, select.POLLIN)
    fd, _ = poll.poll()[0]
    pid = pids[ranks[fd] - 1]
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
    logger.error("rank_gone", rank=ranks[fd], pid=pid, how=how, then="this worker ends: its ranks are one")
    sys.stderr.flush()
    os._exit(RANK_ENDED)
