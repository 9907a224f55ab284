"""What the router's core is told (events) and what it answers (effects). Plain data: no I/O, no clock.

Effects are *ordered*: the shell performs them one by one, front to back. Journal effects stand before the delivery
that they cover, so that what a client has seen finished can be read again after a crash.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from belayer.errors import ErrorCode


class Cause(StrEnum):
    """Why a worker leaves. Only ``DIED`` counts against the requests that it was running."""

    DIED = "died"
    PLANNED = "planned"
    SUPERSEDED = "superseded"
    TORN_LINK = "torn_link"
    HOST_LOST = "host_lost"


class OnDeath(StrEnum):
    """What a request wants when its worker dies: go on elsewhere, end with what there is (finish reason "abort"), or
    end with a typed error."""

    RESUME = "resume"
    ABORT = "abort"
    ERROR = "error"


class SameId(StrEnum):
    """What becomes of a request whose name is that of a running one: hear the running one too, or be refused."""

    ATTACH = "attach"
    REFUSE = "refuse"


Rows = tuple[tuple[int, bytes], ...]  # (position of its first token, encoded output): what tokens alone do not tell
Stop = int | str | None  # vLLM's stop reason: the stop token or the stop string


class Event(msgspec.Struct, frozen=True, gc=False):
    pass


class Add(Event, frozen=True, gc=False):
    """A request from the front end. ``frames`` is the encoded EngineCoreRequest, kept until the request ends.

    ``session`` is the affinity key of the client ("" for none). ``continuable`` is False for the few kinds of
    request that cannot be given again together with their output (docs/faults.md).

    ``name``: the client's own id of this choice, by which it may ask again ("": it gave none). ``digest`` is over all
    that decides the answer. ``position``: the client repeats a request and has this many tokens of it; None: a new
    one. ``eager``: what is delivered must be on disk before (docs/adr/0011). ``pin``: the slot whose URL was used.
    ``origin``: the host that forwarded it, with the tokens that it has so far as ``prefix``: it stays on this host.
    ``prefix_version``, ``prefix_digest``: the weights that made the last of them, and their bytes. ``place``: the room
    that was kept for it when it was let in.
    """

    request_id: str
    frames: tuple[bytes, ...]
    external_id: str = ""
    session: str = ""
    continuable: bool = True
    name: str = ""
    digest: bytes = b""
    position: int | None = None
    eager: bool = False
    on_death: OnDeath | None = None
    pin: str = ""
    origin: str = ""
    prefix: tuple[int, ...] = ()
    prefix_version: str = ""
    prefix_digest: str = ""
    place: str = ""


class Abort(Event, frozen=True, gc=False):
    """The front end lost interest: the client left, or (``left`` False) a stop string ended the text."""

    request_ids: tuple[str, ...]
    left: bool = True


class FrontLost(Event, frozen=True, gc=False):
    """The process that heard these readers has died: nobody can be told anything more. Requests with a name go on, so
    that their clients find them again by another front; the others nobody can ask for."""

    readers: tuple[str, ...]


class Item(msgspec.Struct, frozen=True, gc=False):
    """One request's share of one engine step; ``finish`` is vLLM's word for the reason, "" while it goes on.
    ``row``: the encoded output, where it holds more than tokens (logprobs) and the request may be asked for again.
    ``start``: the position of its first token, from those that say it (other hosts)."""

    request_id: str
    tokens: tuple[int, ...]
    finish: str = ""
    stop: Stop = None
    row: bytes = b""
    start: int | None = None


class Outputs(Event, frozen=True, gc=False):
    """One message of a worker. ``seq`` counts its messages to this front without a gap. ``made``: the slot and
    generation that made the tokens, where it is not the worker itself (another host's router stands for it)."""

    slot: str
    generation: int
    worker_id: str
    seq: int
    items: tuple[Item, ...]
    weight_version: str = ""
    made: tuple[str, int] | None = None


class HandedBack(Event, frozen=True, gc=False):
    """Another host ends its part of a forwarded request, in place of outputs; ``code`` is one of ErrorCode."""

    slot: str
    generation: int
    worker_id: str
    seq: int
    request_id: str
    code: ErrorCode
    message: str
    remedy: str = ""


class Offer(Event, frozen=True, gc=False):
    """What another host says of its slot: may it be given more, and how full it is. ``load``: all its requests."""

    slot: str
    open: bool
    load: int = 0
    capacity: int = 0
    weight_version: str = ""
    weights_digest: str = ""


class Register(Event, frozen=True, gc=False):
    """belayerd names the new main of a slot. Raises Fenced when the generation is old. ``remote``: it is the slot of
    another host, whose router stands for its workers; ``generation`` is the epoch of the link to it."""

    slot: str
    generation: int
    worker_id: str
    endpoint: str
    weight_version: str = ""
    model: str = ""
    remote: bool = False
    weights_digest: str = ""


class Ready(Event, frozen=True, gc=False):
    """The worker answered the hello: it may be given requests, and holds none of ours. Its next message has number
    ``seq`` (None: it did not say); ``weights_digest``: of the bytes that it serves as ``weight_version``. Raises Fenced
    when it was replaced meanwhile."""

    slot: str
    generation: int
    worker_id: str
    seq: int | None = None
    weight_version: str = ""
    weights_digest: str = ""


class Beat(Event, frozen=True, gc=False):
    """The worker answered on the link; its next message has number ``seq``. Another number than expected: something
    was lost, though nothing more has come to show it."""

    slot: str
    worker_id: str
    seq: int
    weight_version: str = ""
    weights_digest: str = ""


class Mute(Event, frozen=True, gc=False):
    """The worker has not answered on the link for too long."""

    slot: str
    worker_id: str


class Calls(Event, frozen=True, gc=False):
    """Admin calls run in the worker's loop, at most until then (0.0: the last one has been answered): silence about its
    requests is legal meanwhile."""

    slot: str
    worker_id: str
    until: float


class Paused(Event, frozen=True, gc=False):
    """A trainer paused or resumed the engines: silence is legal meanwhile."""

    paused: bool


class Recover(Event, frozen=True, gc=False):
    """First of all events: what the journal of an earlier life of this router holds."""

    stories: tuple[Any, ...]


class ConnectFailed(Event, frozen=True, gc=False):
    """The worker did not answer the hello within its bound (``silent``), or not as a worker does."""

    slot: str
    generation: int
    worker_id: str
    silent: bool = False


class Unregister(Event, frozen=True, gc=False):
    """belayerd declares the main of this generation gone; nothing that it still says counts. Stale: Fenced.

    ``removed``: the slot will not come back soon (quarantine): its requests move to other slots.
    """

    slot: str
    generation: int
    cause: Cause = Cause.DIED
    removed: bool = False


class GivenUp(Event, frozen=True, gc=False):
    """All slots of this host of which belayerd says that none but an operator brings them back. Each time the whole
    set: what is not in it any more may come back."""

    slots: frozenset[str]


class Torn(Event, frozen=True, gc=False):
    """The worker sent something that cannot be read: its link is not to be trusted any more."""

    slot: str
    worker_id: str


class StoodStill(Event, frozen=True, gc=False):
    """For so many seconds until now this router heard nobody, itself stopped or its host. Before anything that waits
    unread is taken in."""

    seconds: float


class Tick(Event, frozen=True, gc=False):
    """Time has passed; sent when ``Core.next_deadline()`` is due."""


class Effect(msgspec.Struct, frozen=True, gc=False):
    pass


class Connect(Effect, frozen=True, gc=False):
    slot: str
    generation: int
    worker_id: str
    endpoint: str
    remote: bool = False


class Disconnect(Effect, frozen=True, gc=False):
    """Close the worker's socket; whatever is still in its pipe is never read."""

    slot: str
    worker_id: str


class SendAdd(Effect, frozen=True, gc=False):
    """Give the request to a worker, with the tokens that it has produced so far ("" prefix: a first try).
    ``prefix_version``, ``prefix_digest``: for another host, the weights that made the last of them."""

    worker_id: str
    request_id: str
    frames: tuple[bytes, ...]
    prefix: tuple[int, ...]
    on_death: str = ""
    prefix_version: str = ""
    prefix_digest: str = ""


class SendAbort(Effect, frozen=True, gc=False):
    worker_id: str
    request_ids: tuple[str, ...]


class Deliver(Effect, frozen=True, gc=False):
    """Hand item number ``position`` of this event to the front end.

    ``resumed``: it had tokens before this worker got it, so statistics of a second prefill must not be counted.
    ``readers``: the front end's ids of those who hear it (none: its client is gone, it runs on for its return).
    """

    request_id: str
    position: int
    resumed: bool
    readers: tuple[str, ...]


class Replay(Effect, frozen=True, gc=False):
    """Tell ``reader`` what is known already: tokens, their rows and makers, and the end if it had one."""

    reader: str
    tokens: tuple[int, ...]
    rows: Rows
    spans: tuple[Any, ...]
    finish: str = ""
    stop: Stop = None


class Cut(Effect, frozen=True, gc=False):
    """End the request with what it has, as vLLM ends an aborted one."""

    readers: tuple[str, ...]


class Fail(Effect, frozen=True, gc=False):
    """End the request with a typed error; ``code`` is a value of belayer.errors.ErrorCode."""

    request_id: str
    code: str
    message: str
    kept: str = ""
    remedy: str = ""
    readers: tuple[str, ...] = ()


class JournalAdd(Effect, frozen=True, gc=False):
    request_id: str
    external_id: str
    frames: tuple[bytes, ...]
    name: str = ""
    digest: bytes = b""
    eager: bool = False
    on_death: str = ""


class JournalTokens(Effect, frozen=True, gc=False):
    """Tokens ``start .. start+len(tokens)`` of a request and who made them."""

    request_id: str
    start: int
    tokens: tuple[int, ...]
    slot: str
    generation: int
    weight_version: str
    rows: Rows = ()
    weights_digest: str = ""


class JournalFinish(Effect, frozen=True, gc=False):
    """``reason``: vLLM's finish reason, "left" for a client that left, "stop_string", "cut", or "error:<code>"."""

    request_id: str
    reason: str
    length: int
    stop: Stop = None
