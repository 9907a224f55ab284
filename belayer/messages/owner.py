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

    Without ``alias_of`` it is a tensor of the engine and owns its bytes (none: a name that the engine ignores); with
    it, it is a part or a tied name of that tensor. ``source``: the file's tensor that fills it. ``strides`` (in the
    mapping) and ``source_strides`` are in elements, () for C order without a gap; ``source_offset`` in elements;
    ``source_shape`` is () where it is ``shape``."""

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
    source_shape: tuple[int, ...] = ()
    buffer: bool = False


class Hello(Message, frozen=True, kw_only=True, tag=True):
    """First message of each connection. ``who``: worker id or "belayerd"."""

    role: Role
    who: str


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    kind: str
    owner_generation: int
    pid: int


# --- weights ----------------------------------------------------------------------------------------------------


class AttachWeights(Message, frozen=True, kw_only=True, tag=True):
    """Needs role worker or loader. Refused unless the last version is whole (promise R4)."""

    model: str
    rank: int = 0


class WeightsGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with one read-only FD. ``chunk_digests``: sha256 of each 64 MiB of the mapping, in order; with ``backend``
    "cuda_vmm" their sums (gpuowner.backends.sums). An empty ``layout`` is too large for a packet and comes in a second
    FD. ``memory``: names the bytes; it stays the same through an update in place, and no other memory ever has it."""

    model: str
    version: int
    owner_generation: int
    nbytes: int
    layout: tuple[TensorSpec, ...]
    chunk_digests: tuple[bytes, ...]
    digest: str
    rank: int = 0
    backend: str = "memfd"
    memory: str = ""


class RejoinWeights(Message, frozen=True, kw_only=True, tag=True):
    """A reader that still maps ``version`` and whose owner came back: it is counted as a reader again. Answered by
    WeightsInfo; Fenced for another owner generation, WeightsTorn when these bytes are whole no more."""

    model: str
    version: int
    digest: str
    owner_generation: int
    rank: int = 0


class BeginUpdate(Message, frozen=True, kw_only=True, tag=True):
    """Needs role loader; one writer per model, of all its parts (one for each tensor-parallel rank). ``mode``: "swap"
    writes the next version beside the last one, which stays whole and readable until the commit; "in_place" overwrites
    it (engines paused, attach refused), needs no second copy, and is open only to models configured
    ``update = "in_place"``; "" is what the model is configured for. ``whole``: every byte will be written; a TORN model
    takes nothing else. Answered by the UpdateGrant of rank 0."""

    model: str
    from_version: int
    owner_generation: int
    mode: str = ""
    whole: bool = False


class UpdatePart(Message, frozen=True, kw_only=True, tag=True):
    """The writer asks for the UpdateGrant of another rank of the update that it has begun. ``version``: the one of
    rank 0's grant."""

    model: str
    version: int
    owner_generation: int
    rank: int


class UpdateGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with a read-write FD of the memory to write; with ``has_base`` a second, read-only FD of ``from_version``
    follows (swap: the new memory is zeroes, so what is not written anew is copied from there); with an empty ``layout``
    its FD is the last. ``chunk_digests``: of ``from_version``, () where its bytes are not whole. ``ranks``: parts that
    the model lies in; the others are asked for by UpdatePart."""

    model: str
    version: int
    owner_generation: int
    nbytes: int
    layout: tuple[TensorSpec, ...]
    chunk_digests: tuple[bytes, ...]
    mode: str
    has_base: bool
    rank: int = 0
    ranks: int = 1
    backend: str = "memfd"


class PartDigests(msgspec.Struct, frozen=True, kw_only=True):
    """What the writer says of one part: sha256 of each 64 MiB (of GPU memory: its sums), and the digest over them."""

    chunk_digests: tuple[bytes, ...]
    digest: str


class CommitUpdate(Message, frozen=True, kw_only=True, tag=True):
    """``version``: the one of the grant. The writer has unmapped the memory (swap: a writable mapping that is left
    refuses the commit, which can then be sent again). The owner hashes the bytes itself before it answers with
    WeightsInfo; on a difference it answers WeightsBroken, and the model is as after an abort. ``chunk_digests``,
    ``digest``: of rank 0, ``others``: of ranks 1 and up. The version is sealed in all parts or in none."""

    model: str
    version: int
    owner_generation: int
    chunk_digests: tuple[bytes, ...]
    digest: str
    others: tuple[PartDigests, ...] = ()


class AbortUpdate(Message, frozen=True, kw_only=True, tag=True):
    """Answered by WeightsInfo. swap: the last version stays. in_place: TORN, unless ``touched`` is false and the
    owner's own hash agrees."""

    model: str
    version: int
    owner_generation: int
    touched: bool = True


