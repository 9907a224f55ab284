"""A stand-in for Docker's socket: passes requests on to the real one, and does one of them wrong when it is told to.

The test's own client, or envkeeper, is given ``url``. Requests are counted from ``arm`` on, over all connections.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path


class Wrong(StrEnum):
    """What becomes of one request. Those below ``REFUSE`` were done by Docker; only the answer is wrong."""

    CUT = "cut"  # closed; never passed on
    REFUSE = "refuse"  # 500 with Docker's own kind of message; never passed on
    BARE = "bare"  # 500 whose body is JSON, but no message
    CUT_ANSWER = "cut_answer"
    HALF_ANSWER = "half_answer"  # fewer bytes than its head promises
    NOISE = "noise"  # not HTTP
    NO_JSON = "no_json"
    WRONG_JSON = "wrong_json"  # of another shape than promised
    AWAY = "away"  # this one and all after it: closed


_BEFORE = (Wrong.CUT, Wrong.REFUSE, Wrong.BARE, Wrong.AWAY)


def answer(status: str, body: bytes, more: int = 0) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body) + more}\r\n\r\n"
    return head.encode() + body


_SAYS = {
    Wrong.CUT: b"",
    Wrong.AWAY: b"",
    Wrong.CUT_ANSWER: b"",
    Wrong.REFUSE: answer("500 Internal Server Error", b'{"message": "on purpose"}'),
    Wrong.BARE: answer("500 Internal Server Error", b'["on purpose"]'),
    Wrong.HALF_ANSWER: answer("200 OK", b'{"Id": "', more=100),
    Wrong.NOISE: b"\x00\xff noise on purpose\r\n\r\n",
    Wrong.NO_JSON: answer("200 OK", b"on purpose \xff\xfe"),
    Wrong.WRONG_JSON: answer("200 OK", b'["on purpose"]'),
}


class DockerProxy:
    """``path``: where it listens; short. ``real``: the socket of Docker."""

    def __init__(self, path: Path, real: Path = Path("/var/run/docker.sock")) -> None:
        self.path, self._real = path, real
        self.seen: list[str] = []  # "GET /v1.41/..." since the last arm
        self.hit = ""  # the request that was done wrong
        # Called with each request before it is passed on; what it returns is the answer in place of Docker's.
        self.before: Callable[[str], bytes | None] = lambda _line: None
        self._at, self._wrong, self._lock = 0, Wrong.CUT, threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def arm(self, at: int, wrong: Wrong) -> None:
        """The ``at``-th request from now on goes wrong; 0 for none."""
        with self._lock:
            self.seen, self.hit, self._at, self._wrong = [], "", at, wrong

    def clear(self) -> None:
        self.arm(0, Wrong.CUT)

    def drop(self) -> None:
        """End all connections, as a Docker that is started again does."""
        with self._lock:
            for sock in self._open:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.drop()
        os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as docker:
            with self._lock:
                self._open |= {client, docker}
            with suppress(OSError, EOFError):
                docker.connect(str(self._real))
                while self._one(_Stream(client), _Stream(docker)):
                    pass
            with self._lock:
                self._open -= {client, docker}

    def _one(self, client: _Stream, docker: _Stream) -> bool:
        """One request and its answer; False when the connection is over."""
        line, request, _ = client.message()
        wrong = self._judge(line)
        said = self.before(line)
        if said is not None:
            client.sock.sendall(said)
            return True
        if wrong not in _BEFORE:
            docker.sock.sendall(request)
            _, answer, last = docker.message()
            if wrong is None:
                client.sock.sendall(answer)
                return not last
        assert wrong is not None
        client.sock.sendall(_SAYS[wrong])
        return False

    def _judge(self, line: str) -> Wrong | None:
        with self._lock:
            self.seen.append(line.rpartition(" ")[0])
            count = len(self.seen)
            if not self._at or count < self._at or (count > self._at and self._wrong is not Wrong.AWAY):
                return None
            self.hit = self.hit or self.seen[-1]
            return self._wrong


class _Stream:
    """Whole HTTP messages from a socket. Raises EOFError at its end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def message(self) -> tuple[str, bytes, bool]:
        """(first line, all bytes, whether the connection ends with it)."""
        data = self._until(b"", b"\r\n\r\n")
        head = data.decode("latin-1").lower()
        if "transfer-encoding: chunked" in head:
            size = -1
            while size:
                row = self._until(b"", b"\r\n")
                size = int(row.split(b";")[0], 16)
                data += row + self._exactly(size + 2)
        elif "content-length:" in head:
            data += self._exactly(int(head.split("content-length:")[1].split("\r\n")[0]))
        return data.split(b"\r\n", 1)[0].decode("latin-1"), data, "connection: close" in head

    def _until(self, data: bytes, end: bytes) -> bytes:
        while not data.endswith(end):
            data += self._exactly(1)
        return data

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data
