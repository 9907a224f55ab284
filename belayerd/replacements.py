"""What trainers are owed: one ``Replaced`` per trainer, slot and new generation, told until acknowledged. Pure.

Replacements are found by level: each trainer's last known generation of a slot against the slot's own. A belayerd
that is killed between a handover's end and this ledger's save finds the difference again in its next life.

One that never acknowledges is owed the newest ``MOST`` of each slot; older ones are left out, counted, and settled by
an acknowledgement of a newer one, as they would have been anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from belayer.errors import Fenced, Refused, ReplacementOwed
from belayer.messages.trainer import Member, Replaced

MOST = 32  # of one slot, for one trainer


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Replacements of a slot that are told no more. ``newest``: generation."""

    count: int
    newest: int


class Trainer(msgspec.Struct, frozen=True, kw_only=True):
    """``known``: by slot, the newest generation that it was told of or registered with. ``acked``: by slot, the newest
    that it acknowledged. ``owed``: oldest first. ``left_out``: by slot, until a newer one is acknowledged. ``model``
    "": of every model."""

    name: str
    model: str
    epoch: int
    pid: int = 0
    start_time: int = 0
    known: dict[str, int] = {}
    acked: dict[str, int] = {}
    owed: tuple[Replaced, ...] = ()
    left_out: dict[str, LeftOut] = {}


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """``epochs``: the last life of every name, also of those that have left: an epoch is never given twice."""

    boot_id: str
    trainers: dict[str, Trainer] = {}
    epochs: dict[str, int] = {}

    def named(self, name: str, epoch: int) -> Trainer:
        """The living trainer. Raises Fenced for an earlier life of it, Refused for a name that nobody has."""
        trainer = self.trainers.get(name)
        if trainer is not None and trainer.epoch == epoch:
            return trainer
        if epoch <= self.epochs.get(name, 0):
            raise Fenced(f"life {epoch} of trainer {name!r} has ended", remedy="register again")
        raise Refused(f"no trainer {name!r} is registered", remedy="register first")


def _with(ledger: Ledger, trainer: Trainer) -> Ledger:
    return msgspec.structs.replace(ledger, trainers={**ledger.trainers, trainer.name: trainer})


def register(
    ledger: Ledger, name: str, model: str, members: Iterable[Member], *, pid: int = 0, start_time: int = 0
) -> Ledger:
    epoch = ledger.epochs.get(name, 0) + 1
    known = {member.slot: member.generation for member in members}
    trainer = Trainer(name=name, model=model, epoch=epoch, pid=pid, start_time=start_time, known=known)
    return _with(msgspec.structs.replace(ledger, epochs={**ledger.epochs, name: epoch}), trainer)


def _is_new(trainer: Trainer, serving: Member, model: str) -> bool:
    mine = trainer.model in ("", model) and bool(serving.worker_id)
    return mine and serving.generation > trainer.known.get(serving.slot, 0)


def is_news(ledger: Ledger, serving: Member, model: str) -> bool:
    return any(_is_new(trainer, serving, model) for trainer in ledger.trainers.values())


def observed(ledger: Ledger, serving: Member, model: str, cause: str, at: float) -> Ledger:
    """``serving`` is the main of its slot now. The same ledger when every trainer knows it."""
    for trainer in ledger.trainers.values():
        if not _is_new(trainer, serving, model):
            continue
        event = Replaced(
            slot=serving.slot,
            model=model,
            old_generation=trainer.known.get(serving.slot, 0),
            new_generation=serving.generation,
            worker_id=serving.worker_id,
            pid=serving.pid,
            start_time=serving.start_time,
            weight_version=serving.weight_version,
            cause=cause,
            at=at,
        )
        known = {**trainer.known, serving.slot: serving.generation}
        grown = msgspec.structs.replace(trainer, known=known, owed=(*trainer.owed, event))
        ledger = _with(ledger, _bounded(grown, serving.slot))
    return ledger


def _bounded(trainer: Trainer, slot: str) -> Trainer:
    over = [event.new_generation for event in trainer.owed if event.slot == slot][:-MOST]
    if not over:
        return trainer
    owed = tuple(event for event in trainer.owed if event.slot != slot or event.new_generation > over[-1])
    before = trainer.left_out.get(slot)
    now = LeftOut(count=len(over) + (before.count if before else 0), newest=over[-1])
    return msgspec.structs.replace(trainer, owed=owed, left_out={**trainer.left_out, slot: now})


def acknowledged(ledger: Ledger, name: str, epoch: int, slot: str, generation: int) -> Ledger:
    """Raises Fenced for a generation before the last acknowledged one, Refused for one that was never told."""
    trainer = ledger.named(name, epoch)
    last = trainer.acked.get(slot, 0)
    if generation < last:
        raise Fenced(f"{name} acknowledged generation {last} of {slot} already: {generation} is stale")
    if generation == last:  # the answer to the first one was lost
        return ledger
    acked = {**trainer.acked, slot: generation}
    left_out = trainer.left_out.get(slot)
    if left_out is not None and generation <= left_out.newest:  # it was told in time, and taken later
        return _with(ledger, msgspec.structs.replace(trainer, acked=acked))
    owed = [event.new_generation for event in trainer.owed if event.slot == slot]
    if generation not in owed:
        raise Refused(
            f"generation {generation} of {slot} was never told to {name}", remedy=f"owed: {owed or 'nothing'}"
        )
    left = tuple(event for event in trainer.owed if event.slot != slot or event.new_generation > generation)
    others = {name: one for name, one in trainer.left_out.items() if name != slot}
    return _with(ledger, msgspec.structs.replace(trainer, owed=left, acked=acked, left_out=others))


def left(ledger: Ledger, names: Iterable[str]) -> Ledger:
    gone = set(names)
    kept = {name: trainer for name, trainer in ledger.trainers.items() if name not in gone}
    return msgspec.structs.replace(ledger, trainers=kept)


def refuse_owed(ledger: Ledger, model: str) -> None:
    """Raises ReplacementOwed while a trainer's group may still hold a dead member."""
    standing = [
        f"{trainer.name} (generation {event.new_generation} of {event.slot})"
        for trainer in ledger.trainers.values()
        for event in trainer.owed
        if event.model == model
    ]
    if standing:
        raise ReplacementOwed(
            f"no update of {model}: a main was replaced and not acknowledged by {', '.join(standing)}",
            kept="engines serve, nothing is paused",
            remedy="make the group anew and acknowledge, or belayerctl trainers --forget NAME",
        )


def left_out(trainer: Trainer) -> int:
    """How many it is told no more."""
    return sum(one.count for one in trainer.left_out.values())


def said(trainer: Trainer, failures: int) -> str:
    """What an operator has to know of it, "" when nothing. ``failures``: runs in a row in which it took nothing."""
    older = left_out(trainer)
    if not trainer.owed or not (failures or older):
        return ""
    failed = f" failed {failures} time(s) in a row and" if failures else ""
    more = f", {older} older one(s) are told no more" if older else ""
    models = ", ".join(sorted({event.model for event in trainer.owed}))
    return f"{trainer.name}{failed} has not taken {len(trainer.owed)} replacement(s){more}: updates of {models} wait"


def dead(ledger: Ledger, alive: Sequence[str]) -> list[str]:
    """Trainers that named a process and are not among ``alive``."""
    return [trainer.name for trainer in ledger.trainers.values() if trainer.pid and trainer.name not in alive]
