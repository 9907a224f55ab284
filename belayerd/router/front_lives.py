"""What is told of one front: the life that runs, and how the last ones ended. Pure; times are given.

``now`` is monotonic seconds, ``at`` Unix seconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from belayer.messages.router import FrontDeath, RouterFront

KEPT = 8  # deaths of a front that are told; belayerd, which asks twice a second, writes them down
DIED, GIVEN_UP = "death", "given up"


class LetGo(NamedTuple):
    """The requests that a dead front heard, how many of them ended in the engine, and the milliseconds of it."""

    requests: int = 0
    ended: int = 0
    ms: float = 0.0


@dataclass
class Lives:
    """``name`` "": no life runs. A life ``begins``, is ``born`` (forked), ``serves``, is ``lost`` (seen dead) and has
    ``ended`` (it is known how), in this order; any but the first and the last may be missing."""

    front: int
    name: str = ""
    pid: int = 0
    since: float = 0.0
    count: int = 0
    deaths: deque[FrontDeath] = field(default_factory=lambda: deque(maxlen=KEPT))
    _began: float = 0.0
    _lost: tuple[LetGo, float, float] | None = None
    _injected: bool = False
    _died: dict[str, float] = field(default_factory=dict)  # when, by life, of those that no life has followed yet

    def begins(self, name: str, now: float, at: float) -> None:
        self.name, self.pid, self.since, self._began = name, 0, at, now
        self.count += 1
        self._lost, self._injected = None, False

    def born(self, pid: int, now: float) -> None:
        self.pid = pid
        self._follow("forked_ms", now)

    def serves(self, now: float) -> None:
        self._follow("served_ms", now)
        self._died.clear()

    def broken_on_purpose(self) -> None:
        self._injected = True

    def lost(self, let_go: LetGo, now: float, at: float) -> None:
        if self._lost is None:
            self._lost = let_go, now, at

    def ended(self, cause: str, why: str, now: float, at: float) -> FrontDeath:
        let_go, lost_now, lost_at = self._lost or (LetGo(), now, at)
        death = FrontDeath(
            life=self.name,
            number=self.count,
            pid=self.pid,
            at=lost_at,
            cause=cause,
            why=why,
            lived_s=lost_now - self._began,
            requests=let_go.requests,
            ended=let_go.ended,
            let_go_ms=let_go.ms,
            injected=self._injected,
        )
        self.deaths.append(death)
        self._died[self.name] = lost_now
        self.name, self.pid = "", 0
        return death

    def view(self, state: str, streams: int = 0, requests: int = 0, unread: int = 0) -> RouterFront:
        return RouterFront(
            front=self.front,
            state=state,
            pid=self.pid if self._lost is None else 0,
            since=self.since,
            streams=streams,
            requests_total=requests,
            unread=unread,
            restarts=max(0, self.count - 1),
            deaths=tuple(self.deaths),
        )

    def _follow(self, what: str, now: float) -> None:
        """Of each death that was not followed so far, how long this took."""
        for place, death in enumerate(list(self.deaths)):
            if death.life in self._died and getattr(death, what) < 0:
                ms = (now - self._died[death.life]) * 1e3
                self.deaths[place] = msgspec.structs.replace(death, **{what: ms})
