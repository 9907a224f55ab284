"""The router's heart as a front end sees it in the same process, and the shell's sink before all fronts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from belayer.errors import BelayerError, WorkerGone
from belayerd.router import events as ev
from belayerd.router.heart import Ears, Known
from belayerd.router.shell import Shell

_NOBODY = 0  # call id of calls whose answer nobody waits for; real ones are never 0
FRONT = 0  # by this the workers know this router, however many fronts it has


class LocalHeart:
    """``codec``: vllm_codec's. ``slots``: the names in the configuration. ``most``: requests that may be live. Attach
    shell and ears before anything else."""

    def __init__(self, codec: Any, slots: Sequence[str], most: int) -> None:
        self._codec, self._all, self._most = codec, tuple(slots), most
        self.declined: Counter[str] = Counter()
        self.mistakes: Counter[int] = Counter()
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # call id -> slot, answer
        self._paused: set[str] = set()  # slots that a trainer has paused
        self._places: dict[str, int] = {}  # of requests that were let in and are not here yet, by their name
        self._kept = 0  # sum of these
        self.first_ready: bytes | None = None
        self._shell: Shell
        self._ears: Ears

    def attach(self, shell: Shell, ears: Ears) -> None:
        """Complete the circle: the shell has this as its sink."""
        self._shell, self._ears = shell, ears

    # -- what a front end asks --------------------------------------------------------------------------------

    def add(self, event: ev.Add) -> None:
        self._take(event.place)
        try:
            self._shell.add(event)
        except BelayerError as error:
            refused = self._shell.core.counters.refused
            refused[error.code] = refused.get(error.code, 0) + 1
            self._ears.refuse(event.request_id, error)

    def abort(self, request_ids: Iterable[str], left: bool = True) -> None:
        self._shell.abort(request_ids, left)

    async def full(self) -> bool:
        return self.is_full()

    def is_full(self, by: int = 1) -> bool:
        """True when ``by`` more would be too many. One place counts for all fronts and all hosts."""
        return len(self._shell.core.requests) + self._kept + by > self._most

    async def admit(self, place: str, count: int) -> bool:
        if self.is_full(count):
            return False
        self._places[place] = count
        self._kept += count
        return True

    def _take(self, place: str) -> None:
        left = self._places.pop(place, 0)
        if left:
            self._kept -= 1
        if left > 1:
            self._places[place] = left - 1

    def holds(self, place: str) -> bool:
        return place in self._places

    def leave(self, place: str) -> None:
        self._kept -= self._places.pop(place, 0)

    async def known(self, names: Sequence[str]) -> Known:
        core = self._shell.core
        for name in names:
            if name in core.named:
                running = core.requests[core.named[name]]
                return Known(True, bool(running.readers), running.told)
        past = next((one for name in names if (one := core.archive.get(name)) is not None), None)
        return Known() if past is None else Known(tokens=past.known)

    async def serving(self, slot: str) -> bool:
        serving = self._shell.serving_slots()
        return slot in serving if slot else self._shell.core.serving > 0

    async def slots(self, within_s: float, slot: str) -> list[str]:
        return await self._shell.some_slot(within_s, slot)

    async def call(self, slot: str, call_id: int, frames: Sequence[bytes], within_s: float = 0.0) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = slot, future
        try:
            self._shell.call_utility(frames, slot, call_id, within_s)
            return await future
        finally:
            del self._calls[call_id]

    async def pausing(self, slots: Sequence[str], paused: bool) -> None:
        named = set(slots or self._all)
        self._paused = self._paused | named if paused else self._paused - named
        self._shell.paused(bool(self._paused))

    def front_lost(self, readers: Iterable[str]) -> int:
        """How many requests ended with it: nobody could ask for them."""
        before = self._shell.core.counters.aborted
        self._shell.front_lost(readers)
        return self._shell.core.counters.aborted - before

    # -- what the shell tells ---------------------------------------------------------------------------------

    def deliver(self, slot: str, generation: int, outputs: Any) -> None:
        self._ears.deliver(slot, generation, outputs)

    def replay(self, told: ev.Replay) -> None:
        self._ears.replay(told)

    def cut(self, reader: str) -> None:
        self._ears.cut(reader)

    def fail(self, reader: str, error: BelayerError) -> None:
        self._ears.fail(reader, error)

    def welcome(self, slot: str, ready: bytes) -> list[tuple[bytes, ...]]:
        if self.first_ready is None:  # vLLM sums cache blocks per response; workers of one model are alike
            self._ears.ready(ready)
            self.first_ready = ready
        if slot not in self._paused:
            return []
        # A trainer paused the engines: a worker that comes meanwhile must not run. "keep": it aborts nothing.
        return [tuple(self._codec.encode((FRONT, _NOBODY, "pause_scheduler", ("keep", False))))]

    def utility(self, slot: str, outputs: Any) -> None:
        output = outputs.utility_output
        _, future = self._calls.get(output.call_id, ("", None))
        if future is not None and not future.done():  # else the caller has left, or there never was one
            future.set_result(output)

    def left(self, slot: str) -> None:
        for asked, future in self._calls.values():
            if asked == slot and not future.done():
                future.set_exception(WorkerGone(f"the worker of {slot} was lost before it answered"))
