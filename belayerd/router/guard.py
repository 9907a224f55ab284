"""Before vLLM's routes: bounds on what a client may send, admission, and what it asks of the router itself.

Header or body field (the header wins): ``X-Request-Id`` / ``request_id``, ``X-Belayer-Position`` /
``belayer_position``, ``X-Belayer-On-Death`` / ``belayer_on_death``; docs/router.md says what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belayerd.router.answer import RETRY_AFTER_S, Answer, error_of_messages, is_messages
from belayerd.router.events import OnDeath, SameId
from belayerd.router.heart import Heart
from belayerd.router.ticket import TICKET, Ticket

# What vLLM makes of a client's id, by route: the name under which the router keeps its story.
TOKENS_OUT = "/inference/v1/generate"
NAMES = {
    "/v1/chat/completions": "chatcmpl-{}",
    "/v1/completions": "cmpl-{}-0",
    TOKENS_OUT: "generate-tokens-{}",
}
# Their answers cannot say that they were cut short, nor where a chunk ends: no repetition, and a cut is an error.
WHOLE = {"/v1/responses", "/v1/messages"}
ADMITTED = {*NAMES, *WHOLE, "/v1/chat/completions/batch", "/pooling", "/v1/embeddings"}
_MAX_ID = 256
_DISCARD, _DISCARD_S = 256 << 20, 5.0  # bytes, seconds
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # vLLM says what is wrong with it
_SMALL = 64 << 10  # bytes of a body that may be read before there is room for its requests; uvicorn reads as many
# Bodies of which more than one request may become. Others are not read twice.
_SEVERAL = re.compile(rb'"n"\s*:|"prompt"\s*:\s*\[\s*["\[{]|"messages"\s*:\s*\[\s*\[')


class Extras(msgspec.Struct):
    """Our fields of a request body; all others are vLLM's."""

    request_id: str | None = None
    belayer_position: int | None = None
    belayer_on_death: OnDeath | None = None


class _Params(msgspec.Struct):
    n: int | None = None
    thinking_token_budget: Any = None


class _Thinking(msgspec.Struct):
    """As /v1/messages asks for it."""

    type: str = ""
    budget_tokens: Any = None


class _Shape(msgspec.Struct):
    """What is asked for, as far as it decides whether it can be had. Wrong types are left to vLLM to refuse."""

    n: int | None = None
    prompt: Any = None
    messages: Any = None
    thinking_token_budget: Any = None
    sampling_params: _Params | None = None
    thinking: _Thinking | None = None

    def requests(self) -> int:
        """How many it becomes: one for each choice of each prompt (or conversation)."""
        params = self.sampling_params or _Params()
        several = self.messages if _is_list_of(list, self.messages) else self.prompt
        prompts = len(several) if isinstance(several, list) and not _is_list_of(int, several) else 1
        return max(1, prompts) * max(1, self.n or 1) * max(1, params.n or 1)

    def thinks(self) -> bool:
        params = self.sampling_params or _Params()
        asked = self.thinking is not None and self.thinking.type == "enabled"
        return asked or (self.thinking_token_budget, params.thinking_token_budget) != (None, None)


def _is_list_of(kind: type, what: Any) -> bool:
    """By its first element."""
    return isinstance(what, list) and bool(what) and isinstance(what[0], kind)