class RepublishWeights(Message, frozen=True, kw_only=True, tag=True):
    """Role loader or admin: load a TORN model from its configured files again. ``version``: the last whole one.
    Answered by WeightsInfo when all its parts are sealed."""

    model: str
    version: int
    owner_generation: int


# --- arenas -----------------------------------------------------------------------------------------------------


class OpenArena(Message, frozen=True, kw_only=True, tag=True):
    """A private (copy-on-write) view of a slot's arena; makes the arena, FREE at epoch 0, the first time."""

    slot: str
    nbytes: int
    rank: int = 0


class ArenaGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with one read-only FD."""

    slot: str
    epoch: int
    nbytes: int
    owner_generation: int
    rank: int = 0


class AcquireLease(Message, frozen=True, kw_only=True, tag=True):
    """The exclusive right to write; refused unless the arena is FREE at this epoch."""

    slot: str
    epoch: int
    owner_generation: int
    rank: int = 0


class LeaseGrant(Message, frozen=True, kw_only=True, tag=True):
    """Comes with one read-write FD."""

    slot: str
    epoch: int
    rank: int = 0


class ReclaimLease(Message, frozen=True, kw_only=True, tag=True):
    """The holder of the lease of ``epoch`` has lost its connection because the owner was replaced: this connection is
    the lease from now on. Only the very process that holds it is believed. Answered by ArenaInfo."""

    slot: str
    epoch: int
    owner_generation: int
    rank: int = 0


class BeginFence(Message, frozen=True, kw_only=True, tag=True):
    slot: str
    epoch: int
    owner_generation: int
    rank: int = 0


class EndFence(Message, frozen=True, kw_only=True, tag=True):
    """belayerd has seen every process of the old tree dead; refused while the holder's own pidfd is alive."""

    slot: str
    epoch: int
    owner_generation: int
    rank: int = 0


class QuarantineArena(Message, frozen=True, kw_only=True, tag=True):
    slot: str
    epoch: int
    owner_generation: int
    reason: str
    rank: int = 0


class RestoreArena(Message, frozen=True, kw_only=True, tag=True):
    """The operator's word that a quarantined arena may be used again."""

    slot: str
    epoch: int
    owner_generation: int
    rank: int = 0


# --- status -----------------------------------------------------------------------------------------------------


class ArenaInfo(Message, frozen=True, kw_only=True, tag=True):
    """Reply of the fence messages, and a row of the status. ``resident``: bytes of it that exist. ``connected``: the
    holder's connection is open (false for a while after the owner came back)."""

    slot: str
    state: str
    epoch: int
    nbytes: int
    owner_generation: int = 0
    holder: str = ""
    holder_pid: int = 0
    holder_alive: bool = False
    connected: bool = False
    resident: int = 0
    reason: str = ""
    rank: int = 0


class ReaderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process that maps a version of a model; an old version is one that it has not left yet."""

    who: str
    pid: int
    version: int


class WeightsInfo(Message, frozen=True, kw_only=True, tag=True):
    """Reply of the update messages (of rank 0, the others being in the same state), and a row of the status.
    ``version``: the last sealed one. ``staging``: bytes of a version being written beside it."""

    model: str
    state: str
    version: int
    nbytes: int
    digest: str
    readers: tuple[ReaderInfo, ...] = ()
    load_ms: float = 0.0
    load_mb_s: float = 0.0
    owner_generation: int = 0
    writer: str = ""
    staging: int = 0
    resident: int = 0
    reason: str = ""
    rank: int = 0


class OwnerStatus(Message, frozen=True, kw_only=True, tag=True):
    pass


class OwnerStatusReply(Message, frozen=True, kw_only=True, tag=True):
    """``store``: who keeps second copies of the descriptors ("" when nobody does: ``store_reason``). ``adopted``:
    what this life took over from the last one. ``lost``: one sentence for each thing that died with the last life."""

    kind: str
    pid: int
    owner_generation: int
    backend: str
    weights: tuple[WeightsInfo, ...] = ()
    arenas: tuple[ArenaInfo, ...] = ()
    connections: int = 0
    store: str = ""
    store_reason: str = ""
    adopted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


Request = (
    Ping
    | Hello
    | AttachWeights
    | RejoinWeights
    | BeginUpdate
    | UpdatePart
    | CommitUpdate
    | AbortUpdate
    | RepublishWeights
    | OpenArena
    | AcquireLease
    | ReclaimLease
    | BeginFence
    | EndFence
    | QuarantineArena
    | RestoreArena
    | OwnerStatus
)
Reply = (
    Pong
    | Welcome
    | WeightsGrant
    | WeightsInfo
    | UpdateGrant
    | ArenaGrant
    | LeaseGrant
    | ArenaInfo
    | OwnerStatusReply
    | Done
    | ErrorReply
)
