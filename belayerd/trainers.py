"""The shell of belayerd.replacements: saves what is owed before anybody hears of it, tells it, takes acknowledgements.

The operator's ``on_replaced_command`` is a trainer too, of every model: its exit code 0 is the acknowledgement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from belayer import procs, statefile
from belayer.clock import monotonic, wall
from belayer.errors import Refused
from belayer.ids import is_name
from belayer.messages.common import Done
from belayer.messages.trainer import (
    AckReplaced,
    AwaitReplaced,
    ListTrainers,
    Member,
    RegisterTrainer,
    ReplacedEvents,
    TrainerList,
    TrainerRegistered,
    TrainerView,
    UnregisterTrainer,
)
from belayerd import commands, replacements
from belayerd.pair import Pair
from belayerd.replacements import Ledger

COMMAND = "on_replaced_command"  # no trainer may take this name
AGAIN_S = 5.0  # a command that failed is run again
_LONGEST_S = 60.0  # a wait of a client that has gone costs a task this long


class ServedSlot(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def pair(self) -> Pair: ...


class Trainers:
    """``observe`` is called at each new main and once a second; handlers answer belayerd's socket."""

    def __init__(
        self, path: Path, slots: Sequence[ServedSlot], command: tuple[str, ...], log: Any, again_s: float = AGAIN_S
    ) -> None:
        self._path, self._slots, self._command, self._log, self._again_s = path, slots, command, log, again_s
        self._changed = asyncio.Event()
        self._failures = 0  # of the command, in a row
        self._ledger = self._load()

    def _load(self) -> Ledger:
        """After a reboot no trainer of the last boot lives; a command that is configured no more is owed nothing."""
        saved = statefile.load(self._path, Ledger)
        boot = procs.boot_id()
        ledger = saved if saved is not None and saved.boot_id == boot else Ledger(boot_id=boot)
        if not self._command:
            return replacements.left(ledger, [COMMAND])
        if COMMAND in ledger.trainers:
            return ledger
        ledger = replacements.register(ledger, COMMAND, "", [member_of(slot.pair) for slot in self._slots])
        statefile.save(self._path, ledger, durable=False)  # or a life that ends before its first event loses that one
        return ledger

    def _take(self, ledger: Ledger) -> None:
        """Persist, then let it be seen."""
        if ledger is not self._ledger:
            statefile.save(self._path, ledger, durable=False)
            self._ledger = ledger
            self._changed.set()
            self._changed = asyncio.Event()

    # --- from the slots ---

    def observe(self, slot: ServedSlot, cause: Callable[[], str]) -> None:
        serving = member_of(slot.pair)
        if not replacements.is_news(self._ledger, serving, slot.model):
            return
        before = self._ledger
        self._take(replacements.observed(before, serving, slot.model, cause(), wall()))
        for name, trainer in self._ledger.trainers.items():
            if replacements.left_out(trainer) > replacements.left_out(before.trainers[name]):
                self._log.error("replacement left out", trainer=name, slot=slot.name, kept=replacements.MOST)

    def notes(self) -> tuple[str, ...]:
        """Of those that do not take what they are owed, for the status."""
        failures = {COMMAND: self._failures}
        found = (replacements.said(one, failures.get(name, 0)) for name, one in self._ledger.trainers.items())
        return tuple(filter(None, found))

    def sweep(self) -> None:
        """Forget trainers whose process has ended: they would block every update for ever."""
        named = [trainer for trainer in self._ledger.trainers.values() if trainer.pid]
        alive = [trainer.name for trainer in named if procs.lives(trainer.pid, trainer.start_time)]
        gone = replacements.dead(self._ledger, alive)
        if gone:
            self._log.info("trainers have ended", trainers=gone)
            self._take(replacements.left(self._ledger, gone))

    def fence(self, trainer: str, epoch: int) -> None:
        """Raises Fenced for a life of ``trainer`` that has ended; ``trainer`` "" is nobody who registered."""
        if trainer:
            self._ledger.named(trainer, epoch)

    def refuse_owed(self, model: str) -> None:
        self.sweep()
        replacements.refuse_owed(self._ledger, model)

    # --- requests ---

    async def handle(self, message: Any) -> msgspec.Struct:
        match message:
            case RegisterTrainer():
                return self._register(message)
            case AwaitReplaced():
                return await self._await(message)
            case AckReplaced():
                ledger = replacements.acknowledged(
                    self._ledger, message.trainer, message.epoch, message.slot, message.generation
                )
                self._take(ledger)
                return Done(detail=f"generation {message.generation} of {message.slot} acknowledged")
            case UnregisterTrainer():
                return self._unregister(message)
            case ListTrainers():
                self.sweep()  # one that died right after it had registered is none
                return TrainerList(trainers=tuple(map(_view, self._ledger.trainers.values())))
            case _:
                raise AssertionError(f"no handler for {message}")

    def _register(self, message: RegisterTrainer) -> TrainerRegistered:
        if not is_name(message.trainer) or message.trainer == COMMAND:
            raise Refused(f"{message.trainer!r} is no name of a trainer", remedy="1-48 of a-z 0-9 _ . -")
        if message.pid and not procs.lives(message.pid, message.start_time):
            raise Refused(
                f"trainer {message.trainer!r} is not process {message.pid} as belayerd sees it",
                remedy="a container with PIDs of its own: Trainer(..., watched=False)",
            )
        before = self._ledger.trainers.get(message.trainer)
        if before is not None and before.pid and not message.take_over and procs.lives(before.pid, before.start_time):
            raise Refused(
                f"trainer {message.trainer!r} is process {before.pid} already (life {before.epoch}), which runs",
                kept="its life, and what it is owed",
                remedy="another name, or close() it first, or Trainer(..., take_over=True)",
            )
        members = self._members(message.model)
        if not members:
            known = sorted({slot.model for slot in self._slots})
            raise Refused(f"no slot of model {message.model!r}", remedy=f"one of {known}")
        ledger = replacements.register(
            self._ledger, message.trainer, message.model, members, pid=message.pid, start_time=message.start_time
        )
        self._take(ledger)
        epoch = ledger.trainers[message.trainer].epoch
        self._log.info("trainer registered", trainer=message.trainer, model=message.model, epoch=epoch)
        return TrainerRegistered(epoch=epoch, members=members)

    async def _await(self, message: AwaitReplaced) -> ReplacedEvents:
        end = monotonic() + min(max(message.within_s, 0.0), _LONGEST_S)
        while True:
            trainer = self._ledger.named(message.trainer, message.epoch)
            left = end - monotonic()
            if trainer.owed or left <= 0:
                return ReplacedEvents(events=trainer.owed, members=self._members(trainer.model))
            await self._change(left)

    def _unregister(self, message: UnregisterTrainer) -> Done:
        if message.epoch:
            self._ledger.named(message.trainer, message.epoch)
        if message.trainer not in self._ledger.trainers:
            raise Refused(f"no trainer {message.trainer!r} is registered")
        self._take(replacements.left(self._ledger, [message.trainer]))
        return Done(detail=f"{message.trainer} is owed nothing any more")

    def _members(self, model: str) -> tuple[Member, ...]:
        return tuple(member_of(slot.pair) for slot in self._slots if slot.model == model)

    async def _change(self, within: float) -> None:
        try:
            async with asyncio.timeout(within):
                await self._changed.wait()
        except TimeoutError:
            return

    # --- the operator's command ---

    async def run_command(self) -> None:
        """For ever: one event after the other, each until the command ends with 0."""
        while True:
            trainer = self._ledger.trainers.get(COMMAND)
            if trainer is None or not trainer.owed:
                await self._changed.wait()
                continue
            event = trainer.owed[0]
            if await commands.run("on_replaced command", self._command, event, commands.DEADLINE_S, self._log):
                slot, generation, self._failures = event.slot, event.new_generation, 0
                if COMMAND in self._ledger.trainers:
                    self._take(replacements.acknowledged(self._ledger, COMMAND, trainer.epoch, slot, generation))
            else:
                self._failures += 1
                await asyncio.sleep(self._again_s)


def _view(trainer: replacements.Trainer) -> TrainerView:
    return TrainerView(
        trainer=trainer.name, model=trainer.model, pid=trainer.pid, epoch=trainer.epoch, owed=trainer.owed,
        left_out=replacements.left_out(trainer),
    )  # fmt: skip


def member_of(pair: Pair) -> Member:
    """The serving main, for a trainer's group."""
    ref = pair.main
    return Member(
        slot=pair.slot,
        generation=pair.generation,
        worker_id=ref.worker_id if ref else "",
        pid=ref.pid if ref else 0,
        start_time=ref.start_time if ref else 0,
        weight_version=pair.oracle.weight_version if pair.oracle else 0,
    )
