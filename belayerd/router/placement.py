"""Which worker gets a request, and the one end of each. The lowest layer of the router's core: pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from belayer.errors import ErrorCode
from belayerd.router import events as ev
from belayerd.router.archive import Archive
from belayerd.router.records import Counters, Past, Request, RequestState, Slot, SlotState
from belayerd.router.weight_rules import continues, same_bytes, serves_new

Effects = list[ev.Effect]

UP = (SlotState.CONNECTING, SlotState.SERVING)
_NOBODY = (
    ErrorCode.NO_HEALTHY_SLOT,
    "no worker can take the request: all slots of this host have given up, and none comes back by itself",
    "see belayerctl status; send the request again when a slot serves",
)
_SESSIONS_KEPT = 65536  # affinity keys remembered; beyond it the least recently used is forgotten


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one request may cost. Seconds; ``journal_every`` in tokens.

    ``deaths``: how many workers may die with a request on board before it is taken for their killer.
    ``home_s``: how long an interrupted request waits for its own slot before any slot may take it.
    ``waiting_s``: how long a request waits for any worker before it ends with NoHealthySlot.
    ``silence_s``: how long a worker may have a request without any output before it is taken from it.
    ``tears``: how often a torn link to the same worker is made anew before the next generation is waited for;
    ``steady_s``: a link that was not torn for so long counts from none again.
    ``on_death``: by slot, what its requests want that say nothing themselves; others resume.
    ``capacity``: by slot, how many requests its engine runs at once; beyond it a free slot of another host is better.
    ``slots``: of this host, as configured; ``peers``: other hosts may have slots too.
    """

    deaths: int = 2
    home_s: float = 30.0
    waiting_s: float = 120.0
    silence_s: float = 300.0
    tears: int = 3
    steady_s: float = 60.0
    journal_every: int = 256
    keep_bytes: int = 64 << 20
    same_id: ev.SameId = ev.SameId.REFUSE
    on_death: dict[str, ev.OnDeath] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    slots: frozenset[str] = frozenset()
    peers: bool = False


