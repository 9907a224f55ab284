"""What a front end asks of the router's heart, and what it hears from it.

There is one heart per host (core, journal, links, fleet), and one front end or several. In the router's own process a
front end holds a ``LocalHeart``; in a process of its own it holds a ``RemoteHeart``, which speaks to the ``FrontDoor``
of the router. Both pass one contract test (tests/contract/test_hearts.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from belayer.errors import BelayerError
from belayerd.router import events as ev


class Known(msgspec.Struct, frozen=True):
    """What is known of a client's id. ``heard``: somebody hears the running request. ``tokens``: the highest
    position from which the rest may be asked for, -1: there is none."""

    running: bool = False
    heard: bool = False
    tokens: int = -1


class Heart(Protocol):
    """Methods that do not wait are performed in the order in which they are called."""

    declined: Counter[str]  # requests that were not let in, by reason
    mistakes: Counter[int]  # answers 4xx, by status

    def add(self, event: ev.Add) -> None:
        """A request. That it is refused is told to ``Ears.refuse``: nobody waits here, so a client that leaves cannot
        fall between the request and the answer."""

    def abort(self, request_ids: Iterable[str], left: bool = True) -> None: ...

    async def full(self) -> bool:
        """True while as many requests are live or let in, over all fronts, as may be."""

    async def admit(self, place: str, count: int) -> bool:
        """Keep room for so many requests under a name of the caller's; False when there is less. Each ``add`` that
        names the place takes one; ``leave`` gives back what nobody took."""

    def leave(self, place: str) -> None: ...

    async def known(self, names: Sequence[str]) -> Known:
        """Of the first of these names that is running; else of the first that ended and can be asked for."""

    async def serving(self, slot: str) -> bool:
        """True while a worker of ``slot`` ("": of any slot of this host) serves."""

    async def slots(self, within_s: float, slot: str) -> list[str]:
        """The slots that serve (or ``slot`` alone), once there is one. Raises NoHealthySlot after ``within_s``."""

    async def call(self, slot: str, call_id: int, frames: Sequence[bytes], within_s: float = 0.0) -> Any:
        """An admin call to the worker of ``slot``: vLLM's UtilityOutput. ``call_id``: no other call under way has it.
        ``within_s``: how long its caller gives it (0: it does not say). Raises WorkerGone when there is no worker, or
        it was lost before it answered."""

    async def pausing(self, slots: Sequence[str], paused: bool) -> None:
        """These slots were paused (or resumed) by a trainer: workers that join are brought to it."""


class Ears(Protocol):
    """A front end. What it is told about one reader comes in the order in which it happened."""

    def deliver(self, slot: str, generation: int, outputs: Any) -> None: ...

    def replay(self, told: ev.Replay) -> None:
        """Tell this reader what is known already, before anything that is delivered to it later."""

    def cut(self, reader: str) -> None:
        """End it with what it has, as an aborted one."""

    def fail(self, reader: str, error: BelayerError) -> None: ...

    def refuse(self, reader: str, error: BelayerError) -> None:
        """The request was never taken."""

    def ready(self, payload: bytes) -> None:
        """What the first worker said of itself. Raises BadMessage when it cannot be read."""
