"""The heart of the router: (event, now) -> ordered effects. No I/O, no clock, no asyncio.

It keeps, for each live request, the encoded request and every token so far. A worker that takes over gets the same
request with its tokens pre-filled as output (never as prompt: penalties, seeds, grammars and min_tokens would be
silently wrong). Promises R2 (each token once, in order), R6 (every request ends in a bound) and the router's part
of R1 (nothing of a replaced worker is delivered) are decided here and only here.

An event that breaks the rules raises and changes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from belayer.errors import ErrorCode, Fenced, Refused
from belayerd.router import events as ev
from belayerd.router.records import Counters, Request, RequestState, ResumeNote, Slot, SlotState, Span

Effects = list[ev.Effect]

_SESSIONS_KEPT = 65536  # affinity keys remembered; beyond it the least recently used is forgotten


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one request may cost. Seconds; ``journal_every`` in tokens.

    ``deaths``: how many workers may die with a request on board before it is taken for their killer.
    ``home_s``: how long an interrupted request waits for its own slot before any slot may take it.
    ``waiting_s``: how long a request waits for any worker before it ends with NoHealthySlot.
    """

    deaths: int = 2
    home_s: float = 30.0
    waiting_s: float = 120.0
    journal_every: int = 256


class Core:
    """Requests and slots of one front. Feed it events with ``step``; perform what it returns."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests: dict[str, Request] = {}
        self.slots: dict[str, Slot] = {}
        self.counters = Counters()
        # Ordered by waiting_since, since time only grows and a request is appended when it begins to wait.
        self._waiting: dict[str, None] = {}
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._handlers: dict[type[ev.Event], Callable[..., Effects]] = {
            ev.Add: self._add,
            ev.Abort: self._abort,
            ev.Outputs: self._outputs,
            ev.Register: self._register,
            ev.Ready: self._ready,
            ev.ConnectFailed: self._connect_failed,
            ev.Unregister: self._unregister,
            ev.Torn: self._torn,
            ev.Tick: self._tick,
        }

    def step(self, event: ev.Event, now: float) -> Effects:
        return self._handlers[type(event)](event, now)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def serving(self) -> int:
        return sum(slot.state is SlotState.SERVING for slot in self.slots.values())

    def next_deadline(self) -> float | None:
        """When a Tick is due, or None. Only waiting requests have deadlines."""
        first = next(iter(self._waiting), None)
        if first is None:
            return None
        due = self.requests[first].waiting_since + self.limits.waiting_s
        for request_id in self._waiting:
            request = self.requests[request_id]
            if not self._roams(request):
                return min(due, request.waiting_since + self.limits.home_s)
        return due

    # -- requests ---------------------------------------------------------------------------------------------

    def _add(self, event: ev.Add, now: float) -> Effects:
        if event.request_id in self.requests:
            raise Refused(f"request {event.request_id} is already running", remedy="use another request id")
        request = Request(
            request_id=event.request_id,
            external_id=event.external_id,
            frames=event.frames,
            session=event.session,
            continuable=event.continuable,
            waiting_since=now,
        )
        self.requests[request.request_id] = request
        self._waiting[request.request_id] = None
        self.counters.added += 1
        out: Effects = [ev.JournalAdd(request.request_id, request.external_id, request.frames)]
        self._place(request, out)
        return out

    def _abort(self, event: ev.Abort, now: float) -> Effects:
        out: Effects = []
        by_worker: dict[str, list[str]] = {}
        for request_id in event.request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue  # it ended while the abort was under way
            if request.state is RequestState.RUNNING:
                by_worker.setdefault(self.slots[request.slot].worker_id, []).append(request_id)
            self.counters.aborted += 1
            self._finish(request, "abort", out)
        out += [ev.SendAbort(worker_id, tuple(ids)) for worker_id, ids in by_worker.items()]
        return out

    def _place(self, request: Request, out: Effects) -> None:
        """Give a waiting request to a worker, if one may have it."""
        slot = self._choose(request)
        if slot is None:
            return
        if request.slot and request.slot != slot.name:
            self.counters.moved += 1
        request.move(RequestState.RUNNING)
        request.slot, request.roams = slot.name, False
        request.given += 1
        del self._waiting[request.request_id]
        slot.running[request.request_id] = None
        if request.session:
            self._sessions[request.session] = slot.name
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > _SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        if request.given > 1:
            slot.resuming.add(request.request_id)
            slot.resumed_total += 1
            self.counters.resumed += 1
            if not request.continuable:  # it had no token yet: given again from the start
                slot.restarted_total += 1
                self.counters.restarted += 1
        out.append(ev.SendAdd(slot.worker_id, request.request_id, request.frames, tuple(request.tokens)))

    def _choose(self, request: Request) -> Slot | None:
        if not self._roams(request):
            home = self.slots[request.slot]
            return home if home.state is SlotState.SERVING else None
        serving = [slot for slot in self.slots.values() if slot.state is SlotState.SERVING]
        if not serving:
            return None
        known = self.slots.get(self._sessions.get(request.session, "")) if request.session else None
        if known is not None and known.state is SlotState.SERVING:
            return known
        return min(serving, key=lambda slot: (len(slot.running), slot.name))

    def _roams(self, request: Request) -> bool:
        """True when any slot may take it: it never ran, its slot was removed, or it waited for home too long."""
        return request.roams or not request.slot or self.slots[request.slot].state is SlotState.REMOVED

    def _finish(self, request: Request, reason: str, out: Effects) -> None:
        """The one end of a request: journal it, forget it."""
        self._journal_tokens(request, out)
        if request.state is RequestState.WAITING:
            del self._waiting[request.request_id]
        else:
            slot = self.slots[request.slot]
            del slot.running[request.request_id]
            slot.resuming.discard(request.request_id)
        request.move(RequestState.FINISHED)
        del self.requests[request.request_id]
        out.append(ev.JournalFinish(request.request_id, reason, len(request.tokens)))

    def _fail(self, request: Request, code: ErrorCode, message: str, remedy: str, out: Effects) -> None:
        kept = f"{len(request.tokens)} tokens were generated and are in the journal" if request.tokens else ""
        self._finish(request, f"error:{code}", out)
        self.counters.failed[code] = self.counters.failed.get(code, 0) + 1
        out.append(ev.Fail(request.request_id, code, message, kept, remedy))

    # -- outputs ----------------------------------------------------------------------------------------------

    def _outputs(self, event: ev.Outputs, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.is_current(event.generation, event.worker_id):
            self.counters.late_messages += 1
            if slot is not None:
                slot.late_dropped += 1
            return []
        # A worker counts on through a restart of this router, so the first message tells where the count is.
        if slot.next_seq is not None and event.seq != slot.next_seq:
            return self._torn(ev.Torn(slot.name, slot.worker_id), now)
        slot.next_seq = event.seq + 1
        out: Effects = []
        unwanted: list[str] = []
        for position, item in enumerate(event.items):
            request = self.requests.get(item.request_id)
            if request is None or request.slot != slot.name or request.state is not RequestState.RUNNING:
                slot.late_dropped += 1
                self.counters.late_items += 1  # aborted while this was under way, or left over by an earlier router
                unwanted += [] if item.finish else [item.request_id]
                continue
            self._take(request, slot, item, position, event.weight_version, now, out)
        if unwanted:
            out.append(ev.SendAbort(slot.worker_id, tuple(unwanted)))
        return out

    def _take(
        self, request: Request, slot: Slot, item: ev.Item, position: int, version: str, now: float, out: Effects
    ) -> None:
        maker = (slot.name, slot.generation, version or slot.weight_version)
        if item.tokens and (not request.spans or request.spans[-1][1:] != maker):
            self._journal_tokens(request, out)  # a journal block has one maker
            request.spans.append(Span(len(request.tokens), *maker))
        resumed = request.given > 1 and bool(request.tokens)
        request.tokens.extend(item.tokens)
        slot.tokens_total += len(item.tokens)
        self.counters.tokens += len(item.tokens)
        if request.request_id in slot.resuming and (item.tokens or item.finish):
            slot.resuming.discard(request.request_id)
            note = slot.last_resume
            if note is not None and note.first_token_ms is None:
                note.first_token_ms = (now - note.registered_at) * 1e3
        if item.finish:
            self.counters.finished += 1
            self._finish(request, item.finish, out)
        elif len(request.tokens) - request.journaled >= self.limits.journal_every:
            self._journal_tokens(request, out)
        out.append(ev.Deliver(request.request_id, position, resumed))

    def _journal_tokens(self, request: Request, out: Effects) -> None:
        fresh = tuple(request.tokens[request.journaled :])
        if fresh:
            out.append(ev.JournalTokens(request.request_id, request.journaled, fresh, *request.spans[-1][1:]))
            request.journaled = len(request.tokens)

    def live_records(self) -> Effects:
        """What a new journal segment begins with, so that older segments may be deleted at any time."""
        out: Effects = []
        for request in self.requests.values():
            out.append(ev.JournalAdd(request.request_id, request.external_id, request.frames))
            ends = [*(span.start for span in request.spans[1:]), request.journaled]
            for span, end in zip(request.spans, ends, strict=False):
                block = tuple(request.tokens[span.start : min(end, request.journaled)])
                if block:
                    out.append(ev.JournalTokens(request.request_id, span.start, block, *span[1:]))
        return out

    def _torn(self, event: ev.Torn, now: float) -> Effects:
        """A message of a live worker is missing, doubled or unreadable: nothing more from it can be trusted."""
        slot = self.slots.get(event.slot)
        if slot is None or slot.worker_id != event.worker_id or slot.state is not SlotState.SERVING:
            return []
        self.counters.torn_links += 1
        return self._leave(slot, ev.Cause.TORN_LINK, removed=False, now=now)

    # -- slots ------------------------------------------------------------------------------------------------

    def _register(self, event: ev.Register, now: float) -> Effects:
        slot = self.slots.get(event.slot) or Slot(event.slot)
        if slot.is_current(event.generation, event.worker_id):
            return []  # told again: after a lost reply, or by a belayerd that has restarted
        self._check_fence(slot, event.generation, event.worker_id)
        self.slots[event.slot] = slot
        out: Effects = []
        if slot.state in (SlotState.CONNECTING, SlotState.SERVING):
            out += self._leave(slot, ev.Cause.SUPERSEDED, removed=False, now=now)
        slot.move(SlotState.CONNECTING)
        slot.generation, slot.worker_id, slot.endpoint = event.generation, event.worker_id, event.endpoint
        slot.weight_version, slot.model = event.weight_version, event.model
        slot.next_seq = None
        out.append(ev.Connect(slot.name, slot.generation, slot.worker_id, slot.endpoint))
        return out

    @staticmethod
    def _check_fence(slot: Slot, generation: int, worker_id: str) -> None:
        live = slot.state in (SlotState.CONNECTING, SlotState.SERVING)
        if generation < slot.fence or (live and generation <= slot.generation):
            newest = max(slot.fence - 1, slot.generation)
            raise Fenced(
                f"worker {worker_id} is generation {generation} of {slot.name}, which is past generation {newest}",
                remedy="register a newer generation",
            )

    def _ready(self, event: ev.Ready, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.is_current(event.generation, event.worker_id):
            raise Fenced(f"worker {event.worker_id} of {event.slot} was replaced before it was ready")
        if slot.state is SlotState.SERVING:
            return []
        slot.move(SlotState.SERVING)
        slot.fence = slot.generation
        out: Effects = []
        before = slot.resumed_total
        self._place_all(out)
        resumed = slot.resumed_total - before
        slot.last_resume = ResumeNote(slot.generation, resumed, registered_at=now)
        return out

    def _connect_failed(self, event: ev.ConnectFailed, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.is_current(event.generation, event.worker_id):
            return []
        slot.move(SlotState.EMPTY)
        return [ev.Disconnect(slot.name, event.worker_id)]

    def _unregister(self, event: ev.Unregister, now: float) -> Effects:
        slot = self.slots.get(event.slot) or Slot(event.slot)
        if event.generation < max(slot.fence - 1, slot.generation):
            raise Fenced(f"{slot.name} is at generation {slot.generation}, not {event.generation}")
        self.slots[event.slot] = slot
        out: Effects = []
        if slot.state in (SlotState.CONNECTING, SlotState.SERVING):
            out += self._leave(slot, event.cause, event.removed, now)
        elif event.removed and slot.state is SlotState.EMPTY:
            slot.move(SlotState.REMOVED)
            self._place_all(out)
        slot.fence = max(slot.fence, event.generation + 1)
        return out

    def _leave(self, slot: Slot, cause: ev.Cause, removed: bool, now: float) -> Effects:
        """The worker is gone. Its requests wait; those that saw too many workers die, end."""
        out: Effects = [ev.Disconnect(slot.name, slot.worker_id)]
        running, slot.running = list(slot.running), {}
        slot.resuming.clear()
        slot.move(SlotState.REMOVED if removed else SlotState.EMPTY)
        slot.fence = max(slot.fence, slot.generation + 1)
        for request_id in running:
            request = self.requests[request_id]
            request.move(RequestState.WAITING)
            request.waiting_since = now
            request.deaths += cause is ev.Cause.DIED
            self._waiting[request_id] = None
            self._judge(request, slot, out)
        self._place_all(out)
        return out

    def _judge(self, request: Request, slot: Slot, out: Effects) -> None:
        """After a loss: may this request be given to another worker?"""
        if request.deaths > self.limits.deaths:
            self._fail(
                request,
                ErrorCode.POISON_REQUEST,
                f"{request.deaths} workers died with request {request.external_id or request.request_id} on board",
                "check the request; raise router.deaths_per_request if it is innocent",
                out,
            )
        elif request.tokens and not request.continuable:
            self._fail(
                request,
                ErrorCode.WORKER_GONE,
                f"the worker of {slot.name} was lost and this kind of request cannot be continued by another",
                "send the request again",
                out,
            )

    def _place_all(self, out: Effects) -> None:
        for request_id in list(self._waiting):
            self._place(self.requests[request_id], out)

    # -- time -------------------------------------------------------------------------------------------------

    def _tick(self, event: ev.Tick, now: float) -> Effects:
        out: Effects = []
        for request_id in list(self._waiting):
            request = self.requests[request_id]
            waited = now - request.waiting_since
            if not self._roams(request) and waited >= self.limits.home_s:
                request.roams = True
            self._place(request, out)
            if request.state is RequestState.WAITING and waited >= self.limits.waiting_s:
                self._fail(
                    request,
                    ErrorCode.NO_HEALTHY_SLOT,
                    f"no worker could take the request within {self.limits.waiting_s:g} s",
                    "see belayerctl status; send the request again when a slot serves",
                    out,
                )
        return out
