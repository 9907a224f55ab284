"""What the router remembers: one record per live request, one per slot, and their tables of allowed moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from belayerd.router.events import OnDeath, Rows, Stop


class RequestState(StrEnum):
    """WAITING: no worker has it. RUNNING: one worker has it. FINISHED: it had its one end; the record goes."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


REQUEST_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class SlotState(StrEnum):
    """EMPTY: no worker. CONNECTING: hello sent. SERVING: takes requests. REMOVED: quarantined, comes back only
    with a newer generation."""

    EMPTY = "empty"
    CONNECTING = "connecting"
    SERVING = "serving"
    REMOVED = "removed"


SLOT_NEXT: dict[SlotState, frozenset[SlotState]] = {
    SlotState.EMPTY: frozenset({SlotState.CONNECTING, SlotState.REMOVED}),
    SlotState.CONNECTING: frozenset({SlotState.SERVING, SlotState.EMPTY, SlotState.REMOVED}),
    # back to CONNECTING: its link was torn, and a new one is made to the same worker
    SlotState.SERVING: frozenset({SlotState.EMPTY, SlotState.REMOVED, SlotState.CONNECTING}),
    SlotState.REMOVED: frozenset({SlotState.CONNECTING}),
}


class Span(NamedTuple):
    """Tokens from position ``start`` up to the next span were made by this worker with this weight version, whose bytes
    have this digest ("": it was not known yet)."""

    start: int
    slot: str
    generation: int
    weight_version: str
    weights_digest: str = ""


@dataclass(slots=True)
class Request:
    """A live request: what it takes to give it again to any worker."""

    request_id: str
    external_id: str
    frames: tuple[bytes, ...]
    session: str
    continuable: bool
    state: RequestState = RequestState.WAITING
    slot: str = ""  # where it runs; while it waits: where it ran last, and waits to run again
    tokens: list[int] = field(default_factory=list)
    journaled: int = 0  # tokens[:journaled] are on disk
    deaths: int = 0
    given: int = 0  # how often a worker has been given it
    waiting_since: float = 0.0
    roams: bool = False  # waited for its own slot long enough: any slot may take it
    spans: list[Span] = field(default_factory=list)  # who made which tokens; spans[i].start grows
    rows: list[tuple[int, bytes]] = field(default_factory=list)  # kept only for requests with a name
    rows_journaled: int = 0
    name: str = ""
    digest: bytes = b""
    eager: bool = False
    on_death: OnDeath | None = None  # None: as its slot says
    pin: str = ""
    origin: str = ""  # the host that forwarded it; it is never forwarded again
    returned: int = 0  # how often another host handed it back
    readers: list[str] = field(default_factory=list)  # front-end ids; none: its client is gone
    # Tokens that some client may have. What came after them nobody heard; a position among those is of tokens that an
    # earlier life of this router told and lost (a disk that took nothing, a power cut), and these are others.
    told: int = 0
    heard_at: float = 0.0  # its last output, or when it was given to its worker

    def move(self, to: RequestState) -> None:
        if to not in REQUEST_NEXT[self.state]:
            raise AssertionError(f"request {self.request_id}: no way from {self.state} to {to}")
        self.state = to


@dataclass(frozen=True, slots=True)
class Past:
    """A request that has ended, or whose story an earlier life of the router wrote. ``reason`` "": it had no end."""

    request_id: str
    external_id: str
    name: str
    digest: bytes
    frames: tuple[bytes, ...]
    tokens: tuple[int, ...]
    rows: Rows
    spans: tuple[Span, ...]
    reason: str
    stop: Stop = None
    eager: bool = False
    on_death: OnDeath | None = None
    told: int | None = None  # as Request.told; None: all

    @property
    def known(self) -> int:
        """The highest position from which the rest may be asked for."""
        return len(self.tokens) if self.told is None else self.told

    @property
    def whole(self) -> bool:
        """True when nothing more is to come: it can be told again without an engine."""
        return bool(self.reason) and self.reason != LEFT and not self.reason.startswith("error:")

    def bytes(self) -> int:
        """About what it costs to keep."""
        return cost(self.tokens, self.rows, self.frames)


def cost(tokens: Sequence[int], rows: Iterable[tuple[int, bytes]], frames: Iterable[bytes]) -> int:
    """Bytes of memory that a story takes, about."""
    return 512 + 32 * len(tokens) + sum(len(row) + 64 for _, row in rows) + sum(map(len, frames))


LEFT = "left"  # ended because its client went away: it may be taken up again
STOP_STRING = "stop_string"  # ended by the front end, which finds the stop string again when it is told the tokens
CUT = "cut"  # ended by its own wish when its worker died


@dataclass(slots=True)
class ResumeNote:
    """The last time that a slot took its requests up again. Times are seconds of the monotonic clock."""

    generation: int
    resumed: int
    registered_at: float
    first_token_ms: float | None = None


@dataclass(slots=True)
class Slot:
    """A slot as the router sees it. ``fence`` is the lowest generation that may still register."""

    name: str
    state: SlotState = SlotState.EMPTY
    generation: int = -1
    worker_id: str = ""
    endpoint: str = ""
    weight_version: str = ""
    weights_digest: str = ""  # of the bytes of that version; "": not told (yet)
    model: str = ""
    fence: int = 0
    next_seq: int | None = None
    running: dict[str, None] = field(default_factory=dict)  # ordered set of request ids
    resuming: set[str] = field(default_factory=set)  # given again to this worker, no token yet
    tokens_total: int = 0
    resumed_total: int = 0
    restarted_total: int = 0
    late_dropped: int = 0
    tears: int = 0  # how often the link to this worker was torn, one soon after the other
    torn_at: float = 0.0  # the last time
    link_given_up: bool = False  # too often: this worker gets no other
    calling_until: float = 0.0  # admin calls may keep its worker silent until then
    remote: bool = False  # of another host: its router stands for its workers
    open: bool = True  # a remote one: may be given requests
    elsewhere: int = 0  # its requests that are not ours
    capacity: int = 0  # how many its engine runs at once; 0: not known
    last_resume: ResumeNote | None = None

    def move(self, to: SlotState) -> None:
        if to not in SLOT_NEXT[self.state]:
            raise AssertionError(f"slot {self.name}: no way from {self.state} to {to}")
        self.state = to

    def serves(self, version: str, digest: str) -> bool:
        """Take in which weights its worker serves now; True when that is news. A version without a digest ("": not
        told) leaves the digest of that version, if it is known, as it is."""
        if not version or (version == self.weight_version and digest in ("", self.weights_digest)):
            return False
        self.weight_version, self.weights_digest = version, digest
        return True

    def is_current(self, generation: int, worker_id: str) -> bool:
        live = self.state in (SlotState.CONNECTING, SlotState.SERVING)
        return live and (self.generation, self.worker_id) == (generation, worker_id)


@dataclass(slots=True)
class Counters:
    """Totals since this router started; each is a Prometheus counter of the same name."""

    added: int = 0
    finished: int = 0
    aborted: int = 0
    failed: dict[str, int] = field(default_factory=dict)  # by error code
    tokens: int = 0
    resumed: int = 0
    restarted: int = 0
    moved: int = 0
    late_messages: int = 0
    late_items: int = 0
    torn_links: int = 0
    replayed: int = 0
    attached: int = 0
    recovered: int = 0
    silent: int = 0
    cut: int = 0
    forwarded: int = 0
    handed_back: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by error code: the client's mistakes about ids
