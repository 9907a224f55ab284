"""The thin shell around the router's core: sockets, journal, timer. It performs effects and decides nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Container, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import zmq.asyncio

from belayer import clock
from belayer.errors import BadMessage, BelayerError, Fenced, NoHealthySlot, WorkerGone, from_code
from belayer.messages.worker import Stamp
from belayerd.router import events as ev
from belayerd.router import journal
from belayerd.router.attention import Attention
from belayerd.router.core import Core, Effects
from belayerd.router.link import Link, Standing
from belayerd.router.records import SlotState

HELLO_S = 5.0  # bound on connect + ready; a live worker answers within one engine step
BEAT_S = 0.5  # between two questions whether a link still stands
GAP_S = 2 * BEAT_S  # between two looks at the clock; more than that, and this process stood still
RENEWALS = 2  # of a socket without an answer, after which the link is given up and made anew


class Codec(Protocol):
    """Between vLLM's objects and frames. ``decode`` raises BadMessage for anything that is not an output."""

    def decode(self, frames: Sequence[Any]) -> Any: ...

    def items(self, outputs: Any, named: Container[str]) -> tuple[ev.Item, ...]:
        """``named``: the requests whose outputs may be asked for again, so that more than tokens is to be kept."""

    def keep(self, outputs: Any, kept: Sequence[tuple[int, bool, tuple[str, ...]]]) -> None:
        """Leave only these positions, for these readers; ``True``: resumed, so without statistics of its prefill."""


class Sink(Protocol):
    """The front end."""

    def deliver(self, slot: str, generation: int, outputs: Any) -> None: ...

    def replay(self, told: ev.Replay) -> None:
        """Tell this reader what is known already, before anything that is delivered to it later."""

    def cut(self, reader: str) -> None:
        """End it with what it has, as an aborted one."""

    def fail(self, request_id: str, error: BelayerError) -> None: ...

    def welcome(self, slot: str, ready: bytes) -> Sequence[Sequence[Any]]:
        """A worker's ready info. Returns encoded utility calls that it must get before any request (what was asked
        of its predecessors and still holds). Raises BadMessage when the info cannot be read."""

    def utility(self, slot: str, outputs: Any) -> None: ...

    def left(self, slot: str) -> None:
        """The worker of this slot is gone: no utility call to it will be answered."""


RemoteLinks = Callable[[ev.Connect, int, bytes], Link]  # what is connected, the front, the token


