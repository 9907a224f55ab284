"""Where second copies of descriptors are kept: systemd's FD store, or the holder process.

Both outlive the owner's kill and give everything back by name. Which one is named at the start, never guessed.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from belayer.errors import HostUnfit
from belayer.procs import wait_dead
from belayer.seqpacket import recv_fds
from gpuowner import holder
from gpuowner.keeping import StoreLost

_ANSWER_S = 2.0  # a holder that takes longer hangs, and holds the owner up meanwhile
_END_S = 10.0  # the kernel may have gigabytes to give back
_LISTEN_FDS_START = 3  # sd_listen_fds(3)

Found = dict[str, int]


class HolderStore:
    """Client of a holder; starts one where none listens."""

    def __init__(self, path: Path, *, start: bool = True) -> None:
        """Raises StoreLost when a holder is there and does not answer: its copies must not be given up by starting
        another one over it."""
        self._path = path
        try:
            self._sock = self._connect()
        except (FileNotFoundError, ConnectionRefusedError):
            if not start:
                raise
            _start(path)
            self._sock = self._connect()
        self.pid, _, _ = _credentials(self._sock)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            raise
        return sock

    def describe(self) -> str:
        return f"holder pid {self.pid}"

    def fileno(self) -> int:
        """Readable when the holder has gone; it never speaks unasked."""
        return self._sock.fileno()

    def put(self, name: str, fd: int) -> None:
        self._ask(b"P" + name.encode(), [fd])

    def drop(self, name: str) -> None:
        self._ask(b"D" + name.encode(), [])

    def all(self) -> Found:
        """Everything it keeps, as new descriptors of ours. Raises StoreLost."""
        found: Found = {}
        try:
            self._sock.send(b"L")
            while True:
                data, fds, _ = recv_fds(self._sock, holder.MAX_PACKET, 1)
                if data == b"." or not data:
                    break
                found[data[1:].decode()] = fds[0]
        except OSError as why:
            _close_all(found)
            raise StoreLost(f"the holder at {self._path} does not answer: {why}") from why
        if not data:
            _close_all(found)
            raise StoreLost(f"the holder at {self._path} ended while it listed its copies")
        return found

    def end(self) -> None:
        """End it, and see it dead: its socket and what no process has open any more are gone. Raises StoreLost."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as why:
            raise StoreLost(f"the holder at {self._path} (pid {self.pid}) has ended already") from why
        try:
            self._ask(b"E", [])
            if wait_dead([pidfd], _END_S):
                raise StoreLost(
                    f"the holder at {self._path} (pid {self.pid}) is not dead {_END_S:g} s after its answer"
                )
        finally:
            os.close(pidfd)

    def _ask(self, request: bytes, fds: list[int]) -> None:
        try:
            socket.send_fds(self._sock, [request], fds)
            answer = self._sock.recv(64)
        except OSError as why:
            raise StoreLost(f"the holder at {self._path} does not answer: {why}") from why
        if answer != b"+":
            raise StoreLost(f"the holder at {self._path} said {answer!r} to {request[:1]!r}")

    def close(self) -> None:
        self._sock.close()


def end_holder(path: Path) -> None:
    """End the holder at ``path``, if one listens there. Raises StoreLost when it does not answer."""
    try:
        store = HolderStore(path, start=False)
    except (FileNotFoundError, ConnectionRefusedError):
        path.unlink(missing_ok=True)
        return
    store.end()
    store.close()


def _start(path: Path) -> None:
    command = [sys.executable, "-I", "-S", holder.__file__, str(path)]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        start_new_session=True,
        check=False,
    )
    if done.returncode != 0:
        raise StoreLost(f"no holder could be started: {done.stderr.strip()[-300:]}")


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = (int.from_bytes(raw[at : at + 4], sys.byteorder) for at in (0, 4, 8))
    return pid, uid, gid


def _close_all(found: Found) -> None:
    for fd in found.values():
        os.close(fd)


class SystemdStore:
    """systemd's FD store (sd_notify(3), FDSTORE=1; the unit needs FileDescriptorStoreMax)."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        if not self._address:
            raise HostUnfit(
                "the FD store of systemd was asked for, and NOTIFY_SOCKET is not set",
                remedy="start gpuowner by its unit, or with --store holder",
            )

    def describe(self) -> str:
        return "systemd"

    def put(self, name: str, fd: int) -> None:
        # A memfd has no end that could be polled for; without FDPOLL=0 an older systemd may drop what it cannot poll.
        self._notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])
        self._barrier()

    def drop(self, name: str) -> None:
        self._notify(f"FDSTOREREMOVE=1\nFDNAME={name}", [])
        self._barrier()

    def all(self) -> Found:
        """What systemd handed over at our start (sd_listen_fds(3)); later calls find nothing."""
        names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
        count = int(os.environ.pop("LISTEN_FDS", "0"))
        if os.environ.pop("LISTEN_PID", "") != str(os.getpid()):
            return {}
        found = {names[at]: _LISTEN_FDS_START + at for at in range(count)}
        for fd in found.values():
            os.set_inheritable(fd, False)
        return found

    def _barrier(self) -> None:
        """Until systemd has worked off what was sent: it closes its copy of the pipe then (sd_notify_barrier(3)).
        Without it a descriptor of a process that is killed right after would never be stored."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            self._notify("BARRIER=1", [theirs])
        finally:
            os.close(theirs)
        poll = select.poll()
        poll.register(ours, 0)
        done = poll.poll(_ANSWER_S * 1000)
        os.close(ours)
        if not done:
            raise StoreLost("systemd did not take a descriptor in time")

    def _notify(self, text: str, fds: list[int]) -> None:
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            try:
                sock.connect(address)
                socket.send_fds(sock, [text.encode()], fds)
            except OSError as why:
                raise StoreLost(f"systemd's notify socket: {why}") from why
