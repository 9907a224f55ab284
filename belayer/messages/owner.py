"""gpuowner's companion socket (AF_UNIX SEQPACKET, one message per packet; file descriptors ride as SCM_RIGHTS).

The connection is the lease: its end tells the owner at once that a holder died.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from belayer.messages.common import Done, ErrorReply, Message, Ping, Pong


class Role(StrEnum):
    WORKER = "worker"
    ADMIN = "admin"
    LOADER = "loader"


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of the mapping: ``offset`` in bytes, ``shape`` in elements; ``dtype`` as in safetensors.

    Without ``alias_of`` it is a tensor of the engine and owns its bytes (none: a name that the engine ignores); with it,
    it is a part or a tied name of that tensor. ``source``: the file's tensor that fills it. ``strides`` (in the mapping)
    and ``source_strides`` are in elements, () for C order without a gap; ``source_offset`` in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    alias_of: str = ""
    source: str = ""
    strides: tuple[int, ...] = ()
    source_offset: int = 0
    source_strides: tuple[int, ...] = ()
    buffer: bool = False


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message of each connection. ``who``: worker id or "belayerd"."""

    role: Role
    who: str


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    kind: str
    owner_generation: int
    pid: int


class AttachWeights(Message, frozen=True, kw_only=True, tag=True):
    model: str


class WeightsGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with one read-only FD. ``chunk_digests``: sha256 of each 64 MiB of the mapping, in order."""

    model: str
    version: int
    owner_generation: int
    nbytes: int
    layout: tuple[TensorSpec, ...]
    chunk_digests: tuple[bytes, ...]
    digest: str


class OpenArena(Message, frozen=True, kw_only=True, tag=True):
    """A private (copy-on-write) view of a slot's arena; makes the arena, FREE at epoch 0, the first time."""

    slot: str
    nbytes: int


class ArenaGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with one read-only FD."""

    slot: str
    epoch: int
    nbytes: int
    owner_generation: int


class AcquireLease(Message, frozen=True, kw_only=True, tag=True):
    """The exclusive right to write; refused unless the arena is FREE at this epoch."""

    slot: str
    epoch: int


class LeaseGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with one read-write FD."""

    slot: str
    epoch: int


class BeginFence(Message, frozen=True, kw_only=True, tag=True):
    slot: str
    epoch: int


class EndFence(Message, frozen=True, kw_only=True, tag=True):
    """belayerd has seen every process of the old tree dead; refused while the holder's own pidfd is alive."""

    slot: str
    epoch: int


class QuarantineArena(Message, frozen=True, kw_only=True, tag=True):
    slot: str
    epoch: int
    reason: str


class RestoreArena(Message, frozen=True, kw_only=True, tag=True):
    """The operator's word that a quarantined arena may be used again."""

    slot: str
    epoch: int


class ArenaInfo(Message, frozen=True, kw_only=True, tag=True):
    """Reply of the fence messages, and a row of the status."""

    slot: str
    state: str
    epoch: int
    nbytes: int
    holder: str = ""
    holder_alive: bool = False


class WeightsInfo(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    state: str
    version: int
    nbytes: int
    digest: str
    readers: tuple[str, ...]
    load_ms: float = 0.0
    load_mb_s: float = 0.0


class OwnerStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class OwnerStatusReply(Message, frozen=True, kw_only=True, tag=True):
    kind: str
    pid: int
    owner_generation: int
    backend: str
    weights: tuple[WeightsInfo, ...] = ()
    arenas: tuple[ArenaInfo, ...] = ()
    connections: int = 0


Request = (
    Ping
    | Hello
    | AttachWeights
    | OpenArena
    | AcquireLease
    | BeginFence
    | EndFence
    | QuarantineArena
    | RestoreArena
    | OwnerStatus
)
Reply = Pong | Welcome | WeightsGrant | ArenaGrant | LeaseGrant | ArenaInfo | OwnerStatusReply | Done | ErrorReply
