"""belayerd: the supervisor. Starts the zygote, runs one shell per slot, answers belayerctl."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from belayer import log as logs
from belayer import procs, refusals, statefile
from belayer.clock import monotonic, wall
from belayer.config import Config
from belayer.daemon import OnlyOne, new_instance, notify
from belayer.errors import BelayerError, DaemonUnreachable, OwnerComing, Refused, SlotUnknown
from belayer.messages.common import Done, FaultProof, Ping, Pong
from belayer.messages.control import (
    BeginWeightsUpdate,
    EndWeightsUpdate,
    Handover,
    HostStatus,
    HostStatusReply,
    IncidentList,
    IncidentReply,
    InjectWorkerFault,
    ListIncidents,
    Request,
    RestoreSlot,
    SlotView,
)
from belayer.messages.owner import OwnerStatusReply
from belayer.messages.router import RouterStatusReply
from belayer.messages.trainer import AckReplaced, AwaitReplaced, ListTrainers, RegisterTrainer, UnregisterTrainer
from belayer.paths import Paths
from belayer.rpc import Client, Server
from belayerd import footprint, proof
from belayerd.actions import Actions
from belayerd.alerts import Alert, Alerts
from belayerd.front_deaths import FrontDeaths
from belayerd.gate import open_gate
from belayerd.pair import Cause
from belayerd.peers import RouterPeer, Zygote, links_given_up
from belayerd.policy import beyond_help, spares_to_call
from belayerd.records import Records
from belayerd.sealed import Sealed
from belayerd.slot import SlotShell
from belayerd.trainers import Trainers
from belayerd.updates import Opener, Updates
from belayerd.watch import sweep

_OWNER_S = 2.0  # from an owner's death to the first word of its next life


class Supervisor:
    """One host's belayerd. ``run(stop)`` until the event is set; workers go on without it (promise O1)."""

    def __init__(self, paths: Paths, config: Config, config_path: Path) -> None:
        self._paths, self._config = paths, config
        self._log = logs.setup("belayerd")
        self._lock = OnlyOne(paths.run, "belayerd")
        self._instance = new_instance()
        self._context = zmq.asyncio.Context()
        self._router = Client(paths.router_sock, self._context)
        gate = open_gate(slot.device for slot in config.slot)  # may refuse: before anything is made
        self._cgroups = procs.Cgroups(procs.tag_of(paths.run))
        self._incidents = Records(paths.incidents, self._log)
        policy = config.policy
        self._alerts = Alerts(policy.alert_command, self._log)
        self._actions = Actions(paths, self._router, self._cgroups, gate, policy)
        self._slots = {
            slot.name: SlotShell(
                slot,
                policy,
                paths,
                self._actions,
                self._cgroups,
                self._context,
                self._incidents,
                self._log,
                self._alert,
                self._serves,
                self._startable,
            )
            for slot in config.slot
        }
        in_place = {model.name: model.update == "in_place" for model in config.model}
        slots = list(self._slots.values())
        self._trainers = Trainers(paths.trainers, slots, policy.on_replaced_command, self._log)
        self._updates = Updates(slots, self._actions.weights, in_place, policy, self._log, self._trainers)
        self._actions.held = self._updates.held
        self._zygote = Zygote(paths, config_path, self._log, self._zygote_failed)
        self._sealed = Sealed(
            lambda: self._actions.weights.status(wait=False), policy.owner_deadline_s, self._tell_unsealed, self._log
        )
        self._front_deaths = FrontDeaths(self._incidents, self._front_repeats, policy.repeat_window_s, self._log)
        self._router_peer = RouterPeer(self._router, self._router_back, self._given_up, self._seen, self._log)
        self._owners: tuple[OwnerStatusReply, ...] = ()
        self._told_lost: set[tuple[str, int]] = set()
        self._footprints = footprint.Footprints()
        self._silent: set[str] = set()  # owners that do not answer: said once, not once a second

    async def run(self, stop: asyncio.Event) -> None:
        self._log.info("start", instance=self._instance, fence=self._cgroups.kind, slots=len(self._slots))
        await self._sweep_orphans()
        server = Server(self._paths.belayerd_sock, Request, self._handle)
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(server.serve()), group.create_task(self._router_peer.run())]
            work += [group.create_task(self._write_status()), group.create_task(self._zygote.run())]
            work += [group.create_task(self._keep_weights()), group.create_task(self._weigh_workers())]
            work += [group.create_task(self._trainers.run_command())]
            work += self._start_slots(group)
            notify("READY=1")
            await stop.wait()
            for task in work:
                task.cancel()
        self._log.info("stop", kept="workers, zygote and owners go on")
        for slot in self._slots.values():
            slot.close()
        self._router.close()
        self._context.destroy(linger=0)
        self._incidents.close()

    def _start_slots(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Adopted slots at once; each new one when the zygote is up and its own weights are sealed."""
        return [
            group.create_task(slot.run() if slot.known_workers() else self._begin(slot))
            for slot in self._slots.values()
        ]

    async def _begin(self, slot: SlotShell) -> None:
        await self._zygote.ready.wait()
        await self._sealed.wait(slot.config.model)
        await slot.run()

    async def _startable(self, model: str) -> None:
        """Until a worker of this model can be made. A host that was stopped and comes back knows workers of before:
        its slots run at once, while zygote and owner are still coming up, and an attempt then would only use up the
        restart budget, as it would while an update writes over the bytes that a worker begins with (in place)."""
        await self._zygote.ready.wait()
        while model in self._actions.held:  # noqa: ASYNC110 a set of names, which nobody is told of
            await asyncio.sleep(0.1)
        await self._sealed.wait(model)
        await self._until_owner_answers()

    async def _until_owner_answers(self) -> None:
        """A worker that finds no owner ends, and a few of those end the slot: one that is on its way is waited for, and
        one that nobody has started for a moment. Raises DaemonUnreachable."""
        end = monotonic() + _OWNER_S
        while True:
            try:
                await self._actions.weights.status(wait=False)
                return
            except OwnerComing:
                end = monotonic() + _OWNER_S
            except DaemonUnreachable:
                if monotonic() >= end:
                    raise
            await asyncio.sleep(0.1)

    def _tell_unsealed(self, model: str, why: str) -> None:
        for slot in self._slots.values():
            if slot.model == model:
                self._alert(slot.name, "waiting", slot.pair.generation, why)

    def _seen(self, status: RouterStatusReply) -> None:
        self._front_deaths.look(status)
        for name, worker_id in links_given_up(status, [slot.pair for slot in self._slots.values()]):
            why = "the router gave up the link to it: torn again and again"
            self._slots[name].left_behind(worker_id, why, Cause.HANG)

    def _view(self, slot: SlotShell) -> SlotView:
        view = slot.view()
        waits = "" if view.workers else self._sealed.waits.get(slot.model, "")
        coming = "" if view.protected else self._actions.weights.coming()
        return msgspec.structs.replace(view, reason=view.reason or waits or coming)

    async def _sweep_orphans(self) -> None:
        """Kill workers that no saved pair knows: a belayerd was killed between the fork and the save."""
        known = set().union(*(slot.known_workers() for slot in self._slots.values()))
        folder = self._cgroups.base
        found = {entry.name for entry in folder.iterdir() if entry.is_dir()} if folder else set()
        found |= {path.stem for path in (self._paths.run / "w").glob("*.sock")}
        for worker_id in sorted(found - known):
            leader = procs.listener(self._paths.worker_sock(worker_id))  # where trees are sessions, all that names one
            within = self._config.policy.fence_deadline_s
            born = procs.start_time(leader)
            dead, alive = await asyncio.to_thread(procs.kill_tree, self._cgroups, worker_id, leader, born, None, within)
            if not alive:  # or the next life would not find it
                sweep(self._paths, self._cgroups, worker_id)
            self._log.info("orphan swept", worker=worker_id, killed=dead, alive=alive)

    def _alert(self, slot: str, state: str, generation: int, reason: str) -> None:
        host = self._config.host.name
        self._alerts.tell(Alert(host=host, slot=slot, state=state, generation=generation, reason=reason, at=wall()))
        self._call_spares()

    def _zygote_failed(self, reason: str) -> None:
        """Slots go on without one, and none of them can be armed."""
        self._alerts.tell(
            Alert(host=self._config.host.name, slot="", state="zygote", generation=0, reason=reason, at=wall())
        )

    def _front_repeats(self, life: int, reason: str) -> None:
        host = self._config.host.name
        self._alerts.tell(Alert(host=host, slot="", state="front", generation=life, reason=reason, at=wall()))

    def _serves(self, slot: str, cause: str) -> None:
        self._trainers.observe(self._slots[slot], lambda: cause)

    def _look_after_trainers(self) -> None:
        """What belayerd could not write down before it was killed, and trainers that have ended."""
        for slot in self._slots.values():
            self._trainers.observe(slot, partial(self._last_cause, slot.name))
        self._trainers.sweep()

    def _last_cause(self, slot: str) -> str:
        """Of the newest incident on disk: it is there although belayerd was killed as the handover ended."""
        try:
            rows = self._incidents.latest()
        except Refused:
            return "unknown"
        return next((row.cause for row in rows if row.slot == slot), "unknown")

    def _call_spares(self) -> None:
        """Asked at each alert and, since belayerd may have been killed between the two, with each status."""
        for name in spares_to_call([slot.spare_view() for slot in self._slots.values()]):
            self._log.warning("spare called", slot=name)
            self._slots[name].call()

    def _given_up(self) -> tuple[str, ...]:
        """Slots for which no client should wait."""
        refused = [refusals.read(self._paths.run, f"owner-{kind}") for kind in self._silent]
        blocked = self._zygote.hopeless or any(one is not None and one.final for one in refused)
        whole = all(row.state == "sealed" for owner in self._owners for row in owner.weights)
        missing = bool(self._silent) or not whole or self._updates.open
        return beyond_help([slot.outlook() for slot in self._slots.values()], missing=missing, blocked=blocked)

    def _router_back(self) -> None:
        for slot in self._slots.values():
            slot.router_back()

    # --- status ---

    async def _write_status(self) -> None:
        while True:
            self._owners = await self._ask_owners()
            for owner in self._owners:
                if owner.kind == "kv":
                    arenas = {row.slot for row in owner.arenas}
                    for slot in self._slots.values():
                        slot.arenas_seen(arenas)
            self._call_spares()
            self._look_after_trainers()
            statefile.save(self._paths.status_file, self._status(), durable=False)
            await asyncio.sleep(1.0)

    async def _weigh_workers(self) -> None:
        while True:
            await self._footprints.refresh(tuple(self._view(slot) for slot in self._slots.values()))
            await asyncio.sleep(footprint.EVERY_S)

    async def _keep_weights(self) -> None:
        """Beside the status, because verifying the weights of a large model takes a while."""
        while True:
            for owner in self._owners:
                if owner.kind == "weights":
                    await self._updates.look(owner)
            await asyncio.sleep(1.0)

    async def _ask_owners(self) -> tuple[OwnerStatusReply, ...]:
        found = []
        for kind, link in (("weights", self._actions.weights), ("kv", self._actions.kv)):
            try:
                found.append(await link.status(wait=False))
                self._tell_lost(found[-1])
            except BelayerError as why:
                if kind not in self._silent:
                    self._log.warning("owner does not answer", kind=kind, why=str(why))
                self._silent.add(kind)
            else:
                if kind in self._silent:
                    self._log.info("owner answers", kind=kind)
                    for slot in self._slots.values():  # shadows that could not attach to it used up their starts
                        slot.try_again()
                self._silent.discard(kind)
        return tuple(found)

    def _tell_lost(self, owner: OwnerStatusReply) -> None:
        """What died with an owner and its store, once for each life of the owner."""
        life = (owner.kind, owner.owner_generation)
        if life in self._told_lost:
            return
        self._told_lost.add(life)
        for said in owner.lost:
            host = self._config.host.name
            alert = Alert(host=host, slot="", state="lost", generation=owner.owner_generation, reason=said, at=wall())
            self._alerts.tell(alert)

    def _status(self) -> HostStatusReply:
        slots = tuple(self._footprints.fill(self._view(slot)) for slot in self._slots.values())
        router = self._router_peer.status
        fronts = router.fronts if router else ()
        alive = len(self._owners) == 2 and router is not None and all(row.state == "serving" for row in fronts)
        return HostStatusReply(
            host=self._config.host.name,
            pid=os.getpid(),
            instance=self._instance,
            at=wall(),
            slots=slots,
            router=router.instance if router else "",
            router_url=router.url if router else f"http://{self._config.router.host}:{self._config.router.port}",
            owners=self._owners,
            zygote=f"pid {self._zygote.pid}" if self._zygote.ready.is_set() else self._zygote.failure or "starting",
            zygote_failed=self._zygote.hopeless,
            healthy=alive and all(slot.protected or slot.state == "reserve" for slot in slots),
            fronts=fronts,
            notes=self._trainers.notes(),
        )

    # --- requests ---

    async def _handle(self, message: Any) -> msgspec.Struct:
        match message:
            case Ping():
                return Pong(daemon="belayerd", pid=os.getpid(), instance=self._instance)
            case HostStatus():
                return self._status()
            case Handover():
                deadline = self._config.policy.fence_deadline_s + 10 * self._config.policy.step_deadline_s
                return IncidentReply(incident=await self._slot(message.slot).ask_handover(message.reason, deadline))
            case ListIncidents():
                return IncidentList(incidents=tuple(self._incidents.latest(message.limit)))
            case InjectWorkerFault():
                return await self._inject(message)
            case BeginWeightsUpdate():
                return await self._updates.begin(message.model, Opener.of(message))
            case EndWeightsUpdate():
                return await self._updates.end(message)
            case RestoreSlot():
                self._slot(message.slot).restore()
                return Done(detail="starting again")
            case RegisterTrainer() | AwaitReplaced() | AckReplaced() | UnregisterTrainer() | ListTrainers():
                return await self._trainers.handle(message)
            case _:
                raise Refused(f"belayerd does not answer {type(message).__name__}")

    def _slot(self, name: str) -> SlotShell:
        if name not in self._slots:
            raise SlotUnknown(f"no slot {name!r}", remedy=f"slots: {', '.join(self._slots) or 'none'}")
        return self._slots[name]

    async def _inject(self, message: InjectWorkerFault) -> FaultProof:
        """Break a worker on purpose and prove it: a fault that did not happen proves nothing."""
        slot = self._slot(message.slot)
        watched = slot.target(message.role)
        proof.signal_of(message.kind)
        slot.mark_injected(watched.ref.worker_id)
        proven = await proof.inject(watched.pidfd, watched.ref.pid, message.kind, watched.ref.worker_id)
        self._log.warning("injected", fault=message.kind, worker=watched.ref.worker_id, seen=proven.seen)
        return proven
