"""The thin shell around the router's core: sockets, journal, timer. It performs effects and decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import zmq.asyncio

from belayer import clock
from belayer.errors import BadMessage, BelayerError, Fenced, NoHealthySlot, WorkerGone, from_code
from belayer.messages.worker import Stamp
from belayerd.router import events as ev
from belayerd.router import journal
from belayerd.router.core import Core, Effects
from belayerd.router.link import Link
from belayerd.router.records import SlotState

HELLO_S = 5.0  # bound on connect + ready; a live worker answers within one engine step


class Codec(Protocol):
    """Between vLLM's objects and frames. ``decode`` raises BadMessage for anything that is not an output."""

    def decode(self, frames: Sequence[Any]) -> Any: ...

    def items(self, outputs: Any) -> tuple[ev.Item, ...]: ...

    def keep(self, outputs: Any, kept: Sequence[tuple[int, bool]]) -> None:
        """Leave only these positions; ``True``: resumed, so without statistics of its prefill."""


class Sink(Protocol):
    """The front end."""

    def deliver(self, slot: str, outputs: Any) -> None: ...

    def fail(self, request_id: str, error: BelayerError) -> None: ...

    def welcome(self, slot: str, ready: bytes) -> Sequence[Sequence[Any]]:
        """A worker's ready info. Returns encoded utility calls that it must get before any request (what was asked
        of its predecessors and still holds). Raises BadMessage when the info cannot be read."""

    def utility(self, slot: str, outputs: Any) -> None: ...

    def left(self, slot: str) -> None:
        """The worker of this slot is gone: no utility call to it will be answered."""


