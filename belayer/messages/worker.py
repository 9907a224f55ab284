"""Zygote and worker control plane (belayerd is the only client), and the stamp of the data plane."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from belayer.messages.common import Done, ErrorReply, Message, Ping, Pong

# Phases of a heartbeat: paused by belayerd for an update of the weights; by whoever called the engine's own pause.
PAUSED, HELD = "paused", "paused by a call"
FOLLOWS = "weights v"  # and the version that it verifies, and how far it is: what is waited for while it moves


class WorkerState(StrEnum):
    STARTING = "starting"
    STANDBY = "standby"
    MAIN = "main"
    FAILED = "failed"


class Oracle(msgspec.Struct, frozen=True, kw_only=True):
    """One greedy token of a fixed prompt and its logprob, for one weight version (promise R5)."""

    weight_version: int
    token: int
    logprob: float


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """On every output message of a worker: who made it. ``seq`` counts per worker and front from 0."""

    slot: str
    generation: int
    worker_id: str
    seq: int


class SpawnWorker(Message, frozen=True, kw_only=True, tag=True):
    """To the zygote: fork a standby. ``cgroup`` is the folder the child joins before anything else ("" for none)."""

    worker_id: str
    slot: str
    cgroup: str = ""


class Spawned(Message, frozen=True, kw_only=True, tag=True):
    """Comes with the child's pidfd. ``start_time``: field 22 of /proc/<pid>/stat, in clock ticks."""

    worker_id: str
    pid: int
    start_time: int


class WorkerStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class WorkerStatusReply(Message, frozen=True, kw_only=True, tag=True):
    """``weights_digest``: of rank 0's part; ``rank_digests``: of the parts of ranks 1 and up."""

    worker_id: str
    slot: str
    pid: int
    state: WorkerState
    generation: int = 0
    epoch: int = -1
    weight_version: int = 0
    weights_digest: str = ""
    rank_digests: tuple[str, ...] = ()
    oracle: Oracle | None = None
    failure: str = ""
    running: int = 0
    waiting: int = 0
    paused: bool = False
    start_ms: dict[str, float] = {}


class TakeArena(Message, frozen=True, kw_only=True, tag=True):
    """Acquire the lease at ``epoch`` and turn the private view into the shared arena at the same address.
    ``owner_generation``: of the kv owner that named the epoch; 0 is the one that the worker is connected to."""

    epoch: int
    owner_generation: int = 0


class FlushCache(Message, frozen=True, kw_only=True, tag=True):
    """Empty the prefix cache; the worker answers with an error when blocks are still held."""


class ProbeDevice(Message, frozen=True, kw_only=True, tag=True):
    """Run a small kernel in the warm context and check what it computed. ``full``: verify every digest of the weights
    too."""

    full: bool = False


class Unpark(Message, frozen=True, kw_only=True, tag=True):
    """Remap graph memory. On the CPU there is none: Done says so."""


class CheckOracle(Message, frozen=True, kw_only=True, tag=True):
    """Run the oracle again, now on the real arena. ``expected`` None: only report."""

    expected: Oracle | None = None


class OracleReply(Message, frozen=True, kw_only=True, tag=True):
    oracle: Oracle
    equal: bool
    ms: float


class BecomeMain(Message, frozen=True, kw_only=True, tag=True):
    """From here on requests are accepted, and stamped with this generation."""

    generation: int


class Pause(Message, frozen=True, kw_only=True, tag=True):
    """Take no further step; requests are kept and new ones are taken in. Answered when the step under way is over.
    ``generation``: of the main that is meant."""

    generation: int


class Proceed(Message, frozen=True, kw_only=True, tag=True):
    generation: int


class FollowWeights(Message, frozen=True, kw_only=True, tag=True):
    """Move to the owner's sealed ``version``: verified, at the same addresses, with an empty prefix cache; requests on
    board compute their context again. A main has to be paused. Answered by OracleReply: the oracle of that version."""

    version: int


class Retire(Message, frozen=True, kw_only=True, tag=True):
    """Leave in order (a planned handover of a healthy main): stop stepping, answer, exit 0."""

    generation: int


class HowEnded(Message, frozen=True, kw_only=True, tag=True):
    """To the zygote, which alone can wait for its children: how did this worker end?"""

    worker_id: str


class WorkerEnd(Message, frozen=True, kw_only=True, tag=True):
    """``said`` "": it has not ended, or is none of this zygote's last children."""

    worker_id: str
    said: str


ZygoteRequest = Ping | SpawnWorker | HowEnded
ZygoteReply = Pong | Spawned | WorkerEnd | ErrorReply
Request = (
    Ping
    | WorkerStatus
    | TakeArena
    | FlushCache
    | ProbeDevice
    | Unpark
    | CheckOracle
    | BecomeMain
    | Pause
    | Proceed
    | FollowWeights
    | Retire
)
Reply = Pong | WorkerStatusReply | Done | OracleReply | ErrorReply
