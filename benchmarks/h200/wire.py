"""JSON packets with descriptors between the processes of the check (AF_UNIX SEQPACKET)."""

from __future__ import annotations

import json
import os
import select
import socket
from typing import Any

from belayer.seqpacket import recv_fds

_MOST = 1 << 18


class Gone(Exception):
    """The other side has ended."""


class Line:
    """One end. ``ask`` raises RuntimeError with the other side's words when it declined."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: tuple[int, ...] = ()

    @classmethod
    def connect(cls, path: str) -> Line:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.connect(path)
        return cls(sock)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self.sock, [json.dumps(message).encode()], list(fds))
        except OSError as why:
            raise Gone(str(why)) from why

    def receive(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next packet, its descriptors in ``fds`` (the caller owns them); None after ``timeout``. Raises Gone."""
        if timeout is not None and not select.select([self.sock], [], [], timeout)[0]:
            return None
        try:
            data, self.fds, _ = recv_fds(self.sock, _MOST, 8)
        except OSError as why:
            raise Gone(str(why)) from why
        if not data:
            raise Gone("its end of the line is closed")
        message: dict[str, Any] = json.loads(data)
        return message

    def ask(self, fds: tuple[int, ...] = (), **message: Any) -> dict[str, Any]:
        self.send(message, fds)
        answer = self.receive()
        assert answer is not None
        if "declined" in answer:
            raise RuntimeError(answer["declined"])
        return answer

    def one_fd(self) -> int:
        (fd,) = self.fds
        return fd

    def close(self) -> None:
        self.sock.close()


def close_all(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
