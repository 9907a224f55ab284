"""Trainers at belayerd's socket: who holds a collective group with engines, and what each is owed.

A trainer that broadcasts weights over a group (NCCL, gloo) is told once of every main that took the place of another,
and says when its group is made anew. ``epoch`` counts the lives of one trainer's name; it fences.
"""

from __future__ import annotations

import msgspec

from belayer.messages.common import Message


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Who serves a slot. ``worker_id`` "" and ``pid`` 0: nobody now, the next one will be an event."""

    slot: str
    generation: int
    worker_id: str = ""
    pid: int = 0
    start_time: int = 0
    weight_version: int = 0


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """``worker_id`` (``pid``, ``start_time``) serves ``slot`` as ``new_generation``; the main of ``old_generation`` is
    dead. ``weight_version``: what it serves. ``cause``: of the handover; ``at``: Unix seconds."""

    slot: str
    model: str
    old_generation: int
    new_generation: int
    worker_id: str
    pid: int
    start_time: int
    weight_version: int
    cause: str
    at: float


class RegisterTrainer(Message, frozen=True, kw_only=True, tag=True):
    """A life of ``trainer`` begins: its group will be made with the members of the reply. Earlier lives are fenced and
    what they were owed is settled, since their groups are gone. When the process ``pid`` (``start_time`` in clock ticks
    beside it) has ended it is owed nothing; ``pid`` 0: until it is unregistered. Refused while the process of the last
    life runs, unless it is to ``take_over`` from it."""

    trainer: str
    model: str
    pid: int = 0
    start_time: int = 0
    take_over: bool = False


class TrainerRegistered(Message, frozen=True, kw_only=True, tag=True):
    epoch: int
    members: tuple[Member, ...]


class AwaitReplaced(Message, frozen=True, kw_only=True, tag=True):
    """Answered at once when something is owed, else after ``within_s``."""

    trainer: str
    epoch: int
    within_s: float = 0.0


class ReplacedEvents(Message, frozen=True, kw_only=True, tag=True):
    """All that is owed, oldest first; told again until it is acknowledged (of each slot the newest 32: an
    acknowledgement settles older ones). ``members``: who serves now."""

    events: tuple[Replaced, ...]
    members: tuple[Member, ...]


class AckReplaced(Message, frozen=True, kw_only=True, tag=True):
    """The group is made with the main of ``generation``. Settles the events of ``slot`` up to it. The last one
    again changes nothing; an older one is ``fenced``."""

    trainer: str
    epoch: int
    slot: str
    generation: int


class UnregisterTrainer(Message, frozen=True, kw_only=True, tag=True):
    """``epoch`` 0: the operator's word that this trainer is no more."""

    trainer: str
    epoch: int = 0


class ListTrainers(Message, frozen=True, kw_only=True, tag=True):
    pass


class TrainerView(msgspec.Struct, frozen=True, kw_only=True):
    """``left_out``: how many older ones are told no more, because it took none for so long."""

    trainer: str
    model: str
    pid: int
    epoch: int
    owed: tuple[Replaced, ...]
    left_out: int = 0


class TrainerList(Message, frozen=True, kw_only=True, tag=True):
    trainers: tuple[TrainerView, ...]


TrainerRequest = RegisterTrainer | AwaitReplaced | AckReplaced | UnregisterTrainer | ListTrainers
