"""Deaths of the router's fronts: incidents, and an alert when they repeat.

The router keeps the last deaths of each front and tells them with its status. Each has a name that is never given
twice, so a death is written once, whatever befell belayerd meanwhile; its end is added when the next life serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from belayer.errors import Refused
from belayer.messages.control import Incident, StepTiming
from belayer.messages.router import FrontDeath, RouterStatusReply
from belayerd.records import Records

_PLACE = "router/front"  # no slot can have this name
OPEN, SERVED, GONE = "open", "served", "ended with its router"
_LOOKED_AT = 1000  # incidents that are looked through for open ones of an earlier router


def incident(front: int, death: FrontDeath) -> Incident:
    """Generations are the lives of the front."""
    served = death.served_ms >= 0
    steps = [StepTiming(step="1 let go", ms=death.let_go_ms, detail=f"{death.requests} requests, {death.ended} ended")]
    if death.forked_ms >= 0:
        steps.append(StepTiming(step="2 forked", ms=death.forked_ms - death.let_go_ms))
    if served:
        steps.append(StepTiming(step="3 serves", ms=death.served_ms - max(0.0, death.forked_ms)))
    return Incident(
        incident_id=f"front-{death.life}",
        slot=f"{_PLACE}{front}",
        at=death.at,
        cause=death.cause,
        detail=death.said(),
        from_generation=death.number,
        to_generation=death.number + served,
        outcome=SERVED if served else OPEN,
        steps=tuple(steps),
        total_ms=max(0.0, death.served_ms),
        injected=death.injected,
    )


def repeated(deaths: Sequence[FrontDeath], window_s: float) -> frozenset[str]:
    """The lives whose end is to be told aloud: those that ended within ``window_s`` of another end, of whichever front
    (a client that repeats what kills a front does it at the next one), and of a row of such ends the first. ``deaths``
    in the order of their times."""
    told: set[str] = set()
    again = False
    for before, death in pairwise(deaths):
        again, was = death.at - before.at < window_s, again
        if again and not was:
            told.add(death.life)
    return frozenset(told)


class FrontDeaths:
    """``alert`` gets the number of the life that ended, and a sentence."""

    def __init__(self, incidents: Records, alert: Callable[[int, str], None], window_s: float, log: Any) -> None:
        self._incidents, self._alert, self._window_s, self._log = incidents, alert, window_s, log
        self._written: dict[str, str] = {}  # outcome by incident, of those that the router still tells
        self._instance = ""

    def look(self, status: RouterStatusReply) -> None:
        rows = [(row.front, death) for row in status.fronts for death in row.deaths]
        rows.sort(key=lambda row: row[1].at)
        aloud = repeated([death for _, death in rows], self._window_s)
        written: dict[str, str] = {}
        for front, death in rows:
            told = incident(front, death)
            written[told.incident_id] = told.outcome
            before = self._written.get(told.incident_id) or self._incidents.outcome(told.incident_id)
            if before == told.outcome:
                continue
            if not before:
                self._new(front, death, death.life in aloud)
            self._incidents.put(told)  # after the alert: a belayerd that is killed here tells it again, and not never
        self._written = written
        if status.instance != self._instance:
            self._instance = status.instance
            self._end_those_of_before()

    def _new(self, front: int, death: FrontDeath, aloud: bool) -> None:
        self._log.warning("front of the router died", front=front, cause=death.cause, why=death.said())
        if aloud:
            which = f"front {front} of the router died, and another end of a front was less than"
            self._alert(death.number, f"{which} {self._window_s:g} s before: {death.said()}")

    def _end_those_of_before(self) -> None:
        """Nobody else will: their router took their next lives with it."""
        try:
            rows = self._incidents.latest(_LOOKED_AT)
        except Refused as why:
            self._log.warning("open incidents of an earlier router stay open", why=str(why))
            return
        for row in rows:
            if row.slot.startswith(_PLACE) and row.outcome == OPEN and row.incident_id not in self._written:
                self._incidents.put(msgspec.structs.replace(row, outcome=GONE))
