"""The frame of every daemon: one instance, signals, readiness, and what an exit code means.

Three kinds of trouble, three treatments: an operator's mistake is one sentence and exit 2; an expected fault is an
event inside the daemon; a broken invariant ends it at once with its traceback (systemd starts it again and it
re-adopts what runs, promise O1).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from belayer import refusals
from belayer.errors import AlreadyRuns, BelayerError, ConfigInvalid, DaemonUnreachable, HostNotReady, HostUnfit

EXIT_REFUSED = 1
EXIT_CONFIG = 2
EXIT_UNREACHABLE = 3

Main = Callable[[asyncio.Event], Awaitable[None]]


def new_instance() -> str:
    """Differs in each life of a daemon."""
    return secrets.token_hex(4)


def notify(state: str) -> None:
    """sd_notify(3) without a library; silent when not under systemd."""
    target = os.environ.get("NOTIFY_SOCKET")
    if not target:
        return
    address = "\0" + target[1:] if target.startswith("@") else target
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.connect(address)
        sock.send(state.encode())


class OnlyOne:
    """flock(2) on ``run/<name>.lock``: the kernel frees it on SIGKILL, so a second daemon never guesses."""

    def __init__(self, run: Path, name: str) -> None:
        self._fd = os.open(run / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as why:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise AlreadyRuns(
                f"{name} already runs below {run} (pid {holder})",
                remedy="stop it, or set another BELAYER_ROOT",
            ) from why
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        refusals.clear(run, name)

    def fileno(self) -> int:
        """A child that is forked and not executed closes it: it would keep the lock when this process is dead."""
        return self._fd


class Told:
    """Says why this daemon does not start: on stderr, and to who asks later why nobody answers. ``name``: of its lock
    below ``run``."""

    def __init__(self, run: Path, name: str) -> None:
        self._run, self._name = run, name

    def say(self, error: BelayerError) -> int:
        code = say(error)
        if not isinstance(error, AlreadyRuns):
            refusals.leave(self._run, self._name, code, str(error))
        return code


def run(main: Main, told: Told | None = None) -> int:
    """Run ``main(stop)`` until it ends or a signal sets ``stop``; returns the exit code. ``told``: of a daemon, which
    others ask for."""
    to_say = say if told is None else told.say
    try:
        asyncio.run(_run(main))
    except (ConfigInvalid, HostUnfit) as error:
        return to_say(error)
    except BaseExceptionGroup as group:
        # A task group wraps what its tasks raise; an operator's mistake inside is still one sentence.
        mistakes, broken = group.split((ConfigInvalid, HostUnfit))
        if mistakes is None or broken is not None:
            raise
        return to_say(_first(mistakes))
    return 0


async def _run(main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await main(stop)
    notify("STOPPING=1")


def _first(group: BaseExceptionGroup[BaseException]) -> BelayerError:
    inner = group.exceptions[0]
    if isinstance(inner, BaseExceptionGroup):
        return _first(inner)
    assert isinstance(inner, BelayerError)
    return inner


def say(error: BelayerError) -> int:
    """One sentence on stderr; the exit code of design.md section 5."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    print(f"{name}: {error}", file=sys.stderr)
    if isinstance(error, HostNotReady | DaemonUnreachable):
        return EXIT_UNREACHABLE
    return EXIT_CONFIG if isinstance(error, ConfigInvalid | HostUnfit) else EXIT_REFUSED


async def serve_until(stop: asyncio.Event, *services: Awaitable[None]) -> None:
    """Run all services in one task group until ``stop``; one that fails ends them all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_forever(service)) for service in services]
        await stop.wait()
        for task in tasks:
            task.cancel()


async def _forever(service: Awaitable[None]) -> None:
    await service


async def feed_watchdog() -> None:
    """A service that tells systemd that the event loop turns, three times as often as WatchdogSec asks for it; for ever
    (sd_watchdog_enabled(3)). Nothing where no watchdog was asked for."""
    period = int(os.environ.get("WATCHDOG_USEC", "0")) / 3e6
    while period:
        notify("WATCHDOG=1")
        await asyncio.sleep(period)
    await asyncio.Event().wait()
