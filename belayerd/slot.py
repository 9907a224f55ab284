"""The shell of one slot: one inbox, one consumer; it performs what belayerd.pair_table decides.

Producers (pidfds, heartbeats, ends of actions, the operator) only put events into the inbox. ``Perform``, ``Spawn``
and ``Wait`` become tasks whose end is exactly one event; everything else is done at once and in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq.asyncio

from belayer import procs
from belayer.clock import Stopwatch, monotonic, wall
from belayer.config import Policy, Slot
from belayer.errors import BelayerError, HandoverFailed, OwnerComing, Refused, WeightsTorn, WorkerGone
from belayer.ids import new_incident_id, new_worker_id
from belayer.messages.control import Incident, SlotView, StepTiming
from belayer.messages.router import ResumeReport
from belayer.messages.worker import PAUSED, OracleReply, SpawnWorker, WorkerState, WorkerStatus, WorkerStatusReply
from belayer.paths import Paths
from belayerd import pair as p
from belayerd import pair_table, policy, views
from belayerd.actions import REPORT_S, YIELD_S, Actions, Target
from belayerd.links import spawn, still
from belayerd.records import Records
from belayerd.saved import SavedPair
from belayerd.updates import Seat
from belayerd.watch import Watched, sweep


class SlotShell:
    """One slot of this host. ``run`` is its life; ``ask_handover`` and friends are for the rpc handler."""

    def __init__(
        self,
        slot: Slot,
        limits: Policy,
        paths: Paths,
        actions: Actions,
        cgroups: procs.Cgroups,
        context: zmq.asyncio.Context,
        incidents: Records,
        log: Any,
        alert: Callable[[str, str, int, str], None],
        serves: Callable[[str, str], None],
        startable: Callable[[str], Awaitable[None]],
    ) -> None:
        """``startable``: waits until a worker of this model can be made."""
        self.config, self._paths, self._actions, self._cgroups = slot, paths, actions, cgroups
        self._context, self._incidents, self._log = context, incidents, log.bind(slot=slot.name)
        self._poll_s, self._alert, self._serves, self._startable = limits.poll_s, alert, serves, startable
        self._limits = policy.Limits(
            repeat_window_s=limits.repeat_window_s,
            restart_budget=limits.restart_budget,
            restart_backoff_s=limits.restart_backoff_s,
            hang_limit_s=slot.hang_limit_s,
            start_deadline_s=slot.start_deadline_s,
        )
        self._inbox: asyncio.Queue[p.Event] = asyncio.Queue()
        self._watched: dict[str, Watched] = {}
        self._ended: set[str] = set()  # ended while belayerd was down: nothing to watch, but files to sweep
        self._waiters: dict[str, asyncio.Future[Incident]] = {}
        self._injected: set[str] = set()
        self._ends: dict[str, str] = {}  # how a lost main ended, by worker
        self._versions: dict[str, int] = {}  # weights that a worker maps, by worker
        self._since = wall()
        self._served_at = 0.0
        self.rearm_ms = 0.0
        self.last_incident: Incident | None = None
        self._saved = SavedPair(paths, slot, self._log)
        self.pair = self._saved.load()

    # --- life ---

    def known_workers(self) -> set[str]:
        running = self.pair.running
        refs = (self.pair.main, self.pair.shadow, running.old if running else None)
        return {ref.worker_id for ref in refs if ref is not None}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._adopt()
            group.create_task(self._look())
            group.create_task(self._saved.keep())
            await self._consume()

    def _adopt(self) -> None:
        """Take up the workers of the saved state again (promise O1); those that have ended are events."""
        running = self.pair.running
        if running is not None and running.old is not None:
            self._watch(running.old, lost_matters=False)
        for ref in (self.pair.main, self.pair.shadow):
            if ref is not None and not self._watch(ref, lost_matters=True):
                self._lost(ref.worker_id, p.Cause.DEATH, f"pid {ref.pid} ended while belayerd was down")
        if self.pair.shadow is not None and self.pair.shadow.worker_id in self._watched:
            self._group.create_task(self._await_standby(self.pair.shadow))
        self._inbox.put_nowait(p.Wanted())

    def _watch(self, ref: p.Ref, *, lost_matters: bool, pidfd: int | None = None) -> bool:
        try:
            fd = procs.open_pidfd(ref.pid, ref.start_time) if pidfd is None else pidfd
        except WorkerGone:
            self._ended.add(ref.worker_id)
            return False
        lost, ranks = self._lost if lost_matters else lambda *_: None, self.config.tensor_parallel
        self._watched[ref.worker_id] = Watched(ref, fd, self._paths, self._context, lost, ranks)
        return True

    def _lost(self, worker_id: str, cause: p.Cause, detail: str) -> None:
        """A main is handed over at once and its incident learns the reason; of any other worker the reason comes first,
        since a start that fails is told by it alone."""
        incident = new_incident_id()
        event = p.WorkerLost(worker_id=worker_id, cause=cause, detail=detail, incident_id=incident)
        if cause is not p.Cause.DEATH:
            self._inbox.put_nowait(event)
        elif self.pair.main is not None and self.pair.main.worker_id == worker_id:
            self._inbox.put_nowait(event)
            self._group.create_task(self._learn(event))
        else:
            self._group.create_task(self._tell_learnt(event))

    async def _learn(self, event: p.WorkerLost) -> None:
        why = await self._actions.why_ended(event.worker_id)
        if not why:
            return
        detail = self._ends[event.worker_id] = f"{event.detail}: {why}"
        self._log.warning("main ended", worker=event.worker_id, why=why)
        last = self.last_incident
        if last is not None and last.incident_id == event.incident_id:  # it was written before the reason was known
            self.last_incident = msgspec.structs.replace(last, detail=detail)
            self._incidents.put(self.last_incident)

    async def _tell_learnt(self, event: p.WorkerLost) -> None:
        why = await self._actions.why_ended(event.worker_id) or event.detail
        self._log.warning("worker ended", worker=event.worker_id, why=why)
        self._inbox.put_nowait(msgspec.structs.replace(event, detail=f"{why}; {self._log_of(event.worker_id)}"))

    def _log_of(self, worker_id: str) -> str:
        return f"log at {self._paths.log(worker_id)}"

    async def _look(self) -> None:
        while True:
            now = monotonic()
            for watched in list(self._watched.values()):
                watched.look(now, self._limits)
            await asyncio.sleep(policy.look_every(self._poll_s, self._limits))

    async def _consume(self) -> None:
        while True:
            event = await self._inbox.get()
            try:
                after, effects = pair_table.step(self.pair, event, monotonic(), self._limits)
            except p.Refuse as why:
                self._answer_refused(event, str(why))
                continue
            self._note(event, after)
            self.pair = after
            for effect in effects:
                await self._do(effect)
            self._forget_unknown()

    def _note(self, event: p.Event, after: p.Pair) -> None:
        before = self.pair.state
        if after.state is before:
            return
        self._since = wall()
        if after.state is p.State.PROTECTED and before is p.State.REARMING:
            self.rearm_ms = (monotonic() - self._served_at) * 1e3 if self._served_at else 0.0
        name = type(event).__name__
        self._incidents.transition(wall(), self.pair.slot, before, after.state, name, after.generation)
        self._log.info("transition", before=before, after=after.state, on=name, generation=after.generation)

    def _forget_unknown(self) -> None:
        """Close and sweep workers that the pair no longer has and that have ended."""
        for worker_id in set(self._watched) - self.known_workers():
            watched = self._watched[worker_id]
            if watched.dead:
                watched.close()
                del self._watched[worker_id]
                self._versions.pop(worker_id, None)
                self._ends.pop(worker_id, None)
                self._ended.add(worker_id)
        for worker_id in self._ended - self.known_workers():
            sweep(self._paths, self._cgroups, worker_id)
        self._ended &= self.known_workers()

    # --- effects ---

    async def _do(self, effect: p.Effect) -> None:
        match effect:
            case p.Save():
                self._saved.save(self.pair)
            case p.Spawn():
                self._group.create_task(self._spawn(effect.yielding))
            case p.Perform():
                self._group.create_task(self._perform(effect))
            case p.Wait():
                self._group.create_task(self._wait(effect.seconds))
            case p.Record():
                self._record(effect)
            case p.Alert():
                self._alert(self.pair.slot, self.pair.state, self.pair.generation, effect.reason)
            case p.Kill():
                watched = self._watched.get(effect.worker.worker_id)
                said = await self._actions.kill(effect.worker, watched.pidfd if watched else None)
                self._log.info("killed", worker=effect.worker.worker_id, seen=said)
            case p.Announce():
                await self._try(
                    "announce",
                    self._actions.announce(
                        self.pair.slot, self.config.model, effect.worker, effect.generation, self.pair.oracle
                    ),
                )
            case p.Withdraw():
                withdraw = self._actions.withdraw(self.pair.slot, effect.generation, effect.reason)
                await self._try("withdraw", withdraw)
            case p.QuarantineArena():
                await self._try("quarantine", self._actions.quarantine(self.pair.slot, effect.reason))
            case p.RestoreArena():
                await self._try("restore", self._actions.restore(self.pair.slot, self.config.device))
            case _:
                raise AssertionError(f"no shell for {effect}")

    async def _try(self, what: str, work: Any) -> None:
        """A peer that is down is no reason to stop: it is told again when it is back, and the log says so."""
        try:
            await work
        except BelayerError as why:
            self._log.warning("peer did not take it", what=what, why=str(why))

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._inbox.put_nowait(p.BackoffOver())

    async def _spawn(self, yielding: bool) -> None:
        if yielding:
            await asyncio.wait({self._group.create_task(self._report_resumed(self.pair.generation))}, timeout=YIELD_S)
        try:
            await self._startable(self.config.model)
        except BelayerError as why:
            self._inbox.put_nowait(p.SpawnFailed(reason=str(why)))
            return
        worker_id = new_worker_id(self.config.name)
        message = SpawnWorker(worker_id=worker_id, slot=self.config.name, cgroup=self._cgroups.make(worker_id))
        try:
            reply, pidfd = await asyncio.to_thread(spawn, self._paths, message, self._limits.start_deadline_s)
        except BelayerError as why:
            # A zygote that was killed after the fork leaves a worker that nobody knows of.
            await self._actions.kill(p.Ref(worker_id=worker_id, pid=0, start_time=0), None)
            self._cgroups.remove(worker_id)
            self._inbox.put_nowait(p.SpawnFailed(reason=str(why)))
            return
        ref = p.Ref(worker_id=worker_id, pid=reply.pid, start_time=reply.start_time)
        self._watch(ref, lost_matters=True, pidfd=pidfd)
        self._inbox.put_nowait(p.Spawned(worker=ref))
        await self._await_standby(ref)

    async def _await_standby(self, ref: p.Ref) -> None:
        """A starting worker answers once its engine loop runs; its death or silence is the watcher's to tell."""
        watched = self._watched[ref.worker_id]
        try:
            status = await watched.link.call(WorkerStatus(), WorkerStatusReply, self._limits.start_deadline_s)
        except WorkerGone:
            return  # its pidfd tells
        except BelayerError as why:
            self._lost(ref.worker_id, p.Cause.HANG, f"{why}; {self._log_of(ref.worker_id)}")
            return
        if status.state is WorkerState.FAILED or status.oracle is None:
            self._lost(ref.worker_id, p.Cause.DEATH, status.failure or "no oracle")
        else:
            self._versions[ref.worker_id] = status.weight_version
            self._inbox.put_nowait(p.StandbyReady(worker_id=ref.worker_id, oracle=status.oracle))

    async def _perform(self, effect: p.Perform) -> None:
        worker = self._watched.get(effect.worker.worker_id) if effect.worker else None
        old = self._watched.get(effect.old.worker_id) if effect.old else None
        target = Target(
            slot=self.pair.slot,
            model=self.config.model,
            generation=effect.generation,
            worker=effect.worker,
            link=worker.link if worker else None,
            old=effect.old,
            old_pidfd=old.pidfd if old else None,
            oracle=self.pair.oracle,
            reason=self._reason(),
            device=self.config.device,
            moving=worker.moving if worker else still,
        )
        watch = Stopwatch()
        try:
            if effect.worker is not None and worker is None:
                # It ended while belayerd was down: this life has nothing of it, and its reason may come later.
                raise WorkerGone(await self._actions.why_ended(effect.worker.worker_id) or "it ended unwatched")
            performed = await self._actions.perform(effect.action, target)
        except BelayerError as why:
            gone = isinstance(why, WorkerGone) or (worker is not None and worker.dead)
            self._log.warning("action failed", action=effect.action, why=str(why), worker_gone=gone)
            failed = p.ActionFailed(
                action=effect.action,
                serial=effect.serial,
                reason=str(why),
                worker_gone=gone,
                not_yet=isinstance(why, WeightsTorn | OwnerComing),
            )
            self._inbox.put_nowait(failed)
            return
        done = p.ActionDone(
            action=effect.action,
            serial=effect.serial,
            ms=watch.ms(),
            detail=performed.detail,
            oracle=performed.oracle,
        )
        self._inbox.put_nowait(done)

    async def _report_resumed(self, generation: int) -> None:
        self._resumed(generation, await self._actions.until_resumed(self.pair.slot, generation))

    def _resumed(self, generation: int, report: ResumeReport | None) -> None:
        """Step 5 is the router's; its figure joins the incident when it is known."""
        incident = self.last_incident
        if report is None or incident is None or incident.to_generation != generation:
            return
        said, ms = f"{report.resumed} request(s) resumed", max(report.first_token_ms, 0.0)
        if report.resumed and report.first_token_ms < 0:
            said, ms = f"{said}, no token of them in {REPORT_S:g} s", REPORT_S * 1e3
        step = StepTiming(step="5 resume", ms=ms, detail=said)
        self.last_incident = msgspec.structs.replace(incident, steps=(*incident.steps, step))
        self._incidents.put(self.last_incident)

    def _reason(self) -> str:
        running = self.pair.running
        if running is None or running.cause is p.Cause.OPERATOR:
            return "planned handover"
        return f"{running.cause}: {running.detail}"

    def _record(self, effect: p.Record) -> None:
        running = effect.running
        if effect.outcome == "served":
            self._served_at = monotonic()
        old = running.old.worker_id if running.old else ""
        incident = views.incident(
            self.pair, running, effect.outcome, old in self._injected, self._ends.get(old, running.detail), monotonic()
        )
        self._incidents.put(incident)
        self._log.info(
            "incident",
            id=incident.incident_id,
            cause=incident.cause,
            outcome=incident.outcome,
            ms=round(incident.total_ms, 1),
        )
        if effect.outcome == "served":
            self._serves(self.pair.slot, running.cause)
        if effect.outcome != "open":
            started = running.cause is p.Cause.START and effect.outcome == "served"
            self.last_incident = self.last_incident if started else incident
            waiter = self._waiters.pop(incident.incident_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(incident)

    # --- for the rpc handler ---

    async def ask_handover(self, reason: str, within: float) -> Incident:
        incident_id = new_incident_id()
        future: asyncio.Future[Incident] = asyncio.get_running_loop().create_future()
        self._waiters[incident_id] = future
        self._inbox.put_nowait(p.HandoverAsked(reason=reason, incident_id=incident_id))
        try:
            async with asyncio.timeout(within):
                return await future
        except TimeoutError as why:
            raise HandoverFailed(
                f"handover of {self.pair.slot} not done in {within:g} s (state {self.pair.state})",
                kept="it goes on; see belayerctl incidents",
            ) from why
        finally:
            self._waiters.pop(incident_id, None)

    def _answer_refused(self, event: p.Event, why: str) -> None:
        self._log.info("refused", on=type(event).__name__, why=why)
        if isinstance(event, p.HandoverAsked):
            waiter = self._waiters.pop(event.incident_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_exception(Refused(why, kept="the slot as it is", remedy="wait until it is protected"))

    def restore(self) -> None:
        if self.pair.state not in (p.State.QUARANTINED, p.State.EXPOSED, p.State.EMPTY):
            raise Refused(f"slot {self.pair.slot} is {self.pair.state}: nothing to restore")
        self._inbox.put_nowait(p.RestoreAsked())

    def arenas_seen(self, arenas: set[str]) -> None:
        """What the kv owner holds now; a ready shadow whose arena is not there maps that of an owner that has died."""
        if self.pair.state in (p.State.PROTECTED, p.State.RESERVE) and self.pair.slot not in arenas:
            self._inbox.put_nowait(p.ArenaGone())

    # --- for weight updates (belayerd.updates) ---

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model(self) -> str:
        return self.config.model

    def seats(self) -> tuple[Seat | None, Seat | None]:
        """The serving main and the ready shadow."""
        ready = self.pair.state in (p.State.PROTECTED, p.State.RESERVE)
        return self._seat(self.pair.main), self._seat(self.pair.shadow) if ready else None

    def _seat(self, ref: p.Ref | None) -> Seat | None:
        watched = self._watched.get(ref.worker_id) if ref else None
        if ref is None or watched is None or watched.dead:
            return None
        pulse = watched.seen.pulse if watched.seen else None
        known = self.pair.oracle.weight_version if self.pair.oracle else 0
        return Seat(
            worker_id=ref.worker_id,
            link=watched.link,
            generation=self.pair.generation,
            version=self._versions.get(ref.worker_id, known),
            paused=pulse is not None and pulse.phase == PAUSED,
            moving=watched.moving,
        )

    def settled(self) -> bool:
        return self.pair.state not in (p.State.HANDOVER, p.State.FENCING)

    def followed(self, worker_id: str, reply: OracleReply) -> None:
        self._versions[worker_id] = reply.oracle.weight_version
        self._inbox.put_nowait(p.Followed(worker_id=worker_id, oracle=reply.oracle))

    def left_behind(self, worker_id: str, why: str, cause: p.Cause = p.Cause.WEIGHTS) -> None:
        watched = self._watched.get(worker_id)
        if watched is None or not watched.dead:  # a death is told by its pidfd, with its reason
            self._lost(worker_id, cause, why)

    def try_again(self) -> None:
        """Starts failed while an owner was away or weights were being written; now they can."""
        if self.pair.state in (p.State.EXPOSED, p.State.EMPTY) and self.pair.failed_starts:
            self._inbox.put_nowait(p.Wanted())

    def spare_view(self) -> policy.SpareView:
        return policy.SpareView(
            slot=self.pair.slot,
            model=self.config.model,
            state=self.pair.state,
            configured=self.config.spare,
            waiting=self.pair.spare,
        )

    def call(self) -> None:
        """This spare is to take the place of a quarantined slot."""
        self._inbox.put_nowait(p.Called())

    def router_back(self) -> None:
        self._inbox.put_nowait(p.RouterBack())

    def target(self, role: str) -> Watched:
        """The watched worker that plays ``role`` now. Raises Refused."""
        ref = self.pair.main if role == "main" else self.pair.shadow
        if ref is None or ref.worker_id not in self._watched:
            raise Refused(f"slot {self.pair.slot} has no {role} now (state {self.pair.state})")
        return self._watched[ref.worker_id]

    def mark_injected(self, worker_id: str) -> None:
        self._injected.add(worker_id)

    def view(self) -> SlotView:
        reason = self.pair.reason or self._paused()
        return views.slot(
            self.pair, self.config, self._watched, reason, self._since, self.last_incident, self.rearm_ms,
            self._gave_up(),
        )  # fmt: skip

    def _gave_up(self) -> bool:
        """Whatever waits in the inbox may be the operator's word that it shall be tried again."""
        return policy.gave_up(self.pair.state, self.pair.failed_starts, self._limits) and self._inbox.empty()

    def outlook(self) -> policy.Outlook:
        workers = sum(ref is not None for ref in (self.pair.main, self.pair.shadow))
        gave_up = self._gave_up()
        return policy.Outlook(slot=self.pair.slot, state=self.pair.state, gave_up=gave_up, workers=workers)

    def _paused(self) -> str:
        main, _ = self.seats()
        return "its main is paused: an update of its weights is open" if main is not None and main.paused else ""

    def close(self) -> None:
        for watched in self._watched.values():
            watched.close()
