"""What vLLM's front end holds in the place of its engine: a client that talks to whichever workers serve."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from belayer import clock, wire
from belayer.errors import BadMessage, BelayerError, ErrorCode, Refused, WorkerGone
from belayerd.router import events as ev
from belayerd.router import fidelity
from belayerd.router import vllm_seam as seam
from belayerd.router.heart import Heart
from belayerd.router.local_heart import FRONT
from belayerd.router.ticket import TICKET, Course, Ticket

# What a front sends a worker, at most; beyond MAX_MESSAGE the worker's socket ends the link, and its main would be
# taken for broken. The other half is for the tokens that go along when a request is resumed: up to 5 bytes each.
MAX_BYTES = wire.MAX_MESSAGE // 2
ADMIN_WAIT_S = 30.0  # how long an admin call waits for a worker while a slot is between two of them

_PAUSING = {"pause_scheduler": True, "resume_scheduler": False}
# True inside an abort that vLLM makes because the client went away; False: a stop string was met.
LEAVING: ContextVar[bool] = ContextVar("belayer_leaving", default=False)

_STATUS = {
    ErrorCode.NO_HEALTHY_SLOT: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.WORKER_GONE: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorCode.REQUEST_STALLED: HTTPStatus.GATEWAY_TIMEOUT,
    ErrorCode.REQUEST_UNKNOWN: HTTPStatus.NOT_FOUND,
}


class RouterFault(seam.GracefulHTTPError, seam.GenerationError):  # type: ignore[misc]
    """A typed error on its way to the HTTP client. By its first base vLLM passes it through ``generate()`` as it is;
    by its second a broken stream ends with it as an error chunk, without a traceback in the log."""

    def __init__(self, error: BelayerError, status: HTTPStatus | None = None, ticket: Ticket | None = None) -> None:
        """The message begins with the code: by that a stream's chunk is known (answer.py), which vLLM makes of it."""
        status = status or _STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        said = str(error) if ticket is None else ticket.in_its_words(str(error))
        super().__init__(f"{error.code}: {said}", status)
        self.status_code = status
        self.code = error.code


class TooLarge(Refused):
    """More than a worker takes in one message."""


def _fitting(frames: Any) -> Any:
    """``frames``, when they fit into one message to a worker. Raises TooLarge."""
    size = sum(memoryview(frame).nbytes for frame in frames)
    if size > MAX_BYTES:
        raise TooLarge(
            f"{size} bytes for an engine, and it takes {MAX_BYTES}", remedy="shorten the fields beside the prompt"
        )
    return frames


def _said_s(method: str, args: Sequence[Any]) -> float:
    """The timeout that the caller of /collective_rpc gave (its second argument), 0 for none: a worker announces the
    same to its watcher (belayerd/worker/fronts.py)."""
    given = args[1] if method == "collective_rpc" and len(args) > 1 else None
    return float(given) if isinstance(given, int | float) and given > 0 else 0.0


def cut_short(ticket: Ticket) -> RouterFault:
    """For an answer that was aborted, where its API would tell what there is as a whole answer."""
    if ticket.cut:
        said = "its worker was lost, on_death is abort, and this API has no word for an answer that was cut short"
        return RouterFault(WorkerGone(said, remedy="send the request again"))
    said = "the request was aborted before its end, and this API has no word for an answer that was cut short"
    return RouterFault(Refused(said, remedy="send the request again"))


class Failure:
    """In the queue behind the outputs that came before it: the request ends with this error."""

    def __init__(
        self, request_id: str, error: BelayerError, ticket: Ticket | None, status: HTTPStatus | None = None
    ) -> None:
        self.request_id, self.fault = request_id, RouterFault(error, status, ticket)


