"""What routers of several hosts say to each other, and what belayerctl asks about it (docs/fleet.md).

A remote slot is spoken to as a worker is (docs/protocol.md): hello, add, abort, out. What a worker does not have is
here: the life of a host, its slots, the position of each token, and a request that is handed back.
"""

from __future__ import annotations

import msgspec

from belayer.messages.common import Message
from belayer.messages.worker import Stamp


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a host's router. ``number`` grows with each; ``nonce`` tells two that claim the same number."""

    number: int
    nonce: str


class RemoteSlot(msgspec.Struct, frozen=True, kw_only=True):
    """A slot as its own host sees it. ``state``: as in the router's table of slots. ``weights_digest``: of the bytes
    that it serves as ``weight_version``. ``load``: its requests, waiting
    ones too; ``capacity``: how many its engine runs at once."""

    slot: str
    generation: int
    state: str
    model: str
    fingerprint: str
    weight_version: str = ""
    weights_digest: str = ""
    max_model_len: int = 0
    load: int = 0
    capacity: int = 0


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asked twice a second over the link to each peer: who asks, and the number of the question."""

    life: Life
    number: int


class Slots(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the ``Beat`` with that number: all slots of this host that peers may use."""

    host: str
    life: Life
    number: int
    slots: tuple[RemoteSlot, ...]


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """With each hello: which slot the link is for, who asks, and how its outputs are to be stamped. ``front``: which
    front of that host; a newer ``epoch`` of the same front and slot takes the place of an older one. ``fingerprint``:
    of the model that the requests of this link are for, as in ``RemoteSlot``."""

    slot: str
    life: Life
    front: int
    stamp: str
    worker_id: str
    epoch: int
    fingerprint: str = ""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """With each add: what the request wants if its worker dies ("": as the slot says), and the weights that made the
    last of its tokens, by version and digest: older ones, or others of that version, must not go on with them."""

    on_death: str = ""
    prefix_version: str = ""
    prefix_digest: str = ""


class FleetStamp(Stamp, frozen=True, kw_only=True):
    """On each output of a link between hosts. ``generation`` is the epoch of the link. ``starts``: the position of
    the first token of each row. ``made_by``, ``made_in``: the slot and generation that made the tokens."""

    starts: tuple[int, ...]
    made_by: str
    made_in: int


class HandedBack(msgspec.Struct, frozen=True, kw_only=True):
    """Instead of outputs: the other host ends its part of a request, and says why."""

    request_id: str
    code: str
    message: str
    kept: str = ""
    remedy: str = ""


class FleetStatus(Message, frozen=True, kw_only=True, tag=True):
    """To the router: what it knows of its peers."""


class PeerView(msgspec.Struct, frozen=True, kw_only=True):
    """``state``: silent, up, slow or fenced, with ``why``. ``heard_s``: since its last answer (-1: never);
    ``answer_ms``: how long that took. ``forwarded``: requests of this host that run there now. ``unused``: by slot, why
    a new request does not go there now."""

    host: str
    address: str
    state: str
    why: str = ""
    life: int = 0
    heard_s: float = -1.0
    answer_ms: float = -1.0
    forwarded: int = 0
    slots: tuple[RemoteSlot, ...] = ()
    unused: dict[str, str] = {}


class FleetStatusReply(Message, frozen=True, kw_only=True, tag=True):
    """``listen`` "": this host has no fleet. ``serving``: requests of other hosts that run here now, by host.
    ``dropped``: what came to the port and was not let in, by reason."""

    host: str
    listen: str = ""
    life: int = 0
    peers: tuple[PeerView, ...] = ()
    own: tuple[RemoteSlot, ...] = ()
    serving: dict[str, int] = {}
    dropped: dict[str, int] = {}
