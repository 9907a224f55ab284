"""The worker's heartbeat: written by the scheduler loop itself, twenty times in a hang limit, also when idle.

Legal silence is announced first. A step that will take long (a long prefill) announces a deadline scaled by its
number of tokens and by the slowest rate seen so far; the load and the warm-up announce the slot's start deadline.
"""

from __future__ import annotations

from belayer.clock import monotonic
from belayer.heartbeat import Beat
from belayer.messages.worker import PAUSED

_PER_LIMIT = 20  # beats: one that is late by its whole distance moves the watcher's judgement by a twentieth
_LEAST_S, _MOST_S = 0.02, 0.1  # an idle worker wakes at each beat, for nothing else
_MARGIN = 4.0  # a step may be this much slower than the slowest seen before it counts as a hang
_FIRST_RATE = 0.01  # seconds per token, before any step was timed
_WORST_RATE = 0.1  # one stalled step must not make the watcher patient for ever
_TIMED_FROM = 16  # tokens; below it a step's time says little about the time per token


class Heart:
    """``hang_limit_s``: silence that the watcher takes for a hang when nothing was announced."""

    def __init__(self, beat: Beat, hang_limit_s: float) -> None:
        self._beat, self._hang_limit_s = beat, hang_limit_s
        self.every_s = min(max(hang_limit_s / _PER_LIMIT, _LEAST_S), _MOST_S)
        self._last = 0.0
        self._rate = 0.0
        self._began, self._tokens_now = 0.0, 0
        self._announced_until = 0.0
        self.phase, self.step, self.waiting, self.running, self.tokens = "starting", 0, 0, 0, 0

    def announce(self, phase: str, deadline_s: float) -> None:
        """Beat now: up to ``deadline_s`` of silence is legal from here, until the next ``turn``."""
        self.phase, now = phase, monotonic()
        self._announced_until = now + deadline_s
        self._write(now, deadline_s)

    def turn(self, phase: str, running: int, waiting: int) -> None:
        """One turn of the loop is over."""
        now = monotonic()
        self._announced_until = 0.0
        self.running, self.waiting = running, waiting
        if phase != self.phase or now - self._last >= self.every_s:
            self.phase = phase
            self._write(now, 0.0)

    def hold(self, running: int, waiting: int, phase: str = PAUSED) -> None:
        """One turn without a step, on purpose: the beat says so, since requests that stand still are no fault here."""
        self.running, self.waiting = running, waiting
        now = monotonic()
        self._announced_until = 0.0
        if self.phase != phase or now - self._last >= self.every_s:
            self.phase = phase
            self._write(now, self._hang_limit_s)

    def step_begins(self, tokens: int) -> None:
        """Called inside a step, before the model runs with ``tokens`` tokens."""
        self.step += 1
        self._began, self._tokens_now = monotonic(), tokens
        allowance = tokens * (self._rate or _FIRST_RATE) * _MARGIN
        announced = self._announced_until - self._began
        if announced > self._hang_limit_s + allowance:
            return  # inside a longer announced phase: a shorter deadline would take legal time away
        if allowance > self._hang_limit_s / 2:
            self.phase = "prefill"
            self._write(self._began, self._hang_limit_s + allowance)

    def step_ends(self) -> None:
        if self._tokens_now >= _TIMED_FROM:
            rate = (monotonic() - self._began) / self._tokens_now
            self._rate = min(max(self._rate, rate), _WORST_RATE)

    def _write(self, now: float, deadline_s: float) -> None:
        self._last = now
        self._beat.beat(self.phase[:64], self.step, self.waiting, self.running, self.tokens, deadline_s)
