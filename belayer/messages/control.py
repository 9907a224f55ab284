"""belayerd's socket: what belayerctl and trainers ask."""

from __future__ import annotations

import msgspec

from belayer.messages.common import Done, ErrorReply, FaultProof, Message, Ping, Pong
from belayer.messages.owner import OwnerStatusReply
from belayer.messages.router import RouterFront
from belayer.messages.trainer import ReplacedEvents, TrainerList, TrainerRegistered, TrainerRequest


class StepTiming(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a handover and its milliseconds; ``detail`` names what was checked."""

    step: str
    ms: float
    detail: str = ""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One fault with its timeline (promise O2). ``at`` is wall time; ``outcome`` is "open" until it ends."""

    incident_id: str
    slot: str
    at: float
    cause: str
    detail: str
    from_generation: int
    to_generation: int
    outcome: str
    steps: tuple[StepTiming, ...] = ()
    total_ms: float = 0.0
    injected: bool = False


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a tensor-parallel worker beside its leader, which is rank 0."""

    rank: int
    pid: int
    state: str
    rss_mb: float = 0.0


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """``pss_mb``: its fair share of what it maps with others; ``private_mb``: what would be free again without it;
    ``mapped_mb``: all that it maps and that exists. MiB, from /proc/PID/smaps_rollup, 0 until they were looked at."""

    worker_id: str
    pid: int
    role: str
    state: str
    age_ms: float = 0.0
    phase: str = ""
    step: int = 0
    running: int = 0
    waiting: int = 0
    rss_mb: float = 0.0
    mapped_mb: float = 0.0
    pss_mb: float = 0.0
    private_mb: float = 0.0
    ranks: tuple[RankView, ...] = ()


class SlotView(msgspec.Struct, frozen=True, kw_only=True):
    """``protected``: a shadow is ready to take over now. ``state`` "reserve": a spare that waits to be called.
    ``gave_up``: nothing is tried any more until an operator, or the return of what is missing, asks for it."""

    slot: str
    state: str
    generation: int
    protected: bool
    model: str
    device: str
    weight_version: int
    workers: tuple[WorkerView, ...]
    handovers: int
    reason: str = ""
    since: float = 0.0
    last_incident: Incident | None = None
    rearm_ms: float = 0.0
    gave_up: bool = False


class HostStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class HostStatusReply(Message, frozen=True, kw_only=True, tag=True):
    """``zygote``: its pid, or why there is none; ``zygote_failed``: it ended on what another try will not mend.
    ``fronts``: of the router, where it has several. ``notes``: what concerns no single slot, a sentence each."""

    host: str
    pid: int
    instance: str
    at: float
    slots: tuple[SlotView, ...]
    router: str
    router_url: str
    owners: tuple[OwnerStatusReply, ...] = ()
    zygote: str = ""
    zygote_failed: bool = False
    healthy: bool = False
    fronts: tuple[RouterFront, ...] = ()
    notes: tuple[str, ...] = ()


class Handover(Message, frozen=True, kw_only=True, tag=True):
    """Planned handover of ``slot``; answered with the incident when the new main serves."""

    slot: str
    reason: str = "operator"


class IncidentReply(Message, frozen=True, kw_only=True, tag=True):
    incident: Incident


class ListIncidents(Message, frozen=True, kw_only=True, tag=True):
    limit: int = 50


class IncidentList(Message, frozen=True, kw_only=True, tag=True):
    incidents: tuple[Incident, ...]


class InjectWorkerFault(Message, frozen=True, kw_only=True, tag=True):
    """``kind``: "kill" or "stop"; ``role``: "main" or "shadow". The reply proves that it happened."""

    slot: str
    kind: str
    role: str = "main"


class BeginWeightsUpdate(Message, frozen=True, kw_only=True, tag=True):
    """Pause every main of ``model``; requests are kept. Then the writer goes to gpuowner@weights. Whoever asks has to
    end it: when the process ``pid`` (its start time in clock ticks beside it) is gone, or after ``within_s``, and the
    owner has no writer, the slots go on by themselves. ``pid`` 0: only the time counts. ``update``: a name that the
    caller made up for this one update; its end carries the same. ``trainer`` "": none that is registered, else its life
    is ``epoch``, and one that has ended is ``fenced`` before anything is paused."""

    model: str
    within_s: float = 60.0
    pid: int = 0
    start_time: int = 0
    update: str = ""
    trainer: str = ""
    epoch: int = 0


class EndWeightsUpdate(Message, frozen=True, kw_only=True, tag=True):
    """Bring every main and shadow of ``model`` to the sealed version and go on. Also after an abort. Asked again, it
    answers with what is sealed then. ``update`` "": whichever is open; another one's pause is not ended (refused).
    A life of ``trainer`` that has ended is ``fenced``; of its own update the pause is ended first."""

    model: str
    update: str = ""
    trainer: str = ""
    epoch: int = 0


class SlotWeights(msgspec.Struct, frozen=True, kw_only=True):
    """One slot after an update. ``main`` and ``shadow``: the version each maps, 0 when there is none now.
    ``reason``: why a worker could not follow; it is replaced."""

    slot: str
    main: int
    shadow: int
    ms: float
    reason: str = ""


class WeightsUpdated(Message, frozen=True, kw_only=True, tag=True):
    """Reply of both. ``version``: the sealed one."""

    model: str
    version: int
    slots: tuple[SlotWeights, ...]


class RestoreSlot(Message, frozen=True, kw_only=True, tag=True):
    """The operator's word that a quarantined slot's device is good again."""

    slot: str


Request = (
    Ping
    | HostStatus
    | Handover
    | ListIncidents
    | InjectWorkerFault
    | BeginWeightsUpdate
    | EndWeightsUpdate
    | RestoreSlot
    | TrainerRequest
)
Reply = (
    Pong
    | HostStatusReply
    | IncidentReply
    | IncidentList
    | FaultProof
    | WeightsUpdated
    | TrainerRegistered
    | ReplacedEvents
    | TrainerList
    | Done
    | ErrorReply
)
