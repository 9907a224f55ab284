"""The heart of the router: (event, now) -> ordered effects. No I/O, no clock, no asyncio.

It keeps, for each live request, the encoded request and every token so far. A worker that takes over gets the same
request with its tokens pre-filled as output (never as prompt: penalties, seeds, grammars and min_tokens would be
silently wrong). Promises R2 (each token once, in order), R6 (every request ends in a bound) and the router's part
of R1 (nothing of a replaced worker is delivered) are decided here and only here.

An event that breaks the rules raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from belayer.errors import Refused, RequestUnknown
from belayerd.router import events as ev
from belayerd.router.placement import Effects, Limits, added, story_of
from belayerd.router.records import LEFT, STOP_STRING, Past, Request, RequestState, Slot, Span
from belayerd.router.remote_rules import RemoteRules

__all__ = ["Core", "Effects", "Limits"]


class Core(RemoteRules):
    """Requests and slots of one front. Feed it events with ``step``; perform what it returns."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._handlers: dict[type[ev.Event], Callable[..., Effects]] = {
            ev.Add: self._add,
            ev.Abort: self._abort,
            ev.FrontLost: self._front_lost,
            ev.Outputs: self._outputs,
            ev.HandedBack: self._handed_back,
            ev.Offer: self._offer,
            ev.Register: self._register,
            ev.Ready: self._ready,
            ev.Beat: self._beat,
            ev.Mute: self._torn,
            ev.ConnectFailed: self._connect_failed,
            ev.Unregister: self._unregister,
            ev.Torn: self._torn,
            ev.Calls: self._calls,
            ev.Paused: self._paused,
            ev.GivenUp: self._gave_up,
            ev.Recover: self._recover,
            ev.StoodStill: self._stood_still,
            ev.Tick: self._tick,
        }

    def step(self, event: ev.Event, now: float) -> Effects:
        return self._handlers[type(event)](event, now)

    # -- requests ---------------------------------------------------------------------------------------------

    def _add(self, event: ev.Add, now: float) -> Effects:
        if event.request_id in self.reader_of:
            raise Refused(f"request {event.request_id} is already running", remedy="use another request id")
        out: Effects = []
        running = self.requests[self.named[event.name]] if event.name in self.named else None
        if running is not None and not self._yields(running, event):
            return self._attach(running, event)
        if event.position is not None:
            return self._again(event, now)
        if running is not None:
            self._drop(running, out)
        request = _request(event, now)
        if why := self._alien(request):
            raise Refused(f"request {event.external_id} cannot go on here: {why}")
        self._enter(request)
        out.append(added(request))
        self._place(request, now, out)
        return out

    def _enter(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self._waiting[request.request_id] = None
        self.counters.added += 1
        for reader in request.readers:
            self.reader_of[reader] = request.request_id
        if request.name:
            self.named[request.name] = request.request_id
            self.archive.take(request.name)

    @staticmethod
    def _yields(running: Request, event: ev.Add) -> bool:
        """True when a running request gives its name to a new one: nobody hears it, and the new one is another."""
        return not running.readers and event.position is None and running.digest != event.digest

    def _drop(self, running: Request, out: Effects) -> None:
        if running.state is RequestState.RUNNING:
            out.append(ev.SendAbort(self.slots[running.slot].worker_id, (running.request_id,)))
        self.counters.aborted += 1
        self._finish(running, LEFT, out)

    def _attach(self, running: Request, event: ev.Add) -> Effects:
        """The client's id is that of a running request: hear it from the start (the front end needs all tokens to
        know its text; it sends those behind the position)."""
        if running.digest != event.digest:
            raise _another(event)
        asked = event.position is not None or not running.readers
        if not asked and self.limits.same_id is ev.SameId.REFUSE:
            raise Refused(
                f"request id {event.name} is running already",
                remedy="use another id; name a position to hear the running one; or set router.same_id",
            )
        _check_position(event, running.told)
        running.readers.append(event.request_id)
        running.told = len(running.tokens)
        self.reader_of[event.request_id] = running.request_id
        self.counters.attached += 1
        return [_replay(event.request_id, running)]

    def _again(self, event: ev.Add, now: float) -> Effects:
        """The client's id is that of an ended request, or of none."""
        past = self.archive.get(event.name) if event.name else None
        if past is None:
            raise RequestUnknown(
                f"no request with id {event.name or '(none given)'} is known", remedy="send it without a position"
            )
        if past.digest != event.digest:
            raise _another(event)
        _check_position(event, past.known)
        self.counters.replayed += 1
        if past.whole:
            if past.known < len(past.tokens):
                self.archive.put(replace(past, told=None))  # who asks is told all of it
            return [ev.Replay(event.request_id, past.tokens, past.rows, past.spans, past.reason, past.stop)]
        request = _request(event, now)
        _continue(request, past)
        request.told = len(request.tokens)  # just below
        self._enter(request)
        out = story_of(request)
        out.append(_replay(event.request_id, request))
        self._place(request, now, out)
        return out

    def _abort(self, event: ev.Abort, now: float) -> Effects:
        out: Effects = []
        by_worker: dict[str, list[str]] = {}
        for reader in event.request_ids:
            request = self.requests.get(self.reader_of.get(reader, ""))
            if request is None:
                continue  # it ended while the abort was under way
            if event.left and len(request.readers) > 1:
                request.readers.remove(reader)
                del self.reader_of[reader]
                continue  # others hear it still
            if request.state is RequestState.RUNNING:
                by_worker.setdefault(self.slots[request.slot].worker_id, []).append(request.request_id)
            self.counters.aborted += 1
            self._finish(request, LEFT if event.left else STOP_STRING, out)
        out += [ev.SendAbort(worker_id, tuple(ids)) for worker_id, ids in by_worker.items()]
        return out

    def _front_lost(self, event: ev.FrontLost, now: float) -> Effects:
        unheard = []
        for reader in event.readers:
            request = self.requests.get(self.reader_of.get(reader, ""))
            if request is None:
                continue  # it ended while this was under way
            if request.name or len(request.readers) > 1:
                request.readers.remove(reader)
                del self.reader_of[reader]
            else:
                unheard.append(reader)
        return self._abort(ev.Abort(tuple(unheard)), now)

    # -- outputs ----------------------------------------------------------------------------------------------

    def _outputs(self, event: ev.Outputs, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.is_current(event.generation, event.worker_id):
            self.counters.late_messages += 1
            if slot is not None:
                slot.late_dropped += 1
            return []
        # A worker that did not say where its count is tells it with its first message.
        if slot.next_seq not in (None, event.seq) or not self._in_place(slot, event.items):
            return self._torn(ev.Torn(slot.name, slot.worker_id), now)
        slot.next_seq = event.seq + 1
        updated = slot.serves(event.weight_version, "")
        out: Effects = []
        unwanted: list[str] = []
        for position, item in enumerate(event.items):
            request = self.requests.get(item.request_id)
            if request is None or request.slot != slot.name or request.state is not RequestState.RUNNING:
                slot.late_dropped += 1
                self.counters.late_items += 1  # aborted while this was under way
                unwanted += [] if item.finish else [item.request_id]
                continue
            made = event.made or (slot.name, slot.generation)
            version = event.weight_version or slot.weight_version
            maker = (*made, version, slot.weights_digest if version == slot.weight_version else "")
            self._take(request, slot, item, position, maker, now, out)
        if unwanted:
            out.append(ev.SendAbort(slot.worker_id, tuple(unwanted)))
        if updated:
            self._place_all(now, out)  # what waits for these weights
        return out

    def _take(
        self,
        request: Request,
        slot: Slot,
        item: ev.Item,
        position: int,
        maker: tuple[str, int, str, str],
        now: float,
        out: Effects,
    ) -> None:
        if item.tokens and (not request.spans or request.spans[-1][1:] != maker):
            self._journal_tokens(request, out)  # a journal block has one maker
            request.spans.append(Span(len(request.tokens), *maker))
        resumed = request.given > 1 and bool(request.tokens)
        if item.row:
            request.rows.append((len(request.tokens), item.row))
        request.tokens.extend(item.tokens)
        if request.readers:
            request.told = len(request.tokens)
        self._heard(request, now)
        slot.tokens_total += len(item.tokens)
        self.counters.tokens += len(item.tokens)
        if request.request_id in slot.resuming and (item.tokens or item.finish):
            slot.resuming.discard(request.request_id)
            note = slot.last_resume
            if note is not None and note.first_token_ms is None:
                note.first_token_ms = (now - note.registered_at) * 1e3
        readers = tuple(request.readers)
        if item.finish:
            self.counters.finished += 1
            self._finish(request, item.finish, out, item.stop)
        elif request.eager or len(request.tokens) - request.journaled >= self.limits.journal_every:
            self._journal_tokens(request, out)
        out.append(ev.Deliver(request.request_id, position, resumed, readers))

    # -- after a restart of the router ------------------------------------------------------------------------

    def _recover(self, event: ev.Recover, now: float) -> Effects:
        """Requests with a name go on, so that a client who comes back finds them; the others nobody can ask for."""
        out: Effects = []
        stories: dict[str, Past] = {}
        for past in event.stories:
            if past.name:
                stories.pop(past.name, None)  # the last one of a name counts, in the order of their ends
                stories[past.name] = past
            elif not past.reason:
                out.append(ev.JournalFinish(past.request_id, LEFT, len(past.tokens)))
        for past in stories.values():
            if past.reason:
                self.archive.put(past)
                continue
            request = Request(
                request_id=past.request_id,
                external_id=past.external_id,
                frames=past.frames,
                session="",
                continuable=True,
                waiting_since=now,
                name=past.name,
                digest=past.digest,
                eager=past.eager,
                on_death=past.on_death,
            )
            _continue(request, past)
            request.given, request.told = 1, len(request.tokens)
            if past.spans:
                home = past.spans[-1].slot
                self.slots.setdefault(home, Slot(home, remote="/" in home))
                request.slot = home
            self._enter(request)
            self.counters.recovered += 1
        return out


def _request(event: ev.Add, now: float) -> Request:
    return Request(
        request_id=event.request_id,
        external_id=event.external_id,
        frames=event.frames,
        session=event.session,
        continuable=event.continuable,
        waiting_since=now,
        name=event.name,
        digest=event.digest,
        eager=event.eager,
        on_death=event.on_death,
        pin=event.pin,
        origin=event.origin,
        # What came with it is told to nobody here: its own host has delivered it.
        tokens=list(event.prefix),
        spans=[Span(0, f"{event.origin}/", 0, event.prefix_version, event.prefix_digest)] if event.prefix else [],
        readers=[event.request_id],
    )


def _continue(request: Request, past: Past) -> None:
    """Put in what is known already; it counts as journaled, since its records are written again in one piece."""
    request.tokens, request.rows, request.spans = list(past.tokens), list(past.rows), list(past.spans)
    request.journaled, request.rows_journaled = len(request.tokens), len(request.rows)
    request.given = 1 if request.tokens else 0


def _replay(reader: str, request: Request) -> ev.Replay:
    return ev.Replay(reader, tuple(request.tokens), tuple(request.rows), tuple(request.spans))


def _check_position(event: ev.Add, known: int) -> None:
    if (event.position or 0) > known:
        raise RequestUnknown(
            f"request {event.name} has {known} known tokens, position {event.position} is behind them",
            remedy="send the request without a position",
        )


def _another(event: ev.Add) -> Refused:
    return Refused(
        f"request id {event.name} belongs to a request with another content",
        remedy="use another id, or send the same body",
    )