class Declined(Exception):
    """An answer that is given without vLLM's routes."""

    def __init__(self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.headers = status, kind, message, dict(headers or {})


@dataclass(frozen=True, slots=True)
class Bounds:
    """``body_bytes`` and ``body_s``: what a request may be and how long it may take to come; ``requests``: how many
    may be live. ``ports``: which port is the URL of which slot. ``thinks``: engines know where thinking ends."""

    body_bytes: int = 64 << 20
    body_s: float = 30.0
    requests: int = 4096
    ports: Mapping[int, str] = field(default_factory=dict)
    thinks: bool = False
    same_id: SameId = SameId.REFUSE


class Guard:
    """What is not let in, and what clients did wrong, is counted with the heart."""

    def __init__(self, app: ASGIApp, heart: Heart, bounds: Bounds) -> None:
        self._app, self._heart, self._bounds = app, heart, bounds
        self._declined, self._mistakes = heart.declined, heart.mistakes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        pin = self._bounds.ports.get((scope.get("server") or ("", 0))[1] or 0, "")
        ticket = Ticket(pin=pin, of_messages=is_messages(scope["path"]), whole=scope["path"] in WHOLE)
        try:
            await self._serve(scope, receive, send, ticket)
        finally:
            if len(ticket.readers) < ticket.places:
                self._heart.leave(ticket.place)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, ticket: Ticket) -> None:
        try:
            headers = dict(scope["headers"])
            if scope["method"] == "POST":
                receive = await self._checked(scope, headers, receive, ticket)
        except Declined as why:
            self._declined[why.kind] += 1
            self._mistakes[why.status] += 1
            await decline(send, why, ticket.of_messages)
            return
        key = headers.get(b"x-smg-routing-key")  # counts as X-Session-ID when that is absent
        if key and b"x-session-id" not in headers:
            scope["headers"] = [*scope["headers"], (b"x-session-id", key)]
        before = TICKET.set(ticket)
        try:
            await self._app(scope, receive, Answer(send, ticket, self._mistakes))
        finally:
            TICKET.reset(before)

    async def _checked(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, ticket: Ticket) -> Receive:
        path = scope["path"]
        if path in ADMITTED and not _is_small(headers) and await self._heart.full():
            raise self._too_many()  # before it is kept here
        body = await self._read(headers, receive)
        ticket.tokens_out = path == TOKENS_OUT
        if path in ADMITTED:
            self._check_thinking(body)
        if path in NAMES:
            await self._extras(path, headers, body, ticket)
        elif path in WHOLE:
            self._wishes(path, read_extras(headers, body), ticket)
        if path in ADMITTED and not ticket.attaches:
            await self._admit(body, ticket)
        told = False

        async def again() -> Message:
            nonlocal told, body
            if told:
                return await receive()
            told, whole, body = True, body, b""  # not kept for as long as the answer takes
            return {"type": "http.request", "body": whole, "more_body": False}

        return again

    async def _admit(self, body: bytes, ticket: Ticket) -> None:
        """Room for all that it becomes, counted where the requests of all fronts are, until each of them is there: of a
        burst just so many are let in."""
        count, most = _shape(body).requests() if _SEVERAL.search(body) else 1, self._bounds.requests
        if count > most:
            raise Declined(400, "bad_request", f"it asks for {count} answers at once, router.max_requests is {most}")
        place = secrets.token_hex(8)
        if not await self._heart.admit(place, count):
            raise self._too_many()
        ticket.place, ticket.places = place, count

    def _too_many(self) -> Declined:
        said = f"{self._bounds.requests} requests are live; send it again later"
        return Declined(429, "too_many_requests", said, {"retry-after": str(RETRY_AFTER_S)})

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = self._bounds.body_bytes
        too_large = Declined(413, "body_too_large", f"a body may have {limit} bytes", {"connection": "close"})
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            await self._discard(receive)
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._bounds.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise Declined(400, "client_left", "the client left before its body had come")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        parts.clear()
                        await self._discard(receive)
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as why:
            said = f"the body did not come within {self._bounds.body_s:g} s"
            raise Declined(408, "body_too_slow", said, {"connection": "close"}) from why

    @staticmethod
    async def _discard(receive: Receive) -> None:
        """Read on for a moment and keep nothing: a client that still sends when its connection is closed loses the
        answer with it."""
        left = _DISCARD
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return

    async def _extras(self, path: str, headers: dict[bytes, bytes], body: bytes, ticket: Ticket) -> None:
        extras = read_extras(headers, body)
        if extras.request_id is not None:
            if not 0 < len(extras.request_id) <= _MAX_ID:
                raise Declined(400, "bad_request", f"a request id has 1 to {_MAX_ID} characters")
            ticket.named, ticket.own, ticket.inside = True, extras.request_id, inside(path, extras.request_id)
        ticket.position, ticket.on_death = extras.belayer_position, extras.belayer_on_death
        if extras.request_id is not None or ticket.position is not None:
            ticket.repeats, ticket.attaches = await self._check_id(NAMES[path].format(extras.request_id), extras)
        if ticket.position and _shape(body).requests() != 1:
            raise Declined(409, "refused", "only a request with one prompt and n=1 has a position; ask for position 0")

    def _check_thinking(self, body: bytes) -> None:
        """A budget for what no engine knows; vLLM would say so inside the stream."""
        named = b'"thinking_token_budget"' in body or b'"budget_tokens"' in body
        if named and not self._bounds.thinks and _shape(body).thinks():
            said = "a thinking budget needs router.reasoning_parser: without it no engine knows what thinking is"
            raise Declined(400, "refused", said)

    @staticmethod
    def _wishes(path: str, extras: Extras, ticket: Ticket) -> None:
        """Of a route whose answers are told whole or not at all."""
        if extras.belayer_position is not None:
            raise Declined(409, "refused", f"{path} has no positions, so a request there cannot be repeated")
        if extras.belayer_on_death is OnDeath.ABORT:
            raise Declined(409, "refused", f"{path} has no word for an answer that was cut short; wish for error there")
        ticket.on_death = extras.belayer_on_death

    async def _check_id(self, name: str, extras: Extras) -> tuple[bool, bool]:
        """What can be said before vLLM has read the body; the core checks again, with the content. Whether a request of
        this name is known, and whether it runs."""
        known = await self._heart.known((name, f"0_{name}"))  # the second is the first of several choices
        if extras.belayer_position is None:
            if known.heard and self._bounds.same_id is SameId.REFUSE:
                said = f"request id {extras.request_id} is running already; name a position to hear it"
                raise Declined(409, "refused", said)
            return known.running, known.running
        if extras.belayer_position < 0:
            raise Declined(400, "bad_request", "a position is 0 or more")
        said = f"no request with id {extras.request_id or '(none given)'} is known"
        if extras.request_id is not None and known.tokens >= 0:
            if extras.belayer_position <= known.tokens:
                return True, known.running
            said = f"request {extras.request_id} has {known.tokens} known tokens"
        raise Declined(404, "request_unknown", f"{said}; send it without a position")


