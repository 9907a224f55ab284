"""Weight updates with engines on board: pause, let the writer write, bring every worker to the sealed version, go on.

The owner decides what is sealed (promise R4); here it is only seen to that no worker computes with anything else. It is
done by level and not by edge: once a second the versions that workers map are compared with the sealed one, so that a
belayerd, trainer or worker that dies at any point leaves nothing paused and nothing behind. A worker that cannot
follow is replaced: a main by a handover, whose gate brings the shadow along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from belayer import procs
from belayer.clock import Stopwatch, monotonic
from belayer.config import Policy
from belayer.errors import BelayerError, DaemonUnreachable, Refused, WeightsBroken, WeightsTorn
from belayer.messages.common import Done
from belayer.messages.control import BeginWeightsUpdate, EndWeightsUpdate, SlotWeights, WeightsUpdated
from belayer.messages.owner import OwnerStatusReply, WeightsInfo
from belayer.messages.worker import FollowWeights, OracleReply, Pause, Proceed, WorkerStatus, WorkerStatusReply
from belayerd import weights_gate
from belayerd.links import Moving, OwnerLink, WorkerLink, still
from belayerd.weights_gate import Parts


@dataclass(frozen=True)
class Seat:
    """One worker of a slot as an update sees it. ``version``: of the weights that it maps, as far as is known.
    ``moving``: how far it is with the next one."""

    worker_id: str
    link: WorkerLink
    generation: int
    version: int
    paused: bool
    moving: Moving = still


@dataclass(frozen=True)
class Opener:
    """Who opened an update. ``until``: monotonic seconds; ``pid`` 0: a caller that did not name its process. The rest
    as in BeginWeightsUpdate."""

    until: float
    pid: int = 0
    start_time: int = 0
    update: str = ""
    trainer: str = ""
    epoch: int = 0

    @classmethod
    def of(cls, asked: BeginWeightsUpdate) -> Self:
        until = monotonic() + asked.within_s
        return cls(until, asked.pid, asked.start_time, asked.update, asked.trainer, asked.epoch)

    def may_still_write(self) -> bool:
        gone = self.pid > 0 and not procs.lives(self.pid, self.start_time)
        return not gone and monotonic() < self.until


class UpdatedSlot(Protocol):
    """What a slot's shell offers to an update."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    def seats(self) -> tuple[Seat | None, Seat | None]: ...
    def settled(self) -> bool: ...
    def followed(self, worker_id: str, reply: OracleReply) -> None: ...
    def left_behind(self, worker_id: str, why: str) -> None: ...
    def try_again(self) -> None: ...


class Roll(Protocol):
    """Who is registered: belayerd.trainers."""

    def fence(self, trainer: str, epoch: int) -> None: ...
    def refuse_owed(self, model: str) -> None: ...