class Placement:
    """State of the core, and the moves of one request between waiting, running and ended."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests: dict[str, Request] = {}
        self.slots: dict[str, Slot] = {}
        self.counters = Counters()
        self.archive = Archive(limits.keep_bytes)
        self.paused = False
        self.given_up: frozenset[str] = frozenset()  # slots that only an operator brings back
        self.named: dict[str, str] = {}  # name -> request id of the live one
        self.reader_of: dict[str, str] = {}  # front-end id -> request id
        # Ordered by waiting_since, since time only grows and a request is appended when it begins to wait.
        self._waiting: dict[str, None] = {}
        self._quiet: OrderedDict[str, None] = OrderedDict()  # running ones, by heard_at
        self._sessions: OrderedDict[str, str] = OrderedDict()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def serving(self) -> int:
        return sum(slot.state is SlotState.SERVING for slot in self.slots.values())

    def next_deadline(self) -> float | None:
        """When a Tick is due, or None."""
        dues = [due for due in (self._waiting_due(), self._quiet_due()) if due is not None]
        return min(dues, default=None)

    def _waiting_due(self) -> float | None:
        first = next(iter(self._waiting), None)
        if first is None:
            return None
        due = self.requests[first].waiting_since + self.limits.waiting_s
        for request_id in self._waiting:
            request = self.requests[request_id]
            if not self._roams(request):
                return min(due, request.waiting_since + self.limits.home_s)
        return due

    def _quiet_due(self) -> float | None:
        first = next(iter(self._quiet), None)
        if first is None or self.paused:
            return None
        return self.requests[first].heard_at + self.limits.silence_s

    # -- choosing ---------------------------------------------------------------------------------------------

    def _place(self, request: Request, now: float, out: Effects, but: str = "") -> None:
        """Give a waiting request to a worker, if one may have it; never to slot ``but``. Where none may and none can
        come, to wait would be in vain."""
        slot = self._choose(request, but)
        if slot is None:
            if self.beyond_help() and not (self.limits.peers and request.continuable and not request.origin):
                self._fail(request, *_NOBODY, out)
            return
        if request.slot and request.slot != slot.name:
            self.counters.moved += 1
        request.move(RequestState.RUNNING)
        request.slot, request.roams, request.heard_at = slot.name, False, now
        request.given += 1
        del self._waiting[request.request_id]
        self._quiet[request.request_id] = None
        slot.running[request.request_id] = None
        self._remember(request.session, slot.name)
        if request.given > 1:
            slot.resuming.add(request.request_id)
            slot.resumed_total += 1
            self.counters.resumed += 1
            if not request.continuable:  # it had no token yet: given again from the start
                slot.restarted_total += 1
                self.counters.restarted += 1
        self.counters.forwarded += slot.remote
        wish = "" if request.on_death is None else request.on_death.value
        made = self._weights_of(request) if slot.remote else ("", "")
        tokens = tuple(request.tokens)
        out.append(ev.SendAdd(slot.worker_id, request.request_id, request.frames, tokens, wish, *made))

    def beyond_help(self, slot: str = "") -> bool:
        """True when no worker of ``slot`` ("": of any slot of this host) serves, is on its way, or can come before an
        operator has mended something."""
        asked = frozenset({slot}) if slot else self.limits.slots
        if not asked or not asked <= self.given_up:
            return False
        return not any(name in self.slots and self.slots[name].state in UP for name in asked)

    def _remember(self, session: str, slot: str) -> None:
        if session:
            self._sessions[session] = slot
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS_KEPT:
                self._sessions.popitem(last=False)

    def _choose(self, request: Request, but: str) -> Slot | None:
        if not self._roams(request):
            home = self.slots.get(request.slot or request.pin)
            if home is None or home.state is not SlotState.SERVING:
                return None
            if self._weights_fit(home, request):
                return home  # else it is back with older weights: waiting for it is in vain
        serving = [
            slot
            for slot in self.slots.values()
            if slot.name != but and _may_have(slot, request) and self._weights_fit(slot, request)
        ]
        if not serving:
            return None
        # Weights of an older version are served only while nobody on this host has newer ones. Newer ones of another
        # host draw no request away: it may have been updated a moment before this one.
        local = [slot for slot in serving if not slot.remote]
        newest = max(_version(slot) for slot in local or serving)
        fit = [slot for slot in serving if _version(slot) == newest or (slot.remote and _version(slot) > newest)]
        known = self._sessions.get(request.session, "") if request.session else ""
        return next((slot for slot in fit if slot.name == known), None) or min(fit, key=_burden)

    def _weights_fit(self, slot: Slot, request: Request) -> bool:
        """Between hosts no request falls back to older weights. Within this one its own updates decide."""
        if request.spans:
            made = request.spans[-1]
            if not (slot.remote or request.origin or "/" in made.slot):
                return True
            return continues(slot.weight_version, made.weight_version) and not self.other_bytes(slot, request)
        return not slot.remote or (self.serves_new(slot) and not self.other_bytes(slot))

    def serves_new(self, slot: Slot) -> bool:
        """True when the weights of a slot of another host are not older than this host's."""
        own = [one for one in self.slots.values() if not one.remote and one.weight_version]
        serving = {one.weight_version for one in own if one.state is SlotState.SERVING}
        return serves_new(slot.weight_version, serving, {one.weight_version for one in own})

    def other_bytes(self, slot: Slot, request: Request | None = None) -> str:
        """Why weights of the same version are not the same: their bytes are others than those that made the tokens of
        ``request``, or than this host's own; "" when nothing says so. Digests cover how the bytes lie in the owner's
        memory too, so hosts with another tensor_parallel count as others."""
        if request is not None and request.spans:
            if request.spans[-1].slot == slot.name:
                return ""
            version, digest = self._weights_of(request)
            # Stricter than below: what made these tokens and is not known now never will be.
            if version and version == slot.weight_version and digest != slot.weights_digest:
                return _others(slot, request.spans[-1].slot, digest)
        for one in self.slots.values():
            if one.remote or not slot.remote:
                continue
            if not same_bytes(one.weight_version, one.weights_digest, slot.weight_version, slot.weights_digest):
                return _others(slot, one.name, one.weights_digest)
        return ""

    def _weights_of(self, request: Request) -> tuple[str, str]:
        """Version and digest ("": not known) of the weights that made the last of its tokens. The first tokens of a
        version come before its digest is told; then it is that of their slot, while that serves the same version."""
        if not request.spans:
            return "", ""
        made = request.spans[-1]
        maker = self.slots.get(made.slot)
        if made.weights_digest or maker is None or maker.weight_version != made.weight_version:
            return made.weight_version, made.weights_digest
        return made.weight_version, maker.weights_digest

    def _alien(self, request: Request) -> str:
        """Why no slot of this host that serves may go on with what another host has begun: weights of the same version
        and of other bytes. "" when one may, or none serves: what is older may be newer in a moment, bytes do not
        change."""
        if not request.origin or not request.tokens:
            return ""
        serving = [slot for slot in self.slots.values() if not slot.remote and slot.state is SlotState.SERVING]
        why = [self.other_bytes(slot, request) for slot in serving]
        return why[0] if why and all(why) else ""

    def _unfit_weights(self, request: Request) -> str:
        """Why slots that serve did not take it, for its error; "" when weights are not the reason."""
        others = [
            f"{slot.name} serves {self.other_bytes(slot, request) or slot.weight_version or 'an unknown version'}"
            for slot in self.slots.values()
            if _may_have(slot, request) and not self._weights_fit(slot, request)
        ]
        if not others:
            return ""
        wanted = f"this host had weights {self.own_versions()}"
        if request.spans:
            wanted = f"its tokens are of weights {request.spans[-1].weight_version or 'of an unknown version'}"
        return f": {wanted}, and {', '.join(others)}"

    def own_versions(self) -> str:
        """What this host's slots serve or served last."""
        return ", ".join(sorted({one.weight_version for one in self.slots.values() if not one.remote}))

    def _roams(self, request: Request) -> bool:
        """True when any slot may take it: it is at home nowhere, its slot was removed, or it waited long enough."""
        home = request.slot or request.pin
        if request.roams or not home or self.beyond_help(home):
            return True
        slot = self.slots.get(home)
        gone = (SlotState.REMOVED, SlotState.EMPTY) if slot is not None and slot.remote else (SlotState.REMOVED,)
        return slot is not None and slot.state in gone

    def _place_all(self, now: float, out: Effects) -> None:
        for request_id in list(self._waiting):
            self._place(self.requests[request_id], now, out)

    def _wait(self, request: Request, now: float) -> None:
        """Its worker has it no more."""
        request.move(RequestState.WAITING)
        request.waiting_since = now
        del self._quiet[request.request_id]
        self._waiting[request.request_id] = None

    # -- ends -------------------------------------------------------------------------------------------------

    def _finish(self, request: Request, reason: str, out: Effects, stop: ev.Stop = None) -> None:
        """The one end of a request: journal it, forget it; if it has a name, keep its story."""
        self._journal_tokens(request, out)
        if request.state is RequestState.WAITING:
            del self._waiting[request.request_id]
        else:
            slot = self.slots[request.slot]
            del slot.running[request.request_id]
            del self._quiet[request.request_id]
            slot.resuming.discard(request.request_id)
        request.move(RequestState.FINISHED)
        del self.requests[request.request_id]
        for reader in request.readers:
            del self.reader_of[reader]
        if request.name:
            del self.named[request.name]
            self.archive.put(_past(request, reason, stop))
        out.append(ev.JournalFinish(request.request_id, reason, len(request.tokens), stop))

    def _fail(self, request: Request, code: ErrorCode, message: str, remedy: str, out: Effects) -> None:
        kept = f"{len(request.tokens)} tokens were generated and are in the journal" if request.tokens else ""
        readers = tuple(request.readers)
        self._finish(request, f"error:{code}", out)
        self.counters.failed[code] = self.counters.failed.get(code, 0) + 1
        out.append(ev.Fail(request.request_id, code, message, kept, remedy, readers))

    # -- journal ----------------------------------------------------------------------------------------------

    def _journal_tokens(self, request: Request, out: Effects) -> None:
        fresh = tuple(request.tokens[request.journaled :])
        if fresh:
            rows = tuple(request.rows[request.rows_journaled :])
            made = request.spans[-1]
            out.append(
                ev.JournalTokens(request.request_id, request.journaled, fresh, *made[1:4], rows, made.weights_digest)
            )
            request.journaled, request.rows_journaled = len(request.tokens), len(request.rows)

    def live_records(self) -> Effects:
        """What a new journal segment begins with, so that older segments may be deleted at any time."""
        return [record for request in self.requests.values() for record in story_of(request)]


