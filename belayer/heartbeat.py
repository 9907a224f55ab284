"""The heartbeat file: its mtime moves because the scheduler loop itself wrote it.

The writer is the worker's one loop, never a helper thread: a beat is proof of progress, not of a running process.
The reader watches for *change* and ages it by its own monotonic clock: an mtime is wall time and may jump
(ZeroMQ guide ch. 4; paper, "file-mtime heartbeats"). A legal long phase (load, first-shape compile, long prefill)
announces a deadline before it begins; the watcher is silent until that has passed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec

# One pwrite of one fixed-size block: a reader sees the old line or the new one (page-cache copy under the inode lock).
_SIZE = 256


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one beat. ``deadline_s``: seconds from this beat in which silence is legal (0: the hang limit)."""

    phase: str
    step: int
    waiting: int
    running: int
    tokens: int
    deadline_s: float = 0.0


_PULSE: msgspec.json.Decoder[Pulse] = msgspec.json.Decoder(Pulse)


class Beat:
    """Writer. Creates the file; ``beat`` rewrites it in place, which moves its mtime. Raises OSError as it is:
    a worker that cannot beat must not look alive."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def beat(self, phase: str, step: int, waiting: int, running: int, tokens: int, deadline_s: float = 0.0) -> None:
        pulse = Pulse(phase=phase, step=step, waiting=waiting, running=running, tokens=tokens, deadline_s=deadline_s)
        line = msgspec.json.encode(pulse)
        os.pwrite(self._fd, line.ljust(_SIZE - 1) + b"\n", 0)

    def close(self) -> None:
        os.close(self._fd)


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """``age_s``: seconds of watching since the last change was seen; ``pulse`` is None before the first beat."""

    age_s: float
    pulse: Pulse | None
    steps_flat_s: float = 0.0


class Watch:
    """Reader of one heartbeat file; ``observe(now)`` is called at the watcher's own rhythm."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = str(path)  # looked at many times a second: os.stat of a Path costs four times as much
        self._stamp: tuple[int, int] | None = None
        self._changed_at = now
        self._pulse: Pulse | None = None
        self._step_at = now
        self._looked_at = now

    def observe(self, now: float, gap_s: float = math.inf) -> Observation:
        """``gap_s``: how much of the time since the last look counts. Where the whole host stood still, or the watcher
        had no core, nobody can say whether the worker could have beaten."""
        unwatched = max(0.0, now - self._looked_at - gap_s)
        self._looked_at = now
        self._changed_at += unwatched
        self._step_at += unwatched
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return Observation(age_s=now - self._changed_at, pulse=None)
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, now
            self._read(now)
        pulse = self._pulse
        stuck = pulse is not None and (pulse.waiting + pulse.running) > 0
        return Observation(
            age_s=now - self._changed_at, pulse=pulse, steps_flat_s=now - self._step_at if stuck else 0.0
        )

    def _read(self, now: float) -> None:
        try:
            fresh = _PULSE.decode(self._bytes())
        except (msgspec.DecodeError, FileNotFoundError):
            return  # created but not yet written, or swept: the change itself is what counts
        moved = self._pulse is None or fresh.step != self._pulse.step or fresh.tokens != self._pulse.tokens
        idle = fresh.waiting + fresh.running == 0
        if moved or idle or fresh.deadline_s > 0:
            self._step_at = now
        self._pulse = fresh

    def _bytes(self) -> bytes:
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, _SIZE, 0)
        finally:
            os.close(fd)
