"""Killing the workers of a router host again and again, as long as there is work: what the load test and its benchmark
share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.support.router_host import FakeWorker, RouterHost


class Killer:
    """Holds one serving worker and one spare for each slot. Each kill is seen dead and told as belayerd tells it."""

    def __init__(self, host: RouterHost, slots: list[str], *args: str) -> None:
        self._host, self._slots, self._args = host, slots, args
        self._serving: dict[str, FakeWorker] = {slot: host.worker(slot, *args) for slot in slots}
        self._spare: dict[str, FakeWorker] = {slot: host.worker(slot, *args, register=False) for slot in slots}
        self.kills = 0

    def kill(self) -> None:
        """The next slot in turn. Blocks for as long as a handover does, and for the start of the next spare."""
        slot = self._slots[self.kills % len(self._slots)]
        victim = self._serving[slot]
        victim.kill()
        self._host.unregister(victim)
        self._serving[slot] = self._spare[slot]
        self._host.register(self._serving[slot])
        self.kills += 1
        self._spare[slot] = self._host.worker(slot, *self._args, register=False)

    async def run(self, due: Callable[[], Awaitable[bool]]) -> None:
        """Kill each time that ``due`` says True; end when it says False. Never cancel it: a kill runs in a thread."""
        while await due():
            await asyncio.to_thread(self.kill)
