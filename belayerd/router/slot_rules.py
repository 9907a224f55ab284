"""The core's rules about slots: who serves, what a loss does to the requests on board, and time. Pure."""

from __future__ import annotations

from belayer.errors import ErrorCode, Fenced
from belayerd.router import events as ev
from belayerd.router.placement import UP, Effects, Placement
from belayerd.router.records import CUT, Request, ResumeNote, Slot, SlotState


class SlotRules(Placement):
    def _register(self, event: ev.Register, now: float) -> Effects:
        slot = self.slots.get(event.slot) or Slot(event.slot)
        if slot.is_current(event.generation, event.worker_id):
            return []  # told again: after a lost reply, or by a belayerd that has restarted
        self._check_fence(slot, event.generation, event.worker_id)
        self.slots[event.slot] = slot
        self.given_up -= {event.slot}  # who registers a worker knows better than what was said before
        out: Effects = []
        if slot.state in UP:
            out += self._leave(slot, ev.Cause.SUPERSEDED, removed=False, now=now)
        slot.move(SlotState.CONNECTING)
        slot.generation, slot.worker_id, slot.endpoint = event.generation, event.worker_id, event.endpoint
        slot.weight_version, slot.weights_digest = event.weight_version, event.weights_digest
        slot.model = event.model
        slot.next_seq, slot.tears, slot.calling_until, slot.remote = None, 0, 0.0, event.remote
        slot.link_given_up = False
        slot.capacity = self.limits.capacity.get(slot.name, 0)
        out.append(_connect(slot))
        return out

    @staticmethod
    def _check_fence(slot: Slot, generation: int, worker_id: str) -> None:
        live = slot.state in UP
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
        slot.fence, slot.next_seq = slot.generation, event.seq
        slot.serves(event.weight_version, event.weights_digest)
        out: Effects = []
        before = slot.resumed_total
        self._place_all(now, out)
        resumed = slot.resumed_total - before
        slot.last_resume = ResumeNote(slot.generation, resumed, registered_at=now)
        return out

    def _connect_failed(self, event: ev.ConnectFailed, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.is_current(event.generation, event.worker_id):
            return []
        out: Effects = [ev.Disconnect(slot.name, event.worker_id)]
        if event.silent and not slot.remote and slot.name not in self.given_up:
            # Nobody has said that it is gone: it is in a long step or call, and answers after it. Whoever registered it
            # was told that it did not answer, and unregisters it if that is the end of it; given up here, a worker
            # that lives would serve nobody until its next generation.
            out.append(_connect(slot))
            return out
        slot.move(SlotState.EMPTY)
        if slot.remote or self.beyond_help():
            self._place_all(now, out)  # no shadow takes its place: others may have its requests at once, or none
        return out

    def _unregister(self, event: ev.Unregister, now: float) -> Effects:
        slot = self.slots.get(event.slot) or Slot(event.slot)
        if event.generation < max(slot.fence - 1, slot.generation):
            raise Fenced(f"{slot.name} is at generation {slot.generation}, not {event.generation}")
        self.slots[event.slot] = slot
        out: Effects = []
        if slot.state in UP:
            out += self._leave(slot, event.cause, event.removed, now)
        elif event.removed and slot.state is SlotState.EMPTY:
            slot.move(SlotState.REMOVED)
            self._place_all(now, out)
        slot.fence = max(slot.fence, event.generation + 1)
        return out

    def _leave(self, slot: Slot, cause: ev.Cause, removed: bool, now: float) -> Effects:
        """The worker is gone. Its requests wait; those that saw too many workers die, end."""
        out: Effects = [ev.Disconnect(slot.name, slot.worker_id)]
        slot.move(SlotState.REMOVED if removed else SlotState.EMPTY)
        slot.fence = max(slot.fence, slot.generation + 1)
        self._set_down(slot, cause, now, out)
        self._place_all(now, out)
        return out

    def _set_down(self, slot: Slot, cause: ev.Cause, now: float, out: Effects) -> None:
        running, slot.running = list(slot.running), {}
        slot.resuming.clear()
        for request_id in running:
            request = self.requests[request_id]
            self._wait(request, now)
            request.deaths += cause is ev.Cause.DIED
            self._judge(request, slot, cause, out)

    def _judge(self, request: Request, slot: Slot, cause: ev.Cause, out: Effects) -> None:
        """After a loss: may this request be given to another worker, and does it want to?"""
        died = cause in (ev.Cause.DIED, ev.Cause.SUPERSEDED, ev.Cause.HOST_LOST)
        wish = request.on_death or self.limits.on_death.get(slot.name, ev.OnDeath.RESUME)
        if died and wish is ev.OnDeath.ABORT:
            readers = tuple(request.readers)
            self.counters.cut += 1
            self._finish(request, CUT, out)
            out.append(ev.Cut(readers))
        elif died and wish is ev.OnDeath.ERROR:
            self._fail(
                request,
                ErrorCode.WORKER_GONE,
                f"the worker of {slot.name} was lost, and this request asked for an error then",
                "send the request again",
                out,
            )
        elif request.deaths > self.limits.deaths:
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

    # -- links ------------------------------------------------------------------------------------------------

    def _torn(self, event: ev.Torn | ev.Mute, now: float) -> Effects:
        """A message of a live worker is missing, doubled or unreadable, or somebody else has our place at its socket.
        Nothing more from this link can be trusted; the worker may be whole, so a new link to it is made. Its hello
        makes the worker drop what it runs for us, and all of it is given again with the tokens that came."""
        slot = self.slots.get(event.slot)
        if slot is None or slot.worker_id != event.worker_id or slot.state is not SlotState.SERVING:
            return []
        self.counters.torn_links += 1
        slot.tears = 1 if now - slot.torn_at >= self.limits.steady_s else slot.tears + 1
        slot.torn_at = now
        if slot.tears > self.limits.tears:
            slot.link_given_up = True  # belayerd reads it, and hands the slot over
            return self._leave(slot, ev.Cause.TORN_LINK, removed=False, now=now)
        out: Effects = [ev.Disconnect(slot.name, slot.worker_id)]
        slot.move(SlotState.CONNECTING)
        slot.next_seq, slot.calling_until = None, 0.0
        self._set_down(slot, ev.Cause.TORN_LINK, now, out)
        self._place_all(now, out)
        out.append(_connect(slot))
        return out

    def _beat(self, event: ev.Beat, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or slot.worker_id != event.worker_id or slot.state is not SlotState.SERVING:
            return []
        updated = slot.serves(event.weight_version, event.weights_digest)
        if slot.next_seq not in (None, event.seq):
            return self._torn(ev.Torn(slot.name, slot.worker_id), now)
        slot.next_seq = event.seq
        out: Effects = []
        if updated:
            self._place_all(now, out)  # what waits for these weights
        return out

    def _gave_up(self, event: ev.GivenUp, now: float) -> Effects:
        self.given_up = event.slots
        out: Effects = []
        self._place_all(now, out)  # away from a home that is lost, or to their end
        return out

    # -- time -------------------------------------------------------------------------------------------------

    def _calls(self, event: ev.Calls, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or slot.worker_id != event.worker_id or slot.state is not SlotState.SERVING:
            return []
        slot.calling_until = event.until
        if not event.until:  # only from here on its silence counts again
            for request_id in slot.running:
                self._heard(self.requests[request_id], now)
        return []

    def _heard(self, request: Request, now: float) -> None:
        request.heard_at = now
        self._quiet.move_to_end(request.request_id)

    def _paused(self, event: ev.Paused, now: float) -> Effects:
        self.paused = event.paused
        for request_id in self._quiet:
            self.requests[request_id].heard_at = now
        return []

    def _stood_still(self, event: ev.StoodStill, now: float) -> Effects:
        """All bounds count the time in which somebody could be heard; in the same order as before."""
        for request in self.requests.values():
            request.waiting_since += event.seconds
            request.heard_at += event.seconds
        for slot in self.slots.values():
            slot.calling_until += event.seconds if slot.calling_until else 0.0
        return []

    def _tick(self, event: ev.Tick, now: float) -> Effects:
        out: Effects = []
        for request_id in list(self._waiting):
            self._tick_waiting(self.requests[request_id], now, out)
        while not self.paused and self._quiet:
            request = self.requests[next(iter(self._quiet))]
            if now < request.heard_at + self.limits.silence_s:
                break
            if now < self.slots[request.slot].calling_until:
                self._heard(request, now)
            else:
                self._take_away(request, now, out)
        return out

    def _tick_waiting(self, request: Request, now: float, out: Effects) -> None:
        # Reckoned as next_deadline does it: a difference may round to less, and the tick that is due would do nothing.
        if not self._roams(request) and now >= request.waiting_since + self.limits.home_s:
            request.roams = True
        self._place(request, now, out)
        if request.request_id in self._waiting and now >= request.waiting_since + self.limits.waiting_s:
            self._fail(
                request,
                ErrorCode.NO_HEALTHY_SLOT,
                f"no worker could take the request within {self.limits.waiting_s:g} s{self._unfit_weights(request)}",
                "see belayerctl status; send the request again when a slot serves",
                out,
            )

    def _take_away(self, request: Request, now: float, out: Effects) -> None:
        """Its worker beats but says nothing about it. Another slot may have it; the same one never: what it still
        says about the first try could not be told from the second."""
        slot = self.slots[request.slot]
        self.counters.silent += 1
        out.append(ev.SendAbort(slot.worker_id, (request.request_id,)))
        del slot.running[request.request_id]
        slot.resuming.discard(request.request_id)
        self._wait(request, now)
        request.roams = True
        if request.continuable or not request.tokens:
            self._place(request, now, out, but=slot.name)
        if request.request_id in self._waiting:
            self._fail(
                request,
                ErrorCode.REQUEST_STALLED,
                f"the worker of {slot.name} said nothing about the request for {self.limits.silence_s:g} s, "
                "and no other slot serves",
                "see belayerctl status; raise router.silence_s if requests queue that long",
                out,
            )


def _connect(slot: Slot) -> ev.Connect:
    return ev.Connect(slot.name, slot.generation, slot.worker_id, slot.endpoint, slot.remote)