class Updates:
    """``held``: models whose handovers wait at the gate, because their bytes may be changing under them."""

    def __init__(
        self,
        slots: Sequence[UpdatedSlot],
        weights: OwnerLink,
        in_place: Mapping[str, bool],
        limits: Policy,
        log: Any,
        roll: Roll,
    ) -> None:
        self._slots, self._weights, self._in_place, self._limits, self._log = slots, weights, in_place, limits, log
        self._roll = roll
        self._locks = {model: asyncio.Lock() for model in in_place}
        self._open: dict[str, Opener] = {}
        self._said: dict[str, str] = {}
        self.held: set[str] = set()

    @property
    def open(self) -> bool:
        """Whether a writer may be at work on some model."""
        return bool(self._open)

    async def begin(self, model: str, opener: Opener) -> WeightsUpdated:
        """Pause every main. Raises Refused when a handover does not end in time, ReplacementOwed while a trainer has
        not acknowledged one, Fenced for a life of a trainer that has ended, all with everything going on."""
        async with self._lock(model):
            self._roll.fence(opener.trainer, opener.epoch)
            if model in self._open:
                if self._open[model].may_still_write():
                    raise Refused(f"an update of {model} is open already", remedy="end it first")
                await self._finish(model)  # whoever opened it has gone or given up
            self._open[model] = opener
            if self._in_place[model]:
                self.held.add(model)
            slots = self._of(model)
            try:
                await self._until(lambda: all(slot.settled() for slot in slots), "a handover is running")
                # After the wait: its place may have been taken, and the handover just ended is one it must know of.
                self._roll.fence(opener.trainer, opener.epoch)
                self._roll.refuse_owed(model)
                done = await asyncio.gather(*(self._pause(slot, self._patience(model, opener)) for slot in slots))
                self._refuse_moving(model, slots, done)
                info = await self._info(model)
            except BelayerError:
                await self._finish(model)
                raise
            self._log.info("weights update begins", model=model, version=info.version)
            return WeightsUpdated(model=model, version=info.version, slots=tuple(done))

    async def end(self, asked: EndWeightsUpdate) -> WeightsUpdated:
        """Every worker at the sealed version, and going. Raises WeightsTorn with the mains paused (what they map may
        be torn), Refused while the writer is still there; then it ends by itself once the writer has. Also Refused
        while another update is open, whose writer relies on the pause. Raises Fenced for a life of a trainer that has
        ended; an update that it had open is ended before that, or engines would wait for nobody."""
        async with self._lock(asked.model):
            opened = self._open.get(asked.model)
            if opened is None or asked.update != opened.update:
                self._roll.fence(asked.trainer, asked.epoch)
            if opened is not None:
                await self._refuse_foreign(asked, opened)
                self._open[asked.model] = replace(opened, until=0.0)
            done = await self._finish(asked.model)
            self._roll.fence(asked.trainer, asked.epoch)
            return done

    async def look(self, status: OwnerStatusReply) -> None:
        """Once a second: what no open update explains is put right."""
        for model in dict.fromkeys(row.model for row in status.weights):
            lock = self._locks.get(model)
            rows = [row for row in status.weights if row.model == model]
            if lock is None or lock.locked() or not self._behind(model, max(row.version for row in rows)):
                continue
            opener = self._open.get(model)
            if any(row.writer for row in rows) or (opener is not None and opener.may_still_write()):
                continue
            async with lock:
                await self._put_right(model)

    # --- inside ---

    def _lock(self, model: str) -> asyncio.Lock:
        if model not in self._locks:
            raise Refused(f"no model {model!r} on this host", remedy=f"one of {sorted(self._locks)}")
        return self._locks[model]

    def _of(self, model: str) -> list[UpdatedSlot]:
        return [slot for slot in self._slots if slot.model == model]

    def _behind(self, model: str, version: int) -> bool:
        if model in self._open:
            return True
        seats = [seat for slot in self._of(model) for seat in slot.seats() if seat is not None]
        return any(seat.paused or seat.version < version for seat in seats)

    async def _refuse_foreign(self, asked: EndWeightsUpdate, opened: Opener) -> None:
        if asked.update in ("", opened.update):
            return
        info = await self._info(asked.model)
        raise Refused(
            f"another update of {asked.model} is open (of process {opened.pid or 'unknown'})",
            kept=f"v{info.version} is {info.state}, the other's pause",
            remedy="nothing: engines follow what is sealed when that one ends",
        )

    async def _put_right(self, model: str) -> None:
        try:
            done = await self._finish(model)
        except BelayerError as why:
            if self._said.get(model) != why.message:
                self._log.error("workers cannot follow the weights", model=model, why=str(why))
            self._said[model] = why.message
        else:
            self._said.pop(model, None)
            self._log.warning("workers brought to the sealed weights", model=model, version=done.version)

    async def _finish(self, model: str) -> WeightsUpdated:
        parts = await self._parts(model)
        info = weights_gate.together(parts)
        if info.writer:
            raise Refused(
                f"{info.writer} is still writing {model}", kept="mains paused", remedy="commit or abort first"
            )
        if info.state != "sealed":
            raise WeightsTorn(
                f"weights of {model} are {info.state}: {info.reason}",
                kept="mains stay paused, requests wait",
                remedy="publish the weights again",
            )
        done = await asyncio.gather(*(self._follow(slot, parts) for slot in self._of(model)))
        self._open.pop(model, None)
        self.held.discard(model)
        for slot in self._of(model):
            slot.try_again()
        return WeightsUpdated(model=model, version=info.version, slots=tuple(done))

    async def _info(self, model: str) -> WeightsInfo:
        return weights_gate.together(await self._parts(model))

    async def _parts(self, model: str) -> Parts:
        return weights_gate.parts_of(model, await self._weights.status())

    def _patience(self, model: str, opener: Opener) -> float:
        """A long step is legal, and its main pauses after it. In place that is waited for as long as the writer waits:
        a main that hangs is seen by its watcher meanwhile."""
        step = self._limits.step_deadline_s
        return max(step, opener.until - monotonic()) if self._in_place[model] else step

    def _refuse_moving(self, model: str, slots: Sequence[UpdatedSlot], rows: Sequence[SlotWeights]) -> None:
        """A main that may still be inside a step would compute with bytes of two versions (promise R4)."""
        moving = [
            row.reason
            for slot, row in zip(slots, rows, strict=True)
            if row.reason and slot.settled() and slot.seats()[0] is not None
        ]
        if self._in_place[model] and moving:
            raise Refused(
                f"a main of {model} does not pause: {'; '.join(moving)}",
                kept="the last version, nothing was written",
                remedy="try again, with a longer within_s where steps are long",
            )

    async def _pause(self, slot: UpdatedSlot, within: float) -> SlotWeights:
        main, shadow = slot.seats()
        watch, reason = Stopwatch(), ""
        if main is not None:
            try:
                await main.link.call(Pause(generation=main.generation), Done, within)
            except BelayerError as why:  # where it is dying, its watcher sees it, and the gate holds its successor
                reason = str(why)
        return _row(slot, main, shadow, watch, reason)

    async def _follow(self, slot: UpdatedSlot, parts: Parts) -> SlotWeights:
        watch, reasons, version = Stopwatch(), [], parts[0].version
        main, shadow = slot.seats()
        oracle: OracleReply | None = None
        for seat in (main, shadow):
            if seat is None:
                continue
            try:
                reply = await self._bring(seat, parts, is_main=seat is main)
                if reply is not None and oracle is not None and reply.oracle.token != oracle.oracle.token:
                    raise WeightsBroken(f"its oracle gives {reply.oracle}, the main's {oracle.oracle}")
            except DaemonUnreachable as why:  # of its owner, killed under it: looked at again once one answers
                reasons.append(f"{seat.worker_id}: {why}")
            except BelayerError as why:
                reasons.append(f"{seat.worker_id}: {why}")
                slot.left_behind(seat.worker_id, f"weights v{version}: {why.message}")
            else:
                oracle = oracle or reply
                if reply is not None:
                    slot.followed(seat.worker_id, reply)
        return _row(slot, *slot.seats(), watch, "; ".join(reasons))

    async def _bring(self, seat: Seat, parts: Parts, *, is_main: bool) -> OracleReply | None:
        """To the sealed version when it is behind, and going when it is paused."""
        step, version = self._limits.step_deadline_s, parts[0].version
        status = await seat.link.call(WorkerStatus(), WorkerStatusReply, step)
        reply = None
        if status.weight_version < version:
            if is_main and not status.paused:
                await seat.link.call(Pause(generation=seat.generation), Done, step)
            message = FollowWeights(version=version)
            reply = await seat.link.call(message, OracleReply, self._limits.follow_deadline_s, seat.moving)
            # Rank by rank: before it takes a step for anybody.
            weights_gate.same_or_refuse(parts, await seat.link.call(WorkerStatus(), WorkerStatusReply, step))
        elif seat.version < version and status.oracle is not None:
            # It has followed, and the belayerd that told it to did not live to hear of it.
            reply = OracleReply(oracle=status.oracle, equal=True, ms=0.0)
        if is_main and (status.paused or reply is not None):
            await seat.link.call(Proceed(generation=seat.generation), Done, step)
        return reply

    async def _until(self, fact: Callable[[], bool], else_: str) -> None:
        end = monotonic() + self._limits.step_deadline_s
        while not fact():
            if monotonic() > end:
                raise Refused(f"{else_}: not paused", kept="everything goes on", remedy="try again")
            await asyncio.sleep(0.02)


def _row(slot: UpdatedSlot, main: Seat | None, shadow: Seat | None, watch: Stopwatch, reason: str) -> SlotWeights:
    return SlotWeights(
        slot=slot.name,
        main=main.version if main else 0,
        shadow=shadow.version if shadow else 0,
        ms=watch.ms(),
        reason=reason,
    )
