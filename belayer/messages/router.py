"""Control plane of belayer-router; belayerd registers and unregisters, belayerctl reads."""

from __future__ import annotations

import msgspec

from belayer.messages.common import Done, ErrorReply, Message, Ping, Pong
from belayer.messages.fleet import FleetStatus, FleetStatusReply


class RegisterWorker(Message, frozen=True, kw_only=True, tag=True):
    """The worker at ``endpoint`` serves ``slot`` in ``generation``. A generation not above the last is Fenced.
    Answered once the worker itself has said that it is ready; interrupted requests of the slot resume on it."""

    slot: str
    generation: int
    worker_id: str
    endpoint: str
    model: str
    weight_version: int


class UnregisterWorker(Message, frozen=True, kw_only=True, tag=True):
    """Nothing of this generation is delivered any more; its live requests wait for the next one.
    ``gone`` true: the slot will not come back (quarantine), its requests move to other slots."""

    slot: str
    generation: int
    gone: bool = False
    reason: str = ""


class SlotsGivenUp(Message, frozen=True, kw_only=True, tag=True):
    """belayerd's word on which slots nothing but an operator brings back: all of them each time. Told when the router
    knows another set, so also to each new one."""

    slots: tuple[str, ...]


class ResumeReport(msgspec.Struct, frozen=True, kw_only=True):
    """``first_token_ms``: from the registration to the first token of a resumed request; -1 when none yet."""

    generation: int
    resumed: int
    registered_at: float
    first_token_ms: float = -1.0


class RouterSlot(msgspec.Struct, frozen=True, kw_only=True):
    slot: str
    generation: int
    registered: bool
    worker_id: str = ""
    url: str = ""
    running: int = 0
    waiting: int = 0
    tokens_total: int = 0
    resumed_total: int = 0
    late_dropped_total: int = 0
    last_resume: ResumeReport | None = None


class RouterStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class RouterStatusReply(Message, frozen=True, kw_only=True, tag=True):
    """``given_up``: slots that do not come back by themselves, as belayerd has said, by name."""

    instance: str
    pid: int
    url: str
    slots: tuple[RouterSlot, ...]
    running: int
    waiting: int
    finished_total: int = 0
    failed_total: int = 0
    tokens_total: int = 0
    resumed_total: int = 0
    restarted_total: int = 0
    given_up: tuple[str, ...] = ()


Request = Ping | RegisterWorker | UnregisterWorker | SlotsGivenUp | RouterStatus | FleetStatus
Reply = Pong | Done | RouterStatusReply | FleetStatusReply | ErrorReply
