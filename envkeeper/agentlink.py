"""The host's end of the agent protocol (frames in ``agent/main.c``).

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
from typing import Any

from belayer.clock import monotonic
from belayer.errors import BelayerError, SandboxLost
from envkeeper.passing import AGAIN, SHORT

SOCKET_IN_SANDBOX = "run/belayer-agent.sock"
PROTOCOL = 2
MAX_REQUEST = 8 << 20  # bytes of command, environment and input together; the agent itself refuses above 12 MiB

_KILL_S = 20.0  # more than the agent takes to kill what an action started

TIMED_OUT, SHELL_ENDED, OUT_CUT, ERR_CUT, STOPPED, UNKILLED = 1, 2, 4, 8, 16, 32


class AgentError(BelayerError):
    """The agent lives and declined before anything was begun: its own words are in the message. Or it was not asked."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """``last_action``: number of the last action that ended, 0 for none; ``busy``: actions running now."""

    protocol: int
    sessions: int
    busy: int
    last_action: int


@dataclass(frozen=True, slots=True)
class Action:
    """``command``: a script for the shell of ``session``, or the arguments of a program that is run directly.
    ``user``: name or uid, each with ":group" if wanted. ``stdin`` of None is /dev/null. ``cap``: bytes kept of each
    stream, half of them from its beginning and half from its end."""

    number: int
    command: bytes | tuple[bytes, ...]
    timeout_s: float
    cap: int
    session: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cwd: str = ""
    user: str = ""
    stdin: bytes | None = None

    def encode(self) -> bytes:
        direct = not isinstance(self.command, bytes)
        command = self.command if isinstance(self.command, bytes) else b"".join(arg + b"\0" for arg in self.command)
        env = b"".join(_raw(f"{key}={value}") + b"\0" for key, value in self.env)
        head = (self.number, int(self.timeout_s * 1000), self.cap, direct, self.stdin is not None)
        parts = (_raw(self.session), command, env, _raw(self.cwd), _raw(self.user), self.stdin or b"")
        return struct.pack("<QIIII", *head) + b"".join(map(_bytes, parts))


@dataclass(frozen=True, slots=True)
class ActionResult:
    """``code``: exit status or ``$?``, 124 when it was ended by the clock or by request, 128+signal when its process
    was killed by ``signal``. ``*_bytes`` count what was written, also what was not kept. ``max_rss_kb``: 0 when it
    ran in a session, whose children are the shell's own to wait for."""

    code: int
    signal: int
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    ms: int
    user_us: int
    system_us: int
    max_rss_kb: int
    flags: int

    @property
    def timed_out(self) -> bool:
        return bool(self.flags & TIMED_OUT)

    @property
    def stopped(self) -> bool:
        return bool(self.flags & STOPPED)

    @property
    def shell_ended(self) -> bool:
        return bool(self.flags & SHELL_ENDED)

    @property
    def unkilled(self) -> bool:
        return bool(self.flags & UNKILLED)

    @property
    def truncated(self) -> bool:
        return bool(self.flags & (OUT_CUT | ERR_CUT))


