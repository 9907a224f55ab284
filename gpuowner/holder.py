"""The holder: a process that keeps second copies of an owner's descriptors, for hosts without systemd.

Run as ``python -I -S holder.py SOCKET``; it leaves its parent behind and outlives it. It imports nothing but the
standard library, decides nothing, reads no byte of what it holds, and ends only when told to ("E"), or when its socket
file is gone, because then nobody can ever ask for the copies again.

One packet is one request: a letter and a name, a descriptor beside it. ``P name`` + fd keeps, ``D name`` forgets,
``L`` lists (``F name`` + fd each, then ``.``), ``E`` ends. Every answer but those of ``L`` is ``+`` or ``-reason``.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import struct
import sys

MAX_NAME = 255  # bytes; systemd's FDNAME has the same bound
MAX_PACKET = 1 + MAX_NAME
MAX_HELD = 4096
_LOOK_S = 5.0  # how often it looks whether its socket file is still there


def bind(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a killed holder: our starter found that nobody listens there
    old = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old)
    listener.listen(16)
    return listener


def receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """One packet, its descriptor (close-on-exec) and the flags; b"" when there is nothing more. Not
    ``socket.recv_fds``, which drops the flag up to Python 3.13."""
    fds = array.array("i")
    try:
        data, beside, flags, _ = sock.recvmsg(MAX_PACKET, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b"", [], 0
    for level, kind, held in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(held[: len(held) - len(held) % fds.itemsize])
    return data, list(fds), flags


class Holder:
    def __init__(self, path: str) -> None:
        self._path, self._listener = path, bind(path)
        self._inode = os.stat(path).st_ino
        self._held: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._ends = False

    def serve(self) -> None:
        while not self._ends and self._reachable():
            for key, _ in self._selector.select(_LOOK_S):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._readable(key.fileobj)  # type: ignore[arg-type]
        if self._reachable():
            os.unlink(self._path)

    def _reachable(self) -> bool:
        try:
            return os.stat(self._path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0):
            sock.close()
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, None)

    def _readable(self, sock: socket.socket) -> None:
        data, fds, flags = receive(sock)
        good = bool(data) and not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        answers = self._answer(data, fds) if good else []
        for fd in fds:  # what is kept was taken out of the list
            if fd not in self._held.values():
                os.close(fd)
        try:
            for text, own in answers:
                socket.send_fds(sock, [text], own)
        except OSError:
            good = False
        if not good:
            self._selector.unregister(sock)
            sock.close()

    def _answer(self, data: bytes, fds: list[int]) -> list[tuple[bytes, list[int]]]:
        op, name = data[:1], data[1:].decode("ascii", "replace")
        if op == b"P" and name and len(fds) == 1 and len(self._held) < MAX_HELD:
            old, self._held[name] = self._held.get(name, -1), fds[0]
            if old >= 0:  # the same memory again: an owner that did not get our answer in time asks once more
                os.close(old)
        elif op == b"D" and not fds:
            fd = self._held.pop(name, -1)
            if fd >= 0:
                os.close(fd)
        elif op == b"L" and not fds:
            return [(b"F" + held.encode(), [fd]) for held, fd in self._held.items()] + [(b".", [])]
        elif op == b"E" and not fds:
            self._ends = True
        else:
            return [(b"-refused", [])]
        return [(b"+", [])]


def main() -> int:
    up, tell = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(tell)
        return 0 if os.read(up, 1) else 1  # when our starter sees us end well, the socket answers
    os.setsid()
    os.chdir("/")
    holder = Holder(sys.argv[1])  # listens after the fork: SO_PEERCRED names the process that called listen(2)
    os.write(tell, b"1")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    holder.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
