"""The other processes of a worker with several tensor-parallel ranks: forked first, watched, gone with it.

The worker that everybody knows is rank 0, the leader. It forks the others before it has a thread, a socket or an
engine, into its own control group, so that a fence reaches all of them. From then on they are one: a rank dies with
the leader (the kernel sees to it), and the leader ends at once when a rank does, saying so, also while it is blocked
inside a step. So belayerd sees one dead worker, and a blocked leader is a silent one.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import structlog

from belayer import lastwords, procs
from belayer.errors import WorkerFailed
from belayer.messages.common import ErrorReply
from belayer.procs import die_with_parent

logger = structlog.get_logger(daemon="worker")

RANK_ENDED = 71  # exit status of a leader whose rank has ended
_ECHO_S = 0.3  # a leader that fails within this time of a rank's end most likely fails of it
_SPEAK_S = 5.0
_watched: list[int] = []  # pidfds of this leader's ranks

Said = Callable[[str], None]
_LENGTH = struct.Struct("<I")


class RankGone(WorkerFailed):
    """The other end of a line is gone. Which rank, and how it ended, is for the thread that watches them to say."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Leader to rank: do ``method``. ``args``: MessagePack. ``serial``: counts the calls."""

    method: str
    args: bytes = b""
    serial: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A rank's, to the call ``serial``: digest of what it heard, digest of what it found, its own part of the weights.
    ``refused``: it did nothing of a call that may be refused.

    The tokens alone would not show a rank with other weights or another step: the ranks add up their parts, and all of
    them see the same wrong sum."""

    serial: int
    heard: bytes
    found: bytes
    version: int
    weights: str
    refused: ErrorReply | None = None


@dataclass(frozen=True)
class Mapped:
    """The part of the weights that a rank says it computes with."""

    version: int
    digest: str


def whole_digest(parts: Sequence[str]) -> str:
    """One for all: ``parts`` are the digests of the ranks, in order."""
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def apart(mine: Answer, answer: Answer) -> str:
    """Why a rank is not in step with the leader, or "". ``mine``: what its answer has to be."""
    if answer.serial != mine.serial:
        return f"it is at call {answer.serial}, the leader at {mine.serial}"
    if answer.heard != mine.heard:
        return "it heard another step than the leader said"
    if (answer.version, answer.weights) != (mine.version, mine.weights):
        return (
            f"it computes with weights v{answer.version} {answer.weights[:12]}, "
            f"the group has v{mine.version} {mine.weights[:12]}"
        )
    return "" if answer.found == mine.found else "it found something else"


class Line:
    """One end of the stream between the leader and a rank. Blocking. Raises RankGone when the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def send(self, data: bytes) -> None:
        try:
            self._sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as why:
            raise RankGone(f"a rank of this worker is gone: {why}") from why

    def receive(self) -> bytes:
        head = self._file.read(_LENGTH.size)
        data = self._file.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if len(head) < _LENGTH.size or len(data) < _LENGTH.unpack(head)[0]:
            raise RankGone("a rank of this worker is gone")
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

    def watch(self, said: Said) -> None:
        """From now on the end of a rank is the end of this process. A thread, since the loop may be blocked in a step;
        it runs no engine and beats for nobody."""
        _watched[:] = [os.pidfd_open(pid) for pid in self.pids]
        threading.Thread(target=_end_with, args=(self.pids, said), name="ranks", daemon=True).start()


def let_speak() -> None:
    """In a leader that is about to end on an exception: when a rank has ended, that is the cause, and the thread that
    watches says it and ends this process."""
    poll = select.poll()
    for fd in _watched:
        poll.register(fd, select.POLLIN)
    if _watched and poll.poll(_ECHO_S * 1e3):
        threading.Event().wait(_SPEAK_S)


def fork(size: int, body: Callable[[int, Line], None], said: Said) -> Ranks:
    """Fork ranks 1 to ``size`` - 1, each of which runs ``body(rank, line)`` and never returns. The caller has one
    thread. ``said``: hears why a rank ends."""
    lines: list[Line] = []
    pids: list[int] = []
    me = os.getpid()
    for rank in range(1, size):
        mine, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            _run(me, rank, Line(theirs), body, said)
        theirs.close()
        lines.append(Line(mine))
        pids.append(pid)
    return Ranks(tuple(lines), tuple(pids))


def _run(parent: int, rank: int, line: Line, body: Callable[[int, Line], None], said: Said) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        body(rank, line)
        code = 0
    except RankGone:  # the leader's end is the leader's to explain
        logger.exception("rank_failed", rank=rank)
    except BaseException as why:  # the leader's stack must never be unwound in the child
        logger.exception("rank_failed", rank=rank)
        said(f"rank {rank}: {lastwords.words_of(why)}")
    finally:
        with suppress(OSError):  # a log on a full disk
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with(pids: Sequence[int], said: Said) -> None:
    own = procs.own_cgroup()
    before, poll = lastwords.oom_kills(own), select.poll()
    for fd in _watched:
        poll.register(fd, select.POLLIN)
    fd, _ = poll.poll()[0]
    rank = _watched.index(fd) + 1
    pid = pids[rank - 1]
    _, status = os.waitpid(pid, 0)
    how = lastwords.how(os.waitstatus_to_exitcode(status), pid, before, lastwords.oom_kills(own))
    logger.error("rank_gone", rank=rank, pid=pid, how=how, then="this worker ends: its ranks are one")
    said(f"rank {rank} (pid {pid}) {how}")
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(RANK_ENDED)
