"""What each action of a handover does. Every one is idempotent: a belayerd killed inside it performs it again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from belayer import lastwords
from belayer.clock import monotonic
from belayer.config import Policy
from belayer.errors import (
    DaemonUnreachable,
    Fenced,
    HandoverFailed,
    LeaseRefused,
    OwnerComing,
    WorkerGone,
)
from belayer.messages.common import Done
from belayer.messages.owner import ArenaInfo
from belayer.messages.router import (
    RegisterWorker,
    ResumeReport,
    RouterStatus,
    RouterStatusReply,
    UnregisterWorker,
)
from belayer.messages.worker import (
    BecomeMain,
    CheckOracle,
    FlushCache,
    FollowWeights,
    Oracle,
    OracleReply,
    TakeArena,
    Unpark,
    WorkerState,
    WorkerStatus,
    WorkerStatusReply,
)
from belayer.paths import Paths
from belayer.procs import Cgroups, kill_tree
from belayer.rpc import Client
from belayerd import weights_gate
from belayerd.gate import CPU, HealthGate
from belayerd.handover import BY_ACTION, Action
from belayerd.links import Moving, OwnerLink, WorkerLink, how_ended, still
from belayerd.pair import Ref

_LOOK_S = 0.002
_ASK_S = 1.0
YIELD_S = 1.0  # interrupted requests come first: a slot is exposed this much longer at most
REPORT_S = 30.0  # how long step 5 is waited for, for its figure


class Target(msgspec.Struct, kw_only=True):
    """What an action works on. ``link``: of the worker being promoted; ``old_pidfd``: None when it has ended.
    ``reason``: a planned handover is not counted as a death of the requests on board (poison bound). ``moving``: how
    far the worker is with a weight version."""

    slot: str
    model: str
    generation: int
    worker: Ref | None
    link: WorkerLink | None
    old: Ref | None
    old_pidfd: int | None
    oracle: Oracle | None
    reason: str
    device: str = CPU
    moving: Moving = still


@dataclass(frozen=True)
class Performed:
    """``detail``: what was really done. ``oracle``: of the weight version that the worker has moved to."""

    detail: str
    oracle: Oracle | None = None


class Actions:
    """Performs actions for all slots; ``perform`` returns what was really done, or raises a BelayerError."""

    def __init__(
        self,
        paths: Paths,
        router: Client,
        cgroups: Cgroups,
        gate: HealthGate,
        limits: Policy,
    ) -> None:
        self._paths, self._router, self._cgroups, self._gate = paths, router, cgroups, gate
        self._step_s, self._fence_s = limits.step_deadline_s, limits.fence_deadline_s
        self._follow_s = limits.follow_deadline_s
        self.weights = OwnerLink(paths, "weights", self._step_s, limits.owner_deadline_s)
        self.kv = OwnerLink(paths, "kv", self._step_s, limits.owner_deadline_s)
        self.held: set[str] = set()  # models whose bytes may be changing (belayerd.updates)
        self._table: dict[Action, Callable[[Target], Awaitable[str | Performed]]] = {
            Action.UNREGISTER: self._unregister,
            Action.FENCE: self._fence,
            Action.OWNERS: self._owners,
            Action.HEALTH: self._health,
            Action.LEASE: self._lease,
            Action.FLUSH: self._flush,
            Action.UNPARK: self._unpark,
            Action.ORACLE: self._oracle,
            Action.BECOME: self._become,
            Action.REGISTER: self._register,
        }

    async def perform(self, action: Action, target: Target) -> Performed:
        deadline = self._fence_s + 1 if BY_ACTION[action].fence_deadline else self._step_s
        if action is Action.OWNERS:  # each of its waits has a bound, one of them by how long nothing moves
            deadline = math.inf
        try:
            async with asyncio.timeout(None if math.isinf(deadline) else deadline):
                done = await self._table[action](target)
                return done if isinstance(done, Performed) else Performed(done)
        except TimeoutError as why:
            raise HandoverFailed(f"{action} did not end in {deadline:g} s") from why

    async def _unregister(self, target: Target) -> str:
        message = UnregisterWorker(slot=target.slot, generation=target.generation - 1, reason=target.reason)
        done = await self._router.call(message, Done, self._step_s)
        return done.detail

    async def _fence(self, target: Target) -> str:
        said, old = "no old tree", target.old
        if old is not None:
            dead, alive = await asyncio.to_thread(
                kill_tree, self._cgroups, old.worker_id, old.pid, old.start_time, target.old_pidfd, self._fence_s
            )
            if alive:
                raise HandoverFailed(
                    f"old tree of {old.worker_id} not dead in {self._fence_s:g} s: pids {alive}",
                    kept="the arena stays with its old holder",
                )
            said = f"{dead} process(es) of {old.worker_id} seen dead"
        return f"{said}; {await self._free_arena(target.slot)}"

    async def _free_arena(self, slot: str) -> str:
        try:
            arenas = [await self._free_one(arena) for arena in await self.kv.arenas(slot)]
        except Fenced:  # the owner was replaced in between: look again at what its next life holds
            arenas = [await self._free_one(arena) for arena in await self.kv.arenas(slot)]
        return f"arena free at epoch {arenas[0].epoch}" if arenas else "arena not made yet"

    async def _free_one(self, arena: ArenaInfo) -> ArenaInfo:
        if arena.state == "leased":
            arena = await self.kv.begin_fence(arena)
        if arena.state == "fencing":
            arena = await self.kv.end_fence(await self._until_dead(arena))
        if arena.state != "free":
            raise LeaseRefused(f"arena of {arena.slot} is {arena.state} (holder {arena.holder or 'none'})")
        return arena

    async def _until_dead(self, arena: ArenaInfo) -> ArenaInfo:
        """A rank that dies with its leader leaves the group's list before its pidfd says so: nobody was left to kill,
        and the owner, which holds a pidfd of every rank, has not seen it dead yet."""
        end = monotonic() + self._fence_s
        while arena.holder_alive and monotonic() < end:
            await asyncio.sleep(_LOOK_S)
            rows = await self.kv.arenas(arena.slot)
            arena = next((row for row in rows if row.rank == arena.rank), arena)
        return arena

    async def _owners(self, target: Target) -> Performed:
        assert target.link is not None
        weights, kv = await asyncio.gather(self.weights.status(), self.kv.status())
        parts = weights_gate.parts_of(target.model, weights)
        weights_gate.settled_or_refuse(parts, held=target.model in self.held)
        info = parts[0]
        worker = await target.link.call(WorkerStatus(), WorkerStatusReply, self._step_s)
        if worker.weight_version < info.version:
            # An update was committed while this one was a shadow: it follows now, and its oracle counts for all later.
            await self._follow(target.link, target.moving, info.version)
            worker = await target.link.call(WorkerStatus(), WorkerStatusReply, self._step_s)
        weights_gate.same_or_refuse(parts, worker)
        said = f"weights pid {weights.pid} v{info.version} {info.digest[:12]}, kv pid {kv.pid}"
        # Also when it followed in an attempt whose end nobody heard: an older oracle must not be asked for again.
        return Performed(said, worker.oracle)

    async def _follow(self, link: WorkerLink, moving: Moving, version: int) -> None:
        try:
            await link.call(FollowWeights(version=version), OracleReply, self._follow_s, moving)
        except DaemonUnreachable as why:  # its owner, not itself: killed in the middle
            await self.weights.status()
            raise OwnerComing(f"the owner came back while the worker followed: {why}") from why

    async def _health(self, target: Target) -> str:
        assert target.link is not None
        return await self._gate.check(target.device, target.link, self._step_s)

    async def _lease(self, target: Target) -> str:
        assert target.link is not None
        arena = await self.kv.arena(target.slot)
        if arena is None:
            raise WorkerGone(
                f"the kv owner was replaced: it has no arena for {target.slot}, the worker maps an old one"
            )
        mine = target.worker is not None and arena.state == "leased" and arena.holder == target.worker.worker_id
        if arena.state != "free" and not mine:
            raise LeaseRefused(f"arena of {target.slot} is {arena.state} (holder {arena.holder or 'none'})")
        if mine:
            return f"epoch {arena.epoch}, leased before"
        done = await target.link.call(
            TakeArena(epoch=arena.epoch, owner_generation=arena.owner_generation), Done, self._step_s
        )
        return f"epoch {arena.epoch}, mapped shared in {done.ms:.2f} ms"

    async def _flush(self, target: Target) -> str:
        assert target.link is not None
        return (await target.link.call(FlushCache(), Done, self._step_s)).detail

    async def _unpark(self, target: Target) -> str:
        assert target.link is not None
        return (await target.link.call(Unpark(), Done, self._step_s)).detail

    async def _oracle(self, target: Target) -> str:
        assert target.link is not None
        reply = await target.link.call(CheckOracle(expected=target.oracle), OracleReply, self._step_s)
        if not reply.equal:
            raise HandoverFailed(f"oracle gave {reply.oracle}, the main had recorded {target.oracle}")
        return f"token {reply.oracle.token} logprob {reply.oracle.logprob:.4f} equal"

    async def _become(self, target: Target) -> str:
        assert target.link is not None
        status = await target.link.call(WorkerStatus(), WorkerStatusReply, self._step_s)
        if status.state is WorkerState.MAIN and status.generation == target.generation:
            return "main before"  # a belayerd that was killed here had already told it
        return (await target.link.call(BecomeMain(generation=target.generation), Done, self._step_s)).detail

    async def _register(self, target: Target) -> str:
        assert target.worker is not None
        return await self.announce(target.slot, target.model, target.worker, target.generation, target.oracle)

    async def until_resumed(self, slot: str, generation: int) -> ResumeReport | None:
        """Step 5, seen from the router: until a token of a resumed request was delivered, or none was interrupted, or
        ``REPORT_S`` is over. None when the router does not say."""
        end = monotonic() + REPORT_S
        report: ResumeReport | None = None
        while monotonic() < end:
            try:
                status = await self._router.call(RouterStatus(), RouterStatusReply, self._step_s)
            except DaemonUnreachable:
                return None
            row = next((row for row in status.slots if row.slot == slot), None)
            report = row.last_resume if row else None
            if report is None or report.generation != generation:
                return None
            if report.resumed == 0 or report.first_token_ms >= 0:
                return report
            await asyncio.sleep(0.05)
        return report

    async def announce(self, slot: str, model: str, worker: Ref, generation: int, oracle: Oracle | None) -> str:
        message = RegisterWorker(
            slot=slot,
            generation=generation,
            worker_id=worker.worker_id,
            endpoint=f"ipc://{self._paths.worker_sock(worker.worker_id)}",
            model=model,
            weight_version=oracle.weight_version if oracle else 0,
        )
        return (await self._router.call(message, Done, self._step_s)).detail

    async def withdraw(self, slot: str, generation: int, reason: str) -> None:
        message = UnregisterWorker(slot=slot, generation=generation, gone=True, reason=reason)
        await self._router.call(message, Done, self._step_s)

    async def why_ended(self, worker_id: str) -> str:
        """Its own words, else how the kernel ended it, "" when neither is known. Not long: others wait for it."""
        words = lastwords.read(self._paths.last_words(worker_id))
        return words or await asyncio.to_thread(how_ended, self._paths, worker_id, _ASK_S)

    async def kill(self, worker: Ref, pidfd: int | None) -> str:
        dead, alive = await asyncio.to_thread(
            kill_tree, self._cgroups, worker.worker_id, worker.pid, worker.start_time, pidfd, self._fence_s
        )
        return f"{dead} dead, {len(alive)} alive {alive or ''}".strip()

    async def quarantine(self, slot: str, reason: str) -> None:
        """Also of an arena whose holder would not die: the owner wants to hear of the fence first."""
        for arena in await self.kv.arenas(slot):
            if arena.state == "leased":
                arena = await self.kv.begin_fence(arena)
            if arena.state != "quarantined":
                await self.kv.quarantine(arena, reason)

    async def restore(self, slot: str, device: str) -> None:
        await self._gate.renew(device)
        for arena in await self.kv.arenas(slot):
            if arena.state == "quarantined":
                await self.kv.restore(arena)