def story_of(request: Request) -> Effects:
    """The journal's records of a live request: all that it has journaled so far, one block per maker."""
    out: Effects = [added(request)]
    ends = [*(span.start for span in request.spans[1:]), request.journaled]
    for span, end in zip(request.spans, ends, strict=False):
        end = min(end, request.journaled)
        block = tuple(request.tokens[span.start : end])
        if block:
            rows = tuple(row for row in request.rows if span.start <= row[0] < end)
            out.append(ev.JournalTokens(request.request_id, span.start, block, *span[1:4], rows, span.weights_digest))
    return out


def added(request: Request) -> ev.JournalAdd:
    return ev.JournalAdd(
        request.request_id,
        request.external_id,
        request.frames,
        request.name,
        request.digest,
        request.eager,
        "" if request.on_death is None else request.on_death.value,
    )


def _past(request: Request, reason: str, stop: ev.Stop) -> Past:
    return Past(
        request_id=request.request_id,
        external_id=request.external_id,
        name=request.name,
        digest=request.digest,
        frames=request.frames,
        tokens=tuple(request.tokens),
        rows=tuple(request.rows),
        spans=tuple(request.spans),
        reason=reason,
        stop=stop,
        eager=request.eager,
        on_death=request.on_death,
        told=request.told,
    )


def _may_have(slot: Slot, request: Request) -> bool:
    if slot.state is not SlotState.SERVING:
        return False
    return not slot.remote or (slot.open and request.continuable and not request.origin)


def _others(slot: Slot, name: str, digest: str) -> str:
    there = f"digest {slot.weights_digest[:12]}" if slot.weights_digest else "an unknown digest"
    return f"weights {slot.weight_version} of other bytes ({there}; {name}: {digest[:12] or 'not known'})"


def _burden(slot: Slot) -> tuple[bool, bool, int, str]:
    """The least is taken: here while there is room, then elsewhere while there is room, then here."""
    load = len(slot.running) + slot.elsewhere
    return bool(slot.capacity) and load >= slot.capacity, slot.remote, load, slot.name


def _version(slot: Slot) -> int:
    """Weight versions are numbers; a trainer's own words for them have no order, and so no preference."""
    return int(slot.weight_version) if slot.weight_version.isdecimal() else -1
