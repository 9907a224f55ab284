"""One message per packet, file descriptors beside it: AF_UNIX SEQPACKET (unix(7), SCM_RIGHTS).

ZeroMQ carries no descriptors and hides disconnects; gpuowner and the zygote need both. Blocking by design: the caller
puts it in a thread or has nothing else to do. Every descriptor received is close-on-exec.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from belayer import wire
from belayer.errors import BadMessage, DaemonUnreachable
from belayer.rpc import decode_reply

# A sealed layout of some thousand tensors must fit in one packet; the kernel's default send buffer is smaller.
MAX_PACKET = 4 << 20
_MAX_FDS = 8
_INT = array.array("i").itemsize

R = TypeVar("R", bound=msgspec.Struct)


def send(sock: socket.socket, data: bytes, fds: tuple[int, ...] = ()) -> None:
    socket.send_fds(sock, [data], list(fds))


def recv_fds(sock: socket.socket, nbytes: int, most: int) -> tuple[bytes, tuple[int, ...], int]:
    """One packet, its descriptors (close-on-exec) and the flags of recvmsg(2).

    Not ``socket.recv_fds``: up to Python 3.13 it drops the flags that it is given, so that what it receives is
    inherited by every child that is started later, which then keeps the memory behind it."""
    room = socket.CMSG_LEN(most * _INT)
    data, ancillary, flags, _ = sock.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, held in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(held[: len(held) - len(held) % _INT])
    return data, tuple(fds), flags


def receive(sock: socket.socket) -> tuple[bytes, tuple[int, ...]]:
    """One packet and its descriptors; b"" when the peer has gone. Raises BadMessage for an oversize packet."""
    data, fds, flags = recv_fds(sock, MAX_PACKET, _MAX_FDS)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in fds:
            os.close(fd)
        raise BadMessage(f"packet over {MAX_PACKET} bytes or {_MAX_FDS} descriptors")
    return data, fds


def _nothing() -> None:
    pass


class SeqClient:
    """A connection that stays open: for gpuowner it *is* the lease."""

    def __init__(self, path: Path, timeout: float = 10.0) -> None:
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._sock.settimeout(timeout)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, MAX_PACKET)
        try:
            self._sock.connect(str(path))
        except OSError as why:
            self._sock.close()
            raise DaemonUnreachable(f"nothing listens at {path}: {why.strerror}") from why

    def call(self, message: Any, reply: type[R], sent: Callable[[], None] = _nothing) -> tuple[R, tuple[int, ...]]:
        """The reply as ``reply`` and the descriptors that came with it (the caller owns them). ``sent`` is called
        between the request and the wait for its answer."""
        try:
            send(self._sock, wire.encode(message))
            sent()
            data, fds = receive(self._sock)
        except OSError as why:
            raise DaemonUnreachable(f"{self._path} did not answer {type(message).__name__}: {why}") from why
        if not data:
            raise DaemonUnreachable(f"{self._path} closed the connection on {type(message).__name__}")
        return decode_reply(data, reply), fds

    def fileno(self) -> int:
        return self._sock.fileno()

    def hang_up(self) -> None:
        """End the connection for both sides; whoever waits on it wakes up. ``close`` is still due."""
        with contextlib.suppress(OSError):  # the other side was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()
