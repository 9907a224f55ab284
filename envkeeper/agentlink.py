"""The host's end of the agent protocol (frames in ``agent/agent.c``).

The agent's socket lies in the container's file system and is reached through ``/proc/<pid>/root``: nothing of the host
is mounted writable into the sandbox for it, and each of N forks has its own. One connection carries one request and
the agent closes it; we read up to that end, so that at a boundary no connection is left that a dump would refuse.

Blocking calls: the service runs them in threads. A dead sandbox ends a call at once (its pidfd is polled as well).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from belayer.clock import monotonic
from belayer.errors import BelayerError, SandboxLost

SOCKET_IN_SANDBOX = "run/belayer-agent.sock"
PROTOCOL = 1
MAX_COMMAND = 4 << 20  # bytes; the agent itself refuses requests above 8 MiB

TIMED_OUT, SHELL_ENDED, OUT_CUT, ERR_CUT = 1, 2, 4, 8


class AgentError(BelayerError):
    """The agent lives and declined: its own words are in the message."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """``last_action``: number of the last action that ended, 0 for none; ``busy``: actions running now."""

    protocol: int
    sessions: int
    busy: int
    last_action: int


@dataclass(frozen=True, slots=True)
class ActionResult:
    """``code``: the shell's ``$?``, 124 after a timeout, 128+signal when the shell itself was killed.
    ``*_bytes`` count what was written, also beyond the cap."""

    code: int
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    ms: int
    timed_out: bool
    shell_ended: bool
    truncated: bool


class AgentLink:
    """Talks to the agent of one life of a sandbox. ``pidfd`` names its PID 1 and stays the caller's."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self._path = f"/proc/{pid}/root/{SOCKET_IN_SANDBOX}"
        self._pidfd = pidfd
        self._open: set[socket.socket] = set()

    def abort(self) -> None:
        """End the calls in flight (they raise SandboxLost): for a daemon that stops and leaves its sandboxes."""
        for sock in list(self._open):
            with contextlib.suppress(OSError):  # it ended by itself in this moment
                sock.shutdown(socket.SHUT_RDWR)

    def status(self, timeout_s: float = 5.0) -> AgentStatus:
        body = self._ask(b"P", b"", b"p", timeout_s)
        return AgentStatus(*struct.unpack("<IIIQ", body))

    def set_nonce(self, nonce: bytes, timeout_s: float = 5.0) -> None:
        self._ask(b"N", nonce, b"k", timeout_s)

    def ask_nonce(self, timeout_s: float = 5.0) -> bytes:
        """What the agent's memory holds; empty when none was ever set (a cold start)."""
        return self._ask(b"Q", b"", b"n", timeout_s)

    def wait_ready(self, timeout_s: float = 10.0) -> AgentStatus:
        """The first status of a starting agent. Raises SandboxLost when its process ends first."""
        end = monotonic() + timeout_s
        while True:
            try:
                return self.status(timeout_s)
            except (FileNotFoundError, ConnectionRefusedError):
                if monotonic() > end:
                    raise SandboxLost(f"the agent did not listen within {timeout_s:g} s") from None
            # The socket appears within a millisecond of the start; the pidfd wakes us if it never will.
            if _readable(self._pidfd, 2):
                raise SandboxLost("the agent ended before it listened", remedy="see the container's log")

    def run(self, action: int, command: bytes, timeout_s: float, cap: int, session: int = 0) -> ActionResult:
        """Run one action to its end. Raises SandboxLost when the sandbox dies meanwhile: then what the action
        did is unknown. The agent enforces ``timeout_s``; our own deadline beyond it only finds a hung agent."""
        body = struct.pack("<IQII", session, action, int(timeout_s * 1000), cap) + command
        out, err = bytearray(), bytearray()
        end = monotonic() + timeout_s + 15.0 if timeout_s else None
        with self._connect() as sock:
            self._send(sock, b"X", body)
            reader = _Frames(sock, self._pidfd)
            while True:
                kind, data = reader.next(end)
                if kind == b"o":
                    out += data
                elif kind == b"e":
                    err += data
                elif kind == b"r":
                    reader.to_end(end)
                    return _result(data, bytes(out), bytes(err))
                else:
                    raise AgentError(f"the agent refused action {action}: {data.decode(errors='replace')}")

    def _ask(self, kind: bytes, body: bytes, expect: bytes, timeout_s: float) -> bytes:
        end = monotonic() + timeout_s
        with self._connect() as sock:
            self._send(sock, kind, body)
            reader = _Frames(sock, self._pidfd)
            got, data = reader.next(end)
            reader.to_end(end)
        if got != expect:
            raise AgentError(f"the agent answered {got!r} to {kind!r}: {data.decode(errors='replace')}")
        return data

    @contextlib.contextmanager
    def _connect(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.connect(self._path)
            except OSError as why:
                if _readable(self._pidfd):
                    raise SandboxLost("the sandbox is dead") from why
                raise
            self._open.add(sock)
            try:
                yield sock
            finally:
                self._open.discard(sock)

    @staticmethod
    def _send(sock: socket.socket, kind: bytes, body: bytes) -> None:
        try:
            sock.sendall(struct.pack("<I", len(body) + 1) + kind + body)
        except (BrokenPipeError, ConnectionResetError) as why:
            raise SandboxLost("the sandbox died while it was being asked") from why


def _result(data: bytes, out: bytes, err: bytes) -> ActionResult:
    code, flags, out_bytes, err_bytes, ms = struct.unpack("<iIQQI", data)
    return ActionResult(
        code=code,
        stdout=out,
        stderr=err,
        stdout_bytes=out_bytes,
        stderr_bytes=err_bytes,
        ms=ms,
        timed_out=bool(flags & TIMED_OUT),
        shell_ended=bool(flags & SHELL_ENDED),
        truncated=bool(flags & (OUT_CUT | ERR_CUT)),
    )


class _Frames:
    """Whole frames from the agent; a dead sandbox or an early end is SandboxLost, never a short answer."""

    def __init__(self, sock: socket.socket, pidfd: int) -> None:
        self._sock, self._pidfd, self._buffer = sock, pidfd, bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(pidfd, select.POLLIN)

    def next(self, end: float | None) -> tuple[bytes, bytes]:
        while True:
            if len(self._buffer) >= 4:
                size = int.from_bytes(self._buffer[:4], "little")
                if len(self._buffer) >= 4 + size:
                    kind, body = bytes(self._buffer[4:5]), bytes(self._buffer[5 : 4 + size])
                    del self._buffer[: 4 + size]
                    return kind, body
            data = self._receive(end)
            if not data:
                raise SandboxLost("the sandbox died in the middle of an answer")
            self._buffer += data

    def to_end(self, end: float | None) -> None:
        """Until the agent has closed: only then is nothing of ours left inside the sandbox."""
        while self._receive(end):
            pass

    def _receive(self, end: float | None) -> bytes:
        while True:
            left = None if end is None else max(0.0, end - monotonic()) * 1000
            ready = dict(self._poll.poll(left))
            if not ready:
                raise SandboxLost("the agent did not answer in time: hung, or its sandbox is frozen")
            if self._sock.fileno() in ready:  # before the pidfd: an answer that was sent is an answer
                try:
                    return self._sock.recv(1 << 18)
                except ConnectionResetError:
                    return b""
            if self._pidfd in ready:
                # PID 1 is dead, and with it every process of the sandbox (pid_namespaces(7)).
                return self._sock.recv(1 << 18) if _readable(self._sock.fileno()) else b""


def _readable(fd: int, wait_ms: int = 0) -> bool:
    """poll(2), not select(2): descriptors of a busy host go above 1024."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(wait_ms))


def open_pidfd(pid: int) -> int:
    """pidfd of ``pid``; SandboxLost when it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as why:
        raise SandboxLost(f"process {pid} of the sandbox has ended") from why
