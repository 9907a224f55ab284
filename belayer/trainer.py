"""A trainer that broadcasts weights over a collective group whose members can die and be replaced.

    trainer = Trainer("policy", name="grpo")
    group = make_group(trainer.members)                  # yours: NCCL, gloo, with a fresh store
    while training:
        for event in trainer.replaced():                 # each main that took the place of another, once
            group = make_group(trainer.members)
            trainer.ack(event)                           # from here on it is not told again
        try:
            with trainer.update(within_s=60.0):          # engines paused; ReplacementOwed before an ack
                work = broadcast(weights, group, async_op=True)
                trainer.wait(work, within_s=60.0)        # MemberReplaced or GroupBroken instead of a hang
        except MemberReplaced:
            abort(group)                                 # yours; the update was aborted, engines go on

Not thread-safe. It holds no thread and no torch: ``work`` is anything with torch.distributed.Work's two methods.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from belayer import procs
from belayer.clock import monotonic
from belayer.errors import BelayerError, DaemonUnreachable, GroupBroken, MemberReplaced, Refused
from belayer.lives import call_any_life, call_one_life
from belayer.messages.common import Done
from belayer.messages.control import BeginWeightsUpdate, EndWeightsUpdate, WeightsUpdated
from belayer.messages.trainer import (
    AckReplaced,
    AwaitReplaced,
    RegisterTrainer,
    Replaced,
    ReplacedEvents,
    TrainerRegistered,
    UnregisterTrainer,
)
from belayer.paths import Paths
from belayer.rpc import SyncClient

_CALL_S = 10.0
_ASK_S = 0.1  # while a collective runs, belayerd is asked this often
_GLANCE_S = 0.002


class Work(Protocol):
    """torch.distributed.Work of a collective with ``async_op=True``."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Trainer:
    """``members``: who serves, as of the last word of belayerd. Survives belayerd's death: what is owed is on disk.

    Registering begins a new life of ``name``: earlier ones are fenced, what they were owed is settled. Raises Refused
    for a model without slots, and for a name whose last process runs (this one included) unless ``take_over`` says that
    it is meant; DaemonUnreachable. ``watched``: forgotten when this process has ended; False where
    belayerd cannot see it (a container with PIDs of its own), and then ``close`` is the only end.
    """

    def __init__(
        self, model: str, *, name: str, paths: Paths | None = None, watched: bool = True, take_over: bool = False
    ) -> None:
        self.model, self.name = model, name
        self._sock = (paths or Paths()).belayerd_sock
        self._client = SyncClient(self._sock)
        me = os.getpid() if watched else 0
        born = procs.start_time(me) if me else 0
        message = RegisterTrainer(trainer=name, model=model, pid=me, start_time=born, take_over=take_over)
        reply = self._client.call(message, TrainerRegistered, _CALL_S)
        self.epoch, self.members = reply.epoch, reply.members

    def replaced(self, within_s: float = 0.0) -> tuple[Replaced, ...]:
        """All that is owed, oldest first; waits up to ``within_s`` for the first. Told again until acknowledged."""
        message = AwaitReplaced(trainer=self.name, epoch=self.epoch, within_s=within_s)
        reply = self._client.call(message, ReplacedEvents, within_s + _CALL_S)
        self.members = reply.members
        return reply.events

    def ack(self, event: Replaced) -> None:
        """The group holds the main of ``event``; settles earlier events of the slot too. Raises Fenced for one that a
        later acknowledgement covers, or when this name was registered again; Refused for what is no event."""
        if not isinstance(event, Replaced):
            raise Refused(f"ack takes an event that replaced() gave, not {event!r:.100}", kept="what is owed")
        message = AckReplaced(trainer=self.name, epoch=self.epoch, slot=event.slot, generation=event.new_generation)
        self._client.call(message, Done, _CALL_S)

    @contextmanager
    def update(self, within_s: float = 60.0) -> Iterator[WeightsUpdated]:
        """Every engine of the model paused inside the block, at the sealed version and going after it. The writer
        (gpuowner.update) writes and commits meanwhile. Raises before anything is paused ReplacementOwed, and Fenced
        when this name was registered again; Fenced at the end when that happened inside the block (what was sealed is
        served). When the block raises while the writer still lives, engines go on once it has ended, and the block's
        error stands. A belayerd that is killed as the block ends is asked again in its next life."""
        me, update = os.getpid(), secrets.token_hex(8)
        begin = BeginWeightsUpdate(
            model=self.model,
            within_s=within_s,
            pid=me,
            start_time=procs.start_time(me),
            update=update,
            trainer=self.name,
            epoch=self.epoch,
        )
        end = EndWeightsUpdate(model=self.model, update=update, trainer=self.name, epoch=self.epoch)
        limit = within_s + _CALL_S
        begun = call_one_life(self._sock, begin, WeightsUpdated, limit, limit)
        whole = False
        try:
            yield begun
            whole = True
        finally:
            if not whole:  # belayerd ends it when the writer has ended; the block's own error is the one to show
                with suppress(BelayerError):
                    call_any_life(self._sock, end, WeightsUpdated, limit)
        call_any_life(self._sock, end, WeightsUpdated, limit)

    def wait(self, work: Work, within_s: float, *, explain_s: float = 30.0) -> None:
        """Until the collective has ended. Raises MemberReplaced as soon as a main was replaced, though the collective
        hangs; GroupBroken when it failed without that, or has not ended after ``within_s`` seconds. ``explain_s``: how
        long a failed one waits, inside that bound, for the handover that explains it: a closed connection is seen
        first."""
        end, pause, ask = monotonic() + within_s, threading.Event(), 0.0
        while not work.is_completed():
            now = monotonic()
            if now >= end:
                raise GroupBroken(f"the collective has not ended in {within_s:g} s", remedy="make the group anew")
            if now >= ask:
                self._raise_replaced(0.0)
                ask = monotonic() + _ASK_S
            pause.wait(_GLANCE_S)
        try:
            work.wait()
        except RuntimeError as why:  # torch.distributed raises nothing narrower
            self._raise_replaced(min(explain_s, max(end - monotonic(), 0.0)))
            raise GroupBroken(f"the collective failed: {why}", remedy="make the group anew") from why

    def _raise_replaced(self, within_s: float) -> None:
        try:
            events = self.replaced(within_s)
        except DaemonUnreachable:
            return  # the bound of the collective holds without belayerd
        if events:
            said = ", ".join(f"generation {event.new_generation} of {event.slot} ({event.cause})" for event in events)
            raise MemberReplaced(
                f"the group of {self.name} holds a dead member: {said} serves now",
                kept="the last sealed weights, every request",
                remedy="abort the group, make it anew, ack, repeat the update",
            )

    def close(self) -> None:
        """Leave: nothing is owed any more."""
        self._client.call(UnregisterTrainer(trainer=self.name, epoch=self.epoch), Done, _CALL_S)
        self._client.close()
