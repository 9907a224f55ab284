"""Calls that know which life of a daemon took them: one that ends before it answers is seen, and not waited for."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import TypeVar

import msgspec

from belayer.clock import monotonic
from belayer.errors import DaemonUnreachable
from belayer.rpc import SyncClient

R = TypeVar("R", bound=msgspec.Struct)

Life = tuple[int, int]

_LOOK_S = 0.05


def life_of(sock: Path) -> Life | None:
    """Which life of the daemon listens, by its socket's file (each life binds anew); None when none does. A killed one
    leaves the file behind, a stopped one still has connections queued for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        try:
            seen = sock.stat()
            probe.connect(str(sock))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except BlockingIOError:
            pass  # its queue is full: it is there
    return seen.st_ino, seen.st_ctime_ns


def call_one_life(sock: Path, message: msgspec.Struct, reply: type[R], timeout: float, coming_s: float) -> R:
    """As rpc.call_sync, and DaemonUnreachable as soon as the daemon that was asked has ended. For what must not be done
    twice: whether it was done is unknown then. ``timeout``, and of it ``coming_s`` for a daemon that is not there yet,
    in seconds."""
    end = monotonic() + timeout
    life = _wait_for_one(sock, monotonic() + min(timeout, coming_s))
    return _call(sock, life, message, reply, end)


def call_any_life(sock: Path, message: msgspec.Struct, reply: type[R], timeout: float) -> R:
    """As ``call_one_life`` for what may be done twice: when the daemon ends before it answers, the next life is waited
    for and asked, until ``timeout`` seconds are over."""
    end = monotonic() + timeout
    while True:
        life = _wait_for_one(sock, end)
        try:
            return _call(sock, life, message, reply, end)
        except DaemonUnreachable:
            if life_of(sock) == life:
                raise  # it lives, and has no answer


def _wait_for_one(sock: Path, end: float) -> Life:
    pause = threading.Event()
    while (life := life_of(sock)) is None:
        if monotonic() >= end:
            raise DaemonUnreachable(f"no daemon listens at {sock}", remedy="start the daemon, or set BELAYER_ROOT")
        pause.wait(_LOOK_S)
    return life


def _call(sock: Path, life: Life, message: msgspec.Struct, reply: type[R], end: float) -> R:
    client = SyncClient(sock)
    try:
        return client.call(message, reply, max(end - monotonic(), 0.0), lambda: life_of(sock) == life)
    finally:
        client.close()
