"""The core's rules about slots of other hosts. Pure.

A remote slot is one more slot whose link leads to its host's router. What is different: its outputs say where each
token belongs, its host may hand a request back, and it tells how full it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from belayer.errors import ErrorCode
from belayerd.router import events as ev
from belayerd.router.placement import Effects
from belayerd.router.records import RequestState, Slot, SlotState
from belayerd.router.slot_rules import SlotRules

# What another try would only repeat: the request kills workers, or asked for an error when one dies.
_FINAL = (ErrorCode.POISON_REQUEST, ErrorCode.WORKER_GONE)


class RemoteRules(SlotRules):
    def unused(self, name: str) -> str:
        """Why a new request does not go to this slot of another host now; "" when it may."""
        slot = self.slots.get(name)
        if slot is None or slot.state is not SlotState.SERVING:
            return "not linked"
        if not self.serves_new(slot):
            return f"weights {slot.weight_version}, this host had {self.own_versions()}"
        if other := self.other_bytes(slot):
            return other
        if not slot.open:
            return "its host lets nothing new in"
        return "full" if slot.capacity and len(slot.running) + slot.elsewhere >= slot.capacity else ""

    def _in_place(self, slot: Slot, items: Sequence[ev.Item]) -> bool:
        """True when each row begins where its request's tokens end. Looked at before any of them is taken: a message
        counts whole or not at all."""
        due: dict[str, int] = {}
        for item in items:
            request = self.requests.get(item.request_id)
            if item.start is None or request is None or request.slot != slot.name:
                continue
            if request.state is RequestState.RUNNING:
                if item.start != due.get(item.request_id, len(request.tokens)):
                    return False
                due[item.request_id] = item.start + len(item.tokens)
        return True

    def _handed_back(self, event: ev.HandedBack, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.is_current(event.generation, event.worker_id):
            self.counters.late_messages += 1
            return []
        if slot.next_seq not in (None, event.seq):
            return self._torn(ev.Torn(slot.name, slot.worker_id), now)
        slot.next_seq = event.seq + 1
        request = self.requests.get(event.request_id)
        if request is None or request.slot != slot.name or request.state is not RequestState.RUNNING:
            self.counters.late_items += 1
            return []
        self.counters.handed_back += 1
        request.returned += 1
        out: Effects = []
        if event.code in _FINAL or request.returned > self.limits.deaths:
            self._fail(request, event.code, f"{slot.name}: {event.message}", event.remedy, out)
            return out
        del slot.running[request.request_id]
        slot.resuming.discard(request.request_id)
        self._wait(request, now)
        request.roams = True
        self._place(request, now, out, but=slot.name)
        return out

    def _offer(self, event: ev.Offer, now: float) -> Effects:
        slot = self.slots.get(event.slot)
        if slot is None or not slot.remote:
            return []
        newer = slot.serves(event.weight_version, event.weights_digest)
        more = event.open and (newer or not slot.open)
        slot.open, slot.capacity = event.open, event.capacity
        slot.elsewhere = max(0, event.load - len(slot.running))
        out: Effects = []
        if more:
            self._place_all(now, out)
        return out