class Shell:
    """One front's connection to all workers. All methods run in one event loop."""

    def __init__(self, core: Core, book: journal.Journal, codec: Codec, sink: Sink, front: int, log: Any) -> None:
        self.core = core
        self._book, self._codec, self._sink, self._front, self._log = book, codec, sink, front, log
        self._context = zmq.asyncio.Context()
        self._links: dict[str, Link] = {}  # by worker id
        self._joining: dict[str, asyncio.Task[None]] = {}  # by worker id
        self._made = 0  # links so far
        self.link_silence_s = 30.0  # a worker in a step answers after it: longer than any legal one
        self.call_s: Mapping[str, float] = {}  # by slot: how long an admin call may take whose caller does not say
        self._life = uuid.uuid4().bytes
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()  # set by every step of the core
        self._kept = Kept(core)
        self._attention = Attention(GAP_S)
        self.make_remote: RemoteLinks | None = None  # links to other hosts
        self._run(self._look_often())

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

    def abort(self, request_ids: Iterable[str], left: bool = True) -> None:
        self._step(ev.Abort(tuple(request_ids), left))

    def front_lost(self, readers: Iterable[str]) -> None:
        self._step(ev.FrontLost(tuple(readers)))

    def paused(self, paused: bool) -> None:
        self._step(ev.Paused(paused))

    def recover(self, stories: Iterable[Any]) -> None:
        """First of all: what the journal of an earlier life holds."""
        self._step(ev.Recover(tuple(stories)))
        if self.core.counters.recovered or len(self.core.archive):
            self._log.info("recovered", running=self.core.counters.recovered, ended=len(self.core.archive))

    def call_utility(self, frames: Sequence[Any], slot: str, call_id: int, within_s: float) -> None:
        """Send an encoded utility call to the worker of ``slot``. ``within_s``: how long its caller gives it (0: as
        ``call_s`` says); until then the worker may be silent, and belayerd ends one that is for longer. Raises
        WorkerGone when there is none."""
        worker_id = self.core.slots[slot].worker_id
        if slot not in self.serving_slots():
            raise WorkerGone(f"slot {slot} has no worker")
        legal_s = within_s or self.call_s.get(slot, 0.0)
        link = self._links[worker_id]
        link.call(call_id, frames, clock.monotonic(), legal_s)
        self._step(ev.Calls(slot, worker_id, max(link.calls.values())))

    def serving_slots(self) -> list[str]:
        """Of this host: admin calls and health of a slot are no other host's business."""
        return [name for name, slot in self.core.slots.items() if slot.state is SlotState.SERVING and not slot.remote]

    async def some_slot(self, within_s: float, slot: str = "") -> list[str]:
        """The slots that serve, once there is at least one; or ``slot`` alone, once it serves. Raises NoHealthySlot
        after ``within_s``, or at once when none can come."""
        try:
            async with asyncio.timeout(within_s):
                while not (serving := [one for one in self.serving_slots() if one == (slot or one)]):
                    if self.core.beyond_help(slot):
                        said = f"{slot or 'every slot'} has given up, and does not come back by itself"
                        raise NoHealthySlot(said, remedy="see belayerctl status")
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError as why:
            said = f"no worker of {slot or 'any slot'} came within {within_s:g} s"
            raise NoHealthySlot(said, remedy="see belayerctl status") from why
        return serving

    # -- from belayerd ----------------------------------------------------------------------------------------

    async def register(self, event: ev.Register) -> None:
        """Connect, greet, then give it its requests. Raises Fenced, WorkerGone or BadMessage."""
        self._step(event)
        joining = self._joining.get(event.worker_id)
        if joining is None:
            return  # told again, and it already serves
        try:
            await asyncio.shield(joining)
        except asyncio.CancelledError as why:
            if joining.cancelled():
                raise Fenced(f"worker {event.worker_id} was replaced before it was ready") from why
            raise

    async def _join(self, link: Link, slot: str, generation: int) -> None:
        try:
            ready, standing = await link.greet(HELLO_S)
            first = self._sink.welcome(slot, ready)
        except (WorkerGone, BadMessage) as why:
            self._log.error("worker_not_joined", slot=slot, worker=link.worker_id, why=str(why))
            del self._joining[link.worker_id]  # it is this task: not to be cancelled by the Disconnect below
            self._step(ev.ConnectFailed(slot, generation, link.worker_id, isinstance(why, WorkerGone)))
            raise
        del self._joining[link.worker_id]
        for frames in first:
            link.send([b"util", *frames])
        self._run(link.read(self._on_output, self._on_torn, self._on_beat))
        self._run(self._ask(link))
        # The first utility calls were counted in by the worker after it said its number, in this order.
        said = standing or Standing(-1)
        seq = None if standing is None else standing.seq
        self._step(ev.Ready(slot, generation, link.worker_id, seq, said.weight_version, said.weights_digest))

    async def _ask(self, link: Link) -> None:
        """A link that was taken over by somebody else, or lost its last message, is silent: only asking shows it."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self._links.get(link.worker_id) is not link:
                return
            if link.may_be_silent(clock.monotonic()):
                link.asked = 0
            silence_s = self.link_silence_s if link.silence_s is None else link.silence_s
            silent = link.asked * BEAT_S >= silence_s
            if link.renewed >= RENEWALS or (silent and link.silence_s is not None):
                self._log.error("link_mute", slot=link.slot, worker=link.worker_id)
                self._step(ev.Mute(link.slot, link.worker_id))
                return
            if silent:
                link.renew()
                self._run(link.read(self._on_output, self._on_torn, self._on_beat))
            link.ask()

    def unregister(self, event: ev.Unregister) -> None:
        self._step(event)

    def given_up(self, slots: Iterable[str]) -> None:
        """belayerd's word on which slots only an operator brings back; all of them each time."""
        event = ev.GivenUp(frozenset(slots))
        if event.slots != self.core.given_up:
            self._log.warning("slots_given_up", slots=", ".join(sorted(event.slots)) or "none")
            self._step(event)

    def tell(self, event: ev.Event) -> None:
        """What other hosts say. A slot of theirs that is registered joins in a task of its own."""
        self._step(event)

    # -- from workers -----------------------------------------------------------------------------------------

    def _on_output(self, link: Link, stamp: Stamp, frames: Sequence[Any]) -> None:
        try:
            outputs = self._codec.decode(frames)
            items = link.placed(stamp, self._codec.items(outputs, self._kept))
        except BadMessage as why:
            self._on_torn(link, why)
            return
        event = ev.Outputs(
            stamp.slot,
            stamp.generation,
            stamp.worker_id,
            stamp.seq,
            items,
            outputs.weight_version or "",
            link.made(stamp),
        )
        before = self.core.counters.late_messages
        kept = self._step(event)
        if self.core.counters.late_messages != before or link.worker_id not in self._links:
            return
        if outputs.utility_output is not None:
            if link.calls.pop(outputs.utility_output.call_id, None) is not None and not link.calls:
                self._step(ev.Calls(link.slot, link.worker_id, 0.0))
            self._sink.utility(link.slot, outputs)
            return
        self._codec.keep(outputs, kept)
        self._sink.deliver(*link.made(stamp), outputs)

    def _on_beat(self, link: Link, standing: Standing) -> None:
        self._step(ev.Beat(link.slot, link.worker_id, standing.seq, standing.weight_version, standing.weights_digest))

    def _on_torn(self, link: Link, why: BadMessage) -> None:
        self._log.error("link_torn", slot=link.slot, worker=link.worker_id, why=str(why))
        self._step(ev.Torn(link.slot, link.worker_id))

    # -- effects ----------------------------------------------------------------------------------------------

    def _step(self, event: ev.Event) -> list[tuple[int, bool, tuple[str, ...]]]:
        """Let the core decide, perform everything, set the timer. Returns the positions to deliver."""
        kept: list[tuple[int, bool, tuple[str, ...]]] = []
        effects = self.core.step(event, self._look())
        self._write(effects)
        for effect in effects:
            match effect:
                case ev.Deliver():
                    if effect.readers:
                        kept.append((effect.position, effect.resumed, effect.readers))
                case ev.Replay():
                    self._sink.replay(effect)
                case ev.Cut():
                    for reader in effect.readers:
                        self._sink.cut(reader)
                case ev.SendAdd():
                    prefix = msgspec.msgpack.encode(effect.prefix) if effect.prefix else b""
                    wish = effect.on_death, effect.prefix_version, effect.prefix_digest
                    self._links[effect.worker_id].add(prefix, effect.frames, *wish)
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
        for reader in effect.readers:
            self._sink.fail(reader, from_code(effect.code, effect.message, kept=effect.kept, remedy=effect.remedy))

    def _connect(self, effect: ev.Connect) -> None:
        self._made += 1
        token = self._life + self._made.to_bytes(4, "little")
        if effect.remote:
            assert self.make_remote is not None
            link = self.make_remote(effect, self._front, token)
        else:
            link = Link(self._context, effect.slot, effect.worker_id, effect.endpoint, self._front, token)
        self._links[effect.worker_id] = link
        joining = asyncio.create_task(self._join(link, effect.slot, effect.generation))
        joining.add_done_callback(self._joined)
        self._joining[effect.worker_id] = joining
        self._log.info("worker_joining", slot=effect.slot, generation=effect.generation, worker=effect.worker_id)

    def _joined(self, task: asyncio.Task[None]) -> None:
        """Expected failures are told to who waits in ``register``; when nobody does (a torn link), they are logged."""
        if not task.cancelled() and isinstance(task.exception(), BelayerError):
            return
        self._ended(task)

    def _disconnect(self, effect: ev.Disconnect) -> None:
        self._links.pop(effect.worker_id).close()
        if (joining := self._joining.pop(effect.worker_id, None)) is not None:
            joining.cancel()
        self._sink.left(effect.slot)
        self._log.info("worker_left", slot=effect.slot, worker=effect.worker_id, waiting=self.core.waiting)

    def _after(self) -> None:
        self.changed.set()
        due = self.core.next_deadline()
        # A timer that rings early costs one look; one that is set anew for every token would cost more.
        if self._timer is not None and (due is None or due < self._timer.when()):
            self._timer.cancel()
            self._timer = None
        if due is not None and self._timer is None:
            # asyncio's own clock is CLOCK_MONOTONIC too, so deadlines of the core are times of the loop.
            self._timer = asyncio.get_running_loop().call_at(due, lambda: self._run(self._tick()))

    def _look(self) -> float:
        """The time. What was missed while this process stood still is no silence of others."""
        now = clock.monotonic()
        if missed := self._attention.missed(now):
            if self.core.requests:
                self._log.warning("stood_still", seconds=round(missed, 1), requests=len(self.core.requests))
            self.core.step(ev.StoodStill(missed), now)
        return now

    async def _look_often(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(BEAT_S)

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


class Kept:
    """The worker-side ids of requests whose outputs may be asked for again, as a container."""

    def __init__(self, core: Core) -> None:
        self._requests = core.requests

    def __contains__(self, request_id: object) -> bool:
        found = self._requests.get(request_id) if isinstance(request_id, str) else None
        return found is not None and bool(found.name)


def to_record(effect: ev.Effect) -> journal.Record | None:
    """The journal record of an effect, or None for effects that are not journaled."""
    match effect:
        case ev.JournalAdd():
            return journal.Add(
                effect.request_id,
                effect.external_id,
                effect.frames,
                clock.wall(),
                effect.name,
                effect.digest,
                effect.eager,
                effect.on_death,
            )
        case ev.JournalTokens():
            return journal.Tokens(
                effect.request_id,
                effect.start,
                effect.tokens,
                effect.slot,
                effect.generation,
                effect.weight_version,
                effect.rows,
                effect.weights_digest,
            )
        case ev.JournalFinish():
            return journal.Finish(effect.request_id, effect.reason, effect.length, clock.wall(), effect.stop)
    return None