def inside(path: str, own: str) -> re.Pattern[str]:
    """All names of this client's requests: of each prompt, of each choice, with vLLM's random suffix and without."""
    name = re.escape(NAMES[path].format(own))
    if NAMES[path].endswith("-0"):
        name = name.removesuffix("0") + r"\d+"
    return re.compile(rf"(?<!\w)(?:\d+_)?{name}(?:-[0-9a-f]{{8}})?(?!\w)")


def _is_small(headers: Mapping[bytes, bytes]) -> bool:
    length = headers.get(b"content-length", b"")
    return length.isdigit() and int(length) <= _SMALL


def _shape(body: bytes) -> _Shape:
    try:
        return msgspec.json.decode(body, type=_Shape)
    except _UNREADABLE:
        return _Shape()


def read_extras(headers: Mapping[bytes, bytes], body: bytes) -> Extras:
    """Ours out of headers and body. A body that is no JSON object is left to vLLM to refuse."""
    extras = Extras()
    if b"belayer_" in body or b'"request_id"' in body:
        try:
            extras = msgspec.json.decode(body, type=Extras)
        except msgspec.ValidationError as why:
            raise Declined(400, "bad_request", f"the body: {why}") from why
        except _UNREADABLE:
            return extras
    named = headers.get(b"x-request-id")
    position = headers.get(b"x-belayer-position")
    wish = headers.get(b"x-belayer-on-death")
    if named is not None:
        extras.request_id = named.decode("latin-1")
    if position is not None:
        if not position.isdigit() or len(position) > 9:
            raise Declined(400, "bad_request", "X-Belayer-Position is a number of tokens")
        extras.belayer_position = int(position)
    if wish is not None:
        if wish.decode("latin-1") not in list(OnDeath):
            raise Declined(400, "bad_request", f"X-Belayer-On-Death is one of {', '.join(OnDeath)}")
        extras.belayer_on_death = OnDeath(wish.decode())
    return extras


async def decline(send: Send, why: Declined, of_messages: bool) -> None:
    error = {"message": f"{why.kind}: {why.message}", "type": why.kind, "param": None, "code": why.status}
    body = msgspec.json.encode(error_of_messages(error) if of_messages else {"error": error})
    headers = {"content-type": "application/json", "content-length": str(len(body)), **why.headers}
    rows = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": why.status, "headers": rows})
    await send({"type": "http.response.body", "body": body})