class Shell:
    """One front's connection to all workers. All methods run in one event loop."""

    def __init__(self, core: Core, book: journal.Journal, codec: Codec, sink: Sink, front: int, log: Any) -> None:
        self.core = core
        self._book, self._codec, self._sink, self._front, self._log = book, codec, sink, front, log
        self._context = zmq.asyncio.Context()
        self._links: dict[str, Link] = {}  # by worker id
        self._joining: dict[str, asyncio.Task[bytes]] = {}  # by worker id
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.serving = asyncio.Event()

    async def watch(self) -> None:
        """Raises what broke a task of this shell: then its state cannot be trusted and the daemon must end."""
        await self._broken

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (why := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(why)

    # -- from the front end -----------------------------------------------------------------------------------

    def add(self, event: ev.Add) -> None:
        self._step(event)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._step(ev.Abort(tuple(request_ids)))

    def call_utility(self, frames: Sequence[Any], slot: str) -> None:
        """Send an encoded utility call to the worker of ``slot``. Raises WorkerGone when it has none."""
        worker_id = self.core.slots[slot].worker_id
        if slot not in self.serving_slots():
            raise WorkerGone(f"slot {slot} has no worker")
        self._links[worker_id].send([b"util", *frames])

    def serving_slots(self) -> list[str]:
        return [name for name, slot in self.core.slots.items() if slot.state is SlotState.SERVING]

    async def some_slot(self, within_s: float) -> list[str]:
        """The slots that serve, once there is at least one. Raises NoHealthySlot after ``within_s``."""
        try:
            async with asyncio.timeout(within_s):
                await self.serving.wait()
        except TimeoutError as why:
            raise NoHealthySlot(f"no worker came within {within_s:g} s", remedy="see belayerctl status") from why
        return self.serving_slots()

    # -- from belayerd ----------------------------------------------------------------------------------------

    async def register(self, event: ev.Register) -> None:
        """Connect, greet, then give it its requests. Raises Fenced, WorkerGone or BadMessage."""
        self._step(event)
        joining = self._joining.get(event.worker_id)
        if joining is None:
            return  # told again, and it already serves
        try:
            ready = await asyncio.shield(joining)
            first = self._sink.welcome(event.slot, ready)
        except (WorkerGone, BadMessage):
            self._step(ev.ConnectFailed(event.slot, event.generation, event.worker_id))
            raise
        except asyncio.CancelledError as why:
            if joining.cancelled():
                raise Fenced(f"worker {event.worker_id} was replaced before it was ready") from why
            raise
        if self._joining.pop(event.worker_id, None) is not None:  # the first that waited for this greeting
            link = self._links[event.worker_id]
            for frames in first:
                link.send([b"util", *frames])
            self._run(link.read(self._on_output, self._on_torn))
        self._step(ev.Ready(event.slot, event.generation, event.worker_id))

    def unregister(self, event: ev.Unregister) -> None:
        self._step(event)

    # -- from workers -----------------------------------------------------------------------------------------

    def _on_output(self, link: Link, stamp: Stamp, frames: Sequence[Any]) -> None:
        try:
            outputs = self._codec.decode(frames)
            items = self._codec.items(outputs)
        except BadMessage as why:
            self._on_torn(link, why)
            return
        event = ev.Outputs(
            stamp.slot, stamp.generation, stamp.worker_id, stamp.seq, items, outputs.weight_version or ""
        )
        before = self.core.counters.late_messages
        kept = self._step(event)
        if self.core.counters.late_messages != before or link.worker_id not in self._links:
            return
        if outputs.utility_output is not None:
            self._sink.utility(link.slot, outputs)
            return
        self._codec.keep(outputs, kept)
        self._sink.deliver(link.slot, outputs)

    def _on_torn(self, link: Link, why: BadMessage) -> None:
        self._log.error("link_torn", slot=link.slot, worker=link.worker_id, why=str(why))
        self._step(ev.Torn(link.slot, link.worker_id))

    # -- effects ----------------------------------------------------------------------------------------------

    def _step(self, event: ev.Event) -> list[tuple[int, bool]]:
        """Let the core decide, perform everything, set the timer. Returns the positions to deliver."""
        kept: list[tuple[int, bool]] = []
        effects = self.core.step(event, clock.monotonic())
        self._write(effects)
        for effect in effects:
            match effect:
                case ev.Deliver():
                    kept.append((effect.position, effect.resumed))
                case ev.SendAdd():
                    prefix = msgspec.msgpack.encode(effect.prefix) if effect.prefix else b""
                    self._links[effect.worker_id].send([b"add", prefix, *effect.frames])
                case ev.SendAbort():
                    self._links[effect.worker_id].send([b"abort", msgspec.msgpack.encode(effect.request_ids)])
                case ev.Fail():
                    self._fail(effect)
                case ev.Connect():
                    self._connect(effect)
                case ev.Disconnect():
                    self._disconnect(effect)
        self._after()
        return kept

    def _write(self, effects: Effects) -> None:
        before = self._book.failures
        self._book.append([record for effect in effects if (record := to_record(effect)) is not None])
        if self._book.failures != before:
            self._log.error("journal_failed", why=self._book.last_error, failures=self._book.failures)

    def _fail(self, effect: ev.Fail) -> None:
        self._log.warning("request_failed", request=effect.request_id, code=effect.code, why=effect.message)
        self._sink.fail(
            effect.request_id, from_code(effect.code, effect.message, kept=effect.kept, remedy=effect.remedy)
        )

    def _connect(self, effect: ev.Connect) -> None:
        link = Link(self._context, effect.slot, effect.worker_id, effect.endpoint, self._front)
        self._links[effect.worker_id] = link
        self._joining[effect.worker_id] = asyncio.create_task(link.greet(HELLO_S))
        self._log.info("worker_joining", slot=effect.slot, generation=effect.generation, worker=effect.worker_id)

    def _disconnect(self, effect: ev.Disconnect) -> None:
        self._links.pop(effect.worker_id).close()
        if (joining := self._joining.pop(effect.worker_id, None)) is not None:
            joining.cancel()
        self._sink.left(effect.slot)
        self._log.info("worker_left", slot=effect.slot, worker=effect.worker_id, waiting=self.core.waiting)

    def _after(self) -> None:
        if self.core.serving:
            self.serving.set()
        else:
            self.serving.clear()
        due = self.core.next_deadline()
        if self._timer is not None and (due is None or self._timer.when() != due):
            self._timer.cancel()
            self._timer = None
        if due is not None and self._timer is None:
            # asyncio's own clock is CLOCK_MONOTONIC too, so deadlines of the core are times of the loop.
            self._timer = asyncio.get_running_loop().call_at(due, lambda: self._run(self._tick()))

    async def _tick(self) -> None:
        self._timer = None
        self._step(ev.Tick())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._joining.values():
            task.cancel()
        for link in self._links.values():
            link.close()
        for running in self._tasks:
            running.cancel()
        self._broken.cancel()
        self._links.clear()
        self._book.close()
        self._context.term()


def to_record(effect: ev.Effect) -> journal.Record | None:
    """The journal record of an effect, or None for effects that are not journaled."""
    match effect:
        case ev.JournalAdd():
            return journal.Add(effect.request_id, effect.external_id, effect.frames, clock.wall())
        case ev.JournalTokens():
            return journal.Tokens(
                effect.request_id,
                effect.start,
                effect.tokens,
                effect.slot,
                effect.generation,
                effect.weight_version,
            )
        case ev.JournalFinish():
            return journal.Finish(effect.request_id, effect.reason, effect.length, clock.wall())
    return None