class BelayerClient(seam.AsyncMPClient):  # type: ignore[misc]
    """Does not call the base constructor, which would launch engines; sets what the inherited methods read."""

    def __init__(self, vllm_config: Any, renderer: Any, slots: Sequence[str], codec: seam.Codec) -> None:
        self.vllm_config = vllm_config
        self._renderer = renderer
        self._codec = codec
        self._index = {name: number for number, name in enumerate(slots)}
        self.resources = seam.BackgroundResources(ctx=None)  # engine_dead stays False: workers come and go
        self.client_count, self.client_index = 1, FRONT
        self.engine_ranks_managed = list(range(len(slots)))
        self.core_engines: list[str] = []
        self.core_engine = ""
        self.stats_update_address = None
        self.engines_running = False
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.utility_results: dict[int, asyncio.Future[Any]] = {}
        self._engine_status: dict[int, Any] = {}
        self._kv_event_sources: dict[int, Any] = {}
        self._effective_attention_block_sizes: set[int | None] = set()
        self._welcomed = False
        self.stopping = False
        self._loop = asyncio.get_running_loop()
        self._tickets: dict[str, Ticket] = {}  # by reader, for those whose request has one
        self._gates: dict[str, list[Any]] = {}  # by reader: what waits until the client's own part has been told
        self._heart: Heart
        self._processor: Any = None

    def attach(self, heart: Heart, output_processor: Any) -> None:
        """Complete the circle: the heart needs these ears, this client needs the heart."""
        self._heart, self._processor = heart, output_processor

    # -- what AsyncLLM calls ----------------------------------------------------------------------------------

    async def add_request_async(self, request: Any) -> None:
        try:
            self._add(request)
        except BelayerError as error:
            self.refuse(request.request_id, error)

    def _add(self, request: Any) -> None:
        if request.resumable:
            raise Refused("streaming input is not supported by belayer-router")
        request.client_index = self.client_index
        ticket, params = TICKET.get() or Ticket(), request.sampling_params
        name = request.request_id.rpartition("-")[0] if ticket.named and params is not None else ""
        if ticket.position:
            self._check_position(request, ticket)
        self._tickets[request.request_id] = ticket
        event = ev.Add(
            request_id=request.request_id,
            frames=_fitting(self._codec.encode(request)),
            external_id=request.external_req_id or "",
            session=request.session_id or "",
            continuable=fidelity.continuable(request),
            name=name,
            digest=self._codec.digest(request) if name else b"",
            position=ticket.position,
            eager=bool(name) and self._codec.is_stream(params),
            on_death=ticket.on_death,
            pin=ticket.pin,
            place=ticket.place,
        )
        ticket.readers.append(request.request_id)  # by these the guard knows whether its room was taken
        self._heart.add(event)

    def _check_position(self, request: Any, ticket: Ticket) -> None:
        if not request.request_id.startswith(request.external_req_id) or ticket.readers:
            raise Refused("only a request with one prompt and n=1 has a position", remedy="ask for position 0")
        if request.sampling_params is None or not self._codec.is_stream(request.sampling_params):
            raise Refused("only a stream has a position above 0", remedy="ask for position 0, or set stream")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
        self._heart.abort(request_ids, left=LEAVING.get())

    def _forget(self, reader: str) -> Ticket | None:
        self._gates.pop(reader, None)
        return self._tickets.pop(reader, None)

    async def get_output_async(self) -> Any:
        while True:
            item = await self.outputs_queue.get()
            if not isinstance(item, Failure):
                return item
            self._end(item)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)  # known without a worker, so that the port opens before the first one is up

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Admin calls go to all workers: what is true of one must be true of its neighbours. Those that came by the
        URL of a slot go to that slot."""
        return (await self.call_utility_all_async(method, *args))[0]

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        try:
            ticket = TICKET.get()
            slots = await self._heart.slots(ADMIN_WAIT_S, ticket.pin if ticket else "")
            if method in _PAUSING:
                # Before the engines hear it: a pause may take minutes to come into effect, and a worker that dies
                # meanwhile makes this call fail. Its successor, and all that join, are brought to what was asked.
                where = [ticket.pin] if ticket and ticket.pin else list(self._index)
                await self._heart.pausing(where, _PAUSING[method])
            calls = [self._call_utility_async(method, *args, engine=slot) for slot in slots]
            return list(await asyncio.gather(*calls))
        except BelayerError as error:
            raise RouterFault(
                error, HTTPStatus.REQUEST_ENTITY_TOO_LARGE if isinstance(error, TooLarge) else None
            ) from error

    async def _call_utility_async(self, method: str, *args: Any, engine: str) -> Any:
        call_id = 1 + secrets.randbits(62)  # all fronts of this router draw from one range
        frames = _fitting(self._codec.encode((self.client_index, call_id, method, args)))
        output = await self._heart.call(engine, call_id, frames, _said_s(method, args))
        if output.failure_message is not None:
            raise seam.utility_failed(output.failure_message)
        return None if output.result is None else output.result.result

    def _ensure_output_queue_task(self) -> None:
        """Links read by themselves."""

    def ensure_alive(self) -> None:
        """The router serves with no worker too: requests wait, with a bound."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Called by vLLM's server from another thread: end every live request with a typed error."""
        self.stopping = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end_all)

    # -- what the heart tells ---------------------------------------------------------------------------------

    def deliver(self, slot: str, generation: int, outputs: Any) -> None:
        for row in outputs.outputs:
            ticket = self._tickets.get(row.request_id)
            if ticket is not None:
                self._course(ticket, row.request_id).made(slot, generation, len(row.new_token_ids))
                if row.finish_reason is not None:
                    del self._tickets[row.request_id]
        if self._gates:
            outputs.outputs = [row for row in outputs.outputs if not self._held(row, outputs.weight_version)]
        if outputs.outputs or outputs.scheduler_stats:
            outputs.engine_index = self._index.get(slot, 0)
            self.outputs_queue.put_nowait(outputs)

    @staticmethod
    def _course(ticket: Ticket, reader: str) -> Course:
        return ticket.courses.setdefault(ticket.readers.index(reader), Course())

    def _held(self, row: Any, version: str | None) -> bool:
        gate = self._gates.get(row.request_id)
        if gate is None:
            return False
        gate.append(self._codec.message([row], version))
        return True

    def replay(self, told: ev.Replay) -> None:
        ticket = self._tickets.get(told.reader)
        if ticket is None:
            return  # its client left while this was under way from the router's process; the abort follows it there
        position = ticket.position or 0
        all_mine = 0 < position == len(told.tokens)
        try:
            mine = self._codec.told(told, 0, position, end=all_mine) if position else []
            rest = [] if all_mine else self._codec.told(told, position, len(told.tokens), end=True)
        except Refused as why:
            self.refuse(told.reader, why)
            # Not now: the heart is in the middle of what it decided about this reader.
            self._loop.call_soon(self._heart.abort, [told.reader])
            return
        course = self._course(ticket, told.reader)
        course.spans, course.count = list(told.spans), len(told.tokens)
        state = self._processor.request_states.get(told.reader)
        if state is not None and state.stats is not None:  # it waited in no queue of this life
            state.stats.queued_ts = state.stats.scheduled_ts = clock.monotonic()
        if position:
            ticket.skipping, ticket.proceed = True, lambda: self._open(told.reader)
            self._gates[told.reader] = rest
        if told.finish:
            del self._tickets[told.reader]
        for message in mine or rest:
            self.outputs_queue.put_nowait(message)

    def _open(self, reader: str) -> None:
        for message in self._gates.pop(reader, ()):
            self.outputs_queue.put_nowait(message)

    def cut(self, reader: str) -> None:
        ticket = self._tickets.pop(reader, None)
        if ticket is not None:
            ticket.cut = True
        message = self._codec.aborted(reader)
        if reader in self._gates:
            self._gates[reader].append(message)
        else:
            self.outputs_queue.put_nowait(message)

    def fail(self, request_id: str, error: BelayerError) -> None:
        self.outputs_queue.put_nowait(Failure(request_id, error, self._forget(request_id)))

    def refuse(self, request_id: str, error: BelayerError) -> None:
        status = HTTPStatus.CONFLICT if isinstance(error, Refused) else None
        if isinstance(error, TooLarge):
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        self.outputs_queue.put_nowait(Failure(request_id, error, self._forget(request_id), status))

    def ready(self, payload: bytes) -> None:
        if self._welcomed:
            return
        try:
            self._apply_ready_response(payload)
        except (ValueError, TypeError) as why:
            raise BadMessage(f"the ready info of a worker cannot be read: {why}") from why
        self._welcomed = True

    # -- ends -------------------------------------------------------------------------------------------------

    def _end(self, failure: Failure) -> None:
        """Raise the fault in the request's own task; with n > 1 its siblings end too."""
        state = self._processor.request_states.get(failure.request_id)
        if state is None:
            return
        top = failure.request_id if state.parent_req is None else state.parent_req.request_id
        state.queue.put(failure.fault)  # first: the abort below puts an output, which an error outranks
        siblings = self._processor.abort_requests([top], internal=True)
        for sibling in siblings:
            self._forget(sibling)
        self._heart.abort(request_id for request_id in siblings if request_id != failure.request_id)

    def _end_all(self) -> None:
        fault = RouterFault(Refused("the router is stopping", remedy="send the request again when it is back"))
        if self._processor is not None:
            self._processor.propagate_error(fault)
