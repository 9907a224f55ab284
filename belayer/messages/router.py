"""Control plane of belayer-router; belayerd registers and unregisters, belayerctl reads."""

from __future__ import annotations

import msgspec

from belayer.messages.common import Done, ErrorReply, FaultProof, Message, Ping, Pong
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
    """``link_given_up``: the link to this worker was torn again and again, and only a newer generation gets another."""

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
    link_given_up: bool = False


class FrontDeath(msgspec.Struct, frozen=True, kw_only=True):
    """A life of a front that has ended. ``life``: its name, never given twice; ``number``: 1 for a front's first one.
    ``at``: Unix seconds; ``cause``: "death", or "given up" when the router killed it. ``requests`` were heard by it,
    ``ended`` of them had no id and ended in the engine. Milliseconds from its end: until its requests were dealt with,
    until the next life was forked, until that one served; -1: not yet."""

    life: str
    number: int
    pid: int
    at: float
    cause: str
    why: str
    lived_s: float
    requests: int
    ended: int
    let_go_ms: float
    forked_ms: float = -1.0
    served_ms: float = -1.0
    injected: bool = False

    def said(self) -> str:
        """For people: why, and what it cost."""
        kept = self.requests - self.ended
        cost = f"{self.requests} requests: {kept} went on by their ids, {self.ended} ended" if self.requests else ""
        return f"{self.why}; it lived {self.lived_s:.1f} s and had {cost or 'no requests'}"


class RouterFront(msgspec.Struct, frozen=True, kw_only=True):
    """One of several fronts. ``state``: serving, starting, stopped, "given up" (its death is awaited) or away (dead,
    and not yet started again). Of the life that runs: ``pid``, 0: none; ``since``, Unix seconds; ``streams``, open
    requests; ``requests_total``; ``unread``, bytes that it was sent and has not read. ``restarts``: lives that ended
    before it; ``deaths``: the last of them, oldest first."""

    front: int
    state: str
    pid: int = 0
    since: float = 0.0
    streams: int = 0
    requests_total: int = 0
    unread: int = 0
    restarts: int = 0
    deaths: tuple[FrontDeath, ...] = ()


class RouterStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class RouterStatusReply(Message, frozen=True, kw_only=True, tag=True):
    """``given_up``: slots that do not come back by themselves, as belayerd has said, by name. ``fronts``: none where
    the one front is the router's own process."""

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
    fronts: tuple[RouterFront, ...] = ()


class InjectFrontFault(Message, frozen=True, kw_only=True, tag=True):
    """``kind``: "kill" or "stop" a front of several. The reply proves that it happened."""

    front: int
    kind: str


Request = Ping | RegisterWorker | UnregisterWorker | SlotsGivenUp | RouterStatus | FleetStatus | InjectFrontFault
Reply = Pong | Done | RouterStatusReply | FleetStatusReply | FaultProof | ErrorReply