@dataclass(frozen=True, slots=True)
class PathRead:
    """Of a file: ``data`` from the offset asked for, ``size`` as a whole. Of a folder: names that end in NUL."""

    data: bytes
    size: int
    mode: int


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
        """Raises AgentError for an agent of another version of ours, which would read our requests wrongly."""
        status = AgentStatus(*_unpack("<IIIQ", self._ask(b"P", b"", b"p", timeout_s)))
        if status.protocol != PROTOCOL:
            raise AgentError(
                f"its agent speaks protocol {status.protocol}, this envkeeper {PROTOCOL}",
                remedy="go on with the version of envkeeper that made the sandbox",
            )
        return status

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
            except OSError as why:
                if monotonic() > end:
                    raise SandboxLost(f"the agent did not listen within {timeout_s:g} s ({why})") from why
            # The socket appears within a millisecond of the start; the pidfd wakes us if it never will.
            if _readable(self._pidfd, 2):
                raise SandboxLost("the agent ended before it listened", remedy="see the container's log")

    def run(self, action: Action) -> ActionResult:
        """Run one action to its end. Raises SandboxLost when the sandbox dies meanwhile: then what the action did is
        unknown; AgentError when nothing was begun. The agent enforces the timeout; our own deadline beyond it only
        finds a hung agent."""
        streams = {kind: bytearray() for kind in (b"o", b"e", b"O", b"E")}
        end = monotonic() + action.timeout_s + _KILL_S if action.timeout_s else None
        with self._connect() as sock:
            self._send(sock, b"X", action.encode())
            reader = _Frames(sock, self._pidfd)
            while True:
                kind, data = reader.next(end)
                if kind in streams:
                    streams[kind] += data
                elif kind == b"r":
                    reader.to_end(end)
                    return _result(data, streams)
                else:
                    reader.to_end(end)
                    raise AgentError(data.decode(errors="replace"))

    def stop(self, number: int, timeout_s: float = 5.0) -> None:
        """End action ``number`` now, with all that it started; its own call gets the result."""
        self._ask(b"K", struct.pack("<Q", number), b"k", timeout_s)

    def write_file(
        self, number: int, path: str, data: bytes, mode: int, user: str, append: bool, timeout_s: float = 60.0
    ) -> None:
        """Below the sandbox's own root, whatever symlinks say. A new file appears whole."""
        body = struct.pack("<QII", number, int(append), mode) + b"".join(map(_bytes, (_raw(user), _raw(path), data)))
        self._ask(b"W", body, b"k", timeout_s)

    def make_folder(self, number: int, path: str, mode: int, user: str, timeout_s: float = 60.0) -> None:
        """One that is there already stays as it is. AgentError from an agent older than this request."""
        body = struct.pack("<QI", number, mode) + b"".join(map(_bytes, (_raw(user), _raw(path))))
        self._ask(b"D", body, b"k", timeout_s)

    def read_path(self, path: str, offset: int, most: int, timeout_s: float = 60.0) -> PathRead:
        data, end = bytearray(), monotonic() + timeout_s
        with self._connect() as sock:
            self._send(sock, b"R", struct.pack("<QI", offset, most) + _bytes(_raw(path)))
            reader = _Frames(sock, self._pidfd)
            while True:
                kind, part = reader.next(end)
                if kind == b"d":
                    data += part
                    continue
                reader.to_end(end)
                if kind == b"z":
                    return PathRead(bytes(data), *_unpack("<QI", part))
                raise AgentError(part.decode(errors="replace"))

    def _ask(self, kind: bytes, body: bytes, expect: bytes, timeout_s: float) -> bytes:
        end = monotonic() + timeout_s
        with self._connect() as sock:
            self._send(sock, kind, body)
            reader = _Frames(sock, self._pidfd)
            got, data = reader.next(end)
            reader.to_end(end)
        if got != expect:
            raise AgentError(data.decode(errors="replace") or f"the agent answered {got!r} to {kind!r}")
        return data

    @contextlib.contextmanager
    def _connect(self) -> Iterator[socket.socket]:
        with self._connected() as sock:
            self._open.add(sock)
            try:
                yield sock
            finally:
                self._open.discard(sock)

    def _connected(self) -> socket.socket:
        """Raises AgentError where the host had nothing left for a connection: then nothing was asked."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                sock.connect(self._path)
            except OSError:
                sock.close()
                raise
        except OSError as why:
            if _readable(self._pidfd):
                raise SandboxLost("the sandbox is dead") from why
            if why.errno in SHORT:
                raise AgentError(f"the host could not ask its agent: {why}", remedy=AGAIN) from why
            raise
        return sock

    @staticmethod
    def _send(sock: socket.socket, kind: bytes, body: bytes) -> None:
        try:
            sock.sendall(struct.pack("<I", len(body) + 1) + kind + body)
        except (BrokenPipeError, ConnectionResetError) as why:
            raise SandboxLost("the sandbox died while it was being asked") from why


def _raw(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def _unpack(form: str, data: bytes) -> tuple[Any, ...]:
    """What runs in the sandbox may have taken the agent's socket: its garbage must not be ours."""
    try:
        return struct.unpack(form, data)
    except struct.error as why:
        raise SandboxLost(f"what answers in its agent's place is not the agent: {why}") from why


def _bytes(data: bytes) -> bytes:
    return b"".join((struct.pack("<I", len(data)), data, b"\0"))


def _result(data: bytes, streams: dict[bytes, bytearray]) -> ActionResult:
    code, signal, flags, ms, out_bytes, err_bytes, user, system, rss = _unpack("<iIIIQQQQQ", data)
    out = _joined(streams[b"o"], streams[b"O"], out_bytes)
    err = _joined(streams[b"e"], streams[b"E"], err_bytes)
    return ActionResult(code, signal, out, err, out_bytes, err_bytes, ms, user, system, rss, flags)


def _joined(head: bytearray, tail: bytearray, total: int) -> bytes:
    """What was left out is said in its place: a cut must never read like the program's own words."""
    missing = total - len(head) - len(tail)
    return b"".join((head, b"\n[belayer: %d bytes left out]\n" % missing if missing else b"", tail))


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
