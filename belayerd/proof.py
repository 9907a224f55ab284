"""A fault that is made on purpose is proven: one that did not happen proves nothing."""

from __future__ import annotations

import asyncio
import os
import signal

from belayer import procs
from belayer.clock import Stopwatch
from belayer.errors import HandoverFailed, Refused, WorkerGone
from belayer.messages.common import FaultProof

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_STOPPED = frozenset("Tt")
_SEEN_S = 5.0


def signal_of(kind: str) -> signal.Signals:
    """Raises Refused for what is no fault of a process."""
    if kind not in _SIGNALS:
        raise Refused(f"no fault {kind!r} of a process", remedy=" or ".join(_SIGNALS))
    return _SIGNALS[kind]


async def inject(pidfd: int, pid: int, kind: str, target: str) -> FaultProof:
    """Kill or stop a process and see it. ``target``: what it is called. Raises WorkerGone when it had just ended,
    HandoverFailed when the fault is not seen within five seconds."""
    number, watch, fd = signal_of(kind), Stopwatch(), os.dup(pidfd)
    try:
        signal.pidfd_send_signal(fd, number)
        seen = await asyncio.to_thread(_prove, fd, pid, kind)
    except ProcessLookupError as why:
        raise WorkerGone(f"{target} (pid {pid}) has just ended by itself", kept="nothing was injected") from why
    finally:
        os.close(fd)
    return FaultProof(fault=kind, target=target, pid=pid, seen=seen, ms=watch.ms())


def _prove(pidfd: int, pid: int, kind: str) -> str:
    """Blocking: until the fault is seen."""
    if kind == "kill":
        if procs.wait_dead([pidfd], _SEEN_S):
            raise HandoverFailed(f"pid {pid} did not die of SIGKILL in {_SEEN_S:g} s")
        return f"pid {pid}: pidfd readable, process has ended"
    watch = Stopwatch()
    while watch.ms() < _SEEN_S * 1e3:
        now = procs.state(pid)
        if now in _STOPPED:
            return f"pid {pid}: state {now} in /proc"
        if not now:
            raise HandoverFailed(f"pid {pid} ended before it could be stopped")
    raise HandoverFailed(f"pid {pid} was not stopped in {_SEEN_S:g} s (state {procs.state(pid)})")
