"""The router's control plane: what belayerd and belayerctl ask, answered from the core."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from belayer import clock
from belayer.errors import Refused, SlotUnknown
from belayer.messages.common import Done, FaultProof, Message, Ping, Pong
from belayer.messages.fleet import FleetStatus, FleetStatusReply
from belayer.messages.router import (
    InjectFrontFault,
    RegisterWorker,
    ResumeReport,
    RouterSlot,
    RouterStatus,
    RouterStatusReply,
    SlotsGivenUp,
    UnregisterWorker,
)
from belayerd.router import events as ev
from belayerd.router.fleet import Fleet
from belayerd.router.fronts import Fronts
from belayerd.router.records import Slot, SlotState
from belayerd.router.shell import Shell

PLANNED = "planned"  # UnregisterWorker.reason that begins so is no death of the worker


class Service:
    """Handler of run/router.sock. ``slots``: the names in the configuration; others are refused."""

    def __init__(
        self, shell: Shell, slots: frozenset[str], instance: str, url: str, slot_urls: Mapping[str, str]
    ) -> None:
        self._shell, self._slots, self._instance, self._url = shell, slots, instance, url
        self._urls = slot_urls
        self.fleet: Fleet | None = None
        self.fronts: Fronts | None = None  # None: the one front is in this process
        self.host = ""

    async def handle(self, message: Message) -> Message:
        start = clock.Stopwatch()
        match message:
            case Ping():
                return Pong(daemon="belayer-router", pid=os.getpid(), instance=self._instance)
            case RegisterWorker():
                await self._register(message)
            case UnregisterWorker():
                self._unregister(message)
            case SlotsGivenUp():
                self._shell.given_up(message.slots)
            case RouterStatus():
                return self.status()
            case InjectFrontFault():
                return await self._inject(message)
            case FleetStatus():
                return FleetStatusReply(host=self.host) if self.fleet is None else self.fleet.status()
        return Done(ms=start.ms())

    async def _register(self, message: RegisterWorker) -> None:
        self._known(message.slot)
        await self._shell.register(
            ev.Register(
                slot=message.slot,
                generation=message.generation,
                worker_id=message.worker_id,
                endpoint=message.endpoint,
                weight_version=str(message.weight_version),
                model=message.model,
            )
        )

    def _unregister(self, message: UnregisterWorker) -> None:
        self._known(message.slot)
        cause = ev.Cause.PLANNED if message.reason.startswith(PLANNED) else ev.Cause.DIED
        self._shell.unregister(ev.Unregister(message.slot, message.generation, cause, message.gone))

    def _known(self, slot: str) -> None:
        if slot not in self._slots:
            raise SlotUnknown(
                f"no slot {slot!r} in the router's configuration", remedy="restart the router after a change"
            )

    async def _inject(self, message: InjectFrontFault) -> FaultProof:
        if self.fronts is None:
            said = "the one front of this router is its own process"
            raise Refused(said, remedy="[router] fronts = N gives it others, or kill the router itself")
        return await self.fronts.inject(message)

    def status(self) -> RouterStatusReply:
        core = self._shell.core
        waiting: dict[str, int] = {}
        for request in core.requests.values():
            if request.slot and request.request_id not in core.slots[request.slot].running:
                waiting[request.slot] = waiting.get(request.slot, 0) + 1
        counters = core.counters
        return RouterStatusReply(
            instance=self._instance,
            pid=os.getpid(),
            url=self._url,
            slots=tuple(
                _row(slot, waiting.get(slot.name, 0), self._urls.get(slot.name, "")) for slot in core.slots.values()
            ),
            running=len(core.requests) - core.waiting,
            waiting=core.waiting,
            finished_total=counters.finished,
            failed_total=sum(counters.failed.values()),
            tokens_total=counters.tokens,
            resumed_total=counters.resumed,
            restarted_total=counters.restarted,
            given_up=tuple(sorted(core.given_up)),
            fronts=() if self.fronts is None else self.fronts.view(),
        )


def _row(slot: Slot, waiting: int, url: str) -> RouterSlot:
    note: Any = slot.last_resume
    report = None
    if note is not None:
        first = -1.0 if note.first_token_ms is None else note.first_token_ms
        report = ResumeReport(
            generation=note.generation,
            resumed=note.resumed,
            registered_at=note.registered_at,
            first_token_ms=first,
        )
    return RouterSlot(
        slot=slot.name,
        url=url,
        generation=slot.generation,
        registered=slot.state is SlotState.SERVING,
        worker_id=slot.worker_id,
        running=len(slot.running),
        waiting=waiting,
        tokens_total=slot.tokens_total,
        resumed_total=slot.resumed_total,
        late_dropped_total=slot.late_dropped,
        last_resume=report,
        link_given_up=slot.link_given_up,
    )
