"""The way out: each chunk says who made it and where it ends, and what a client has already is not sent again.

The stamp is one more field of the JSON, ``"belayer": {"slot", "generation", "position"}``, put before its last brace:
clients ignore fields that they do not know, while an SSE ``id:`` line breaks some that parse events by hand.

Token-in-token-out clients of before vLLM 0.32 (renderers 0.1.12, so prime-rl) look for each logprob's token under
``token``, as ``token_id:N``; 0.32 gives the number alone, as ``token_id``. Both are told (ADR 0017).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
from starlette.types import Message, Send

from belayer.errors import ErrorCode
from belayerd.router.ticket import Ticket

RETRY_AFTER_S = 1
_EVENT, _END = b"data: {", b"}\n\n"
_ERROR = b'data: {"error"'
_ROLE = b'"delta":{"role":'  # the first chunk of a chat tells the role alone; its tokens are in the next one
_FINISH = re.compile(rb'"finish_reason":"')
# Never inside a text: there the quotes would be escaped.
_TOKEN_ID = re.compile(rb'"token_id":(\d+)')
_MESSAGES = "/v1/messages"
_INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')


class Answer:
    """An ASGI ``send`` around another."""

    def __init__(self, send: Send, ticket: Ticket, mistakes: Counter[int]) -> None:
        self._send, self._ticket, self._mistakes = send, ticket, mistakes
        self._kind = ""
        self._start: Message | None = None
        self._sent: dict[int, int] = {}  # tokens per choice in the chunks that are out
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._kind:
            await self._body(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        status: int = message["status"]
        if 400 <= status < 500:
            self._mistakes[status] += 1
        if status >= 400 and self._ticket.of_messages:
            self._kind, self._start = "error of messages", message
            return
        kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
        if (status == 200 and self._ticket.readers) or kind.startswith(b"text/event-stream"):
            self._kind = "events" if kind.startswith(b"text/event-stream") else "json"
        if self._kind == "json" or (self._kind == "events" and self._ticket.repeats):
            # Its content-length is known with the body; or its first chunk may say that it is refused.
            self._start = message
        else:
            await self._send(message)

    async def _body(self, message: Message) -> None:
        body = message.get("body", b"")
        if self._kind == "refused":
            return  # the [DONE] behind the error
        if self._kind == "error of messages":
            await self._error_of_messages(message)
            return
        if self._kind == "events":
            if self._start is not None:
                start, self._start = self._start, None
                if body.startswith(_ERROR):
                    await self._refuse(_typed(body))
                    return
                await self._send(start)
            kept = self._event(body)
            if kept is None and message.get("more_body", False):
                return
            await self._send({**message, "body": kept or b""})
            return
        if self._start is not None:
            start, self._start = self._start, None
            if not message.get("more_body", False) and body.endswith(b"}"):
                body = self._stamped(body[:-1], b"}")
                message = {**message, "body": body}
                rows = [row for row in start["headers"] if row[0].lower() != b"content-length"]
                start["headers"] = [*rows, (b"content-length", str(len(body)).encode())]
            await self._send(start)
        await self._send(message)

    async def _refuse(self, body: bytes) -> None:
        """Nothing of the stream is out yet: the error is told as that of an answer which is no stream."""
        error = body[len(b"data: ") :].split(b"\n\n", 1)[0]
        status: int = msgspec.json.decode(error)["error"]["code"]
        self._kind = "refused"
        if status < 500:
            self._mistakes[status] += 1
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(error)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": error})

    async def _error_of_messages(self, message: Message) -> None:
        """An answer that is no stream: in the shape of its API, with our code, and what to do about it."""
        self._held += message.get("body", b"")
        if message.get("more_body", False) or self._start is None:
            return
        start, self._start = self._start, None
        body, told = self._held, in_shape_of_messages(self._held)
        if told is not None:
            body = msgspec.json.encode(told)
            rows = [row for row in start["headers"] if row[0].lower() != b"content-length"]
            more = hints(start["status"], told["error"]["type"])
            rows += [(name.encode(), value.encode()) for name, value in more.items()]
            start["headers"] = [*rows, (b"content-length", str(len(body)).encode())]
        await self._send(start)
        await self._send({**message, "body": body})

    def _event(self, body: bytes) -> bytes | None:
        """The chunk as it goes out; None: the client has it."""
        if body.startswith(_ERROR):
            return _typed(body)
        if not (body.startswith(_EVENT) and body.endswith(_END)):
            return body
        if self._ticket.skipping:
            if not _FINISH.search(body):
                return None
            body = _finish_only(body)
        return self._stamped(body[: -len(_END)], _END)

    def _stamped(self, body: bytes, end: bytes) -> bytes:
        ticket = self._ticket
        if ticket.tokens_out:
            body = _TOKEN_ID.sub(rb'"token_id":\1,"token":"token_id:\1"', body)
        if ticket.prompts != 1:
            return body + end
        found = _INDEX.search(body) if len(ticket.readers) > 1 else None
        if len(ticket.readers) > 1 and (found is None or end == b"}"):
            return body + end  # of all choices: the usage, or a whole answer
        index = int(found[1]) if found else 0
        if _ROLE not in body:
            self._sent[index] = ticket.at.get(index, 0)
        position = self._sent.get(index, 0)
        course = ticket.courses.get(index)
        maker = course.maker(max(position, 1)) if course else None
        if maker is None:
            return body + end
        stamp = {"slot": maker.slot, "generation": maker.generation, "position": position}
        return body + b',"belayer":' + msgspec.json.encode(stamp) + end


def code_in(said: str) -> str:
    """The code that a typed error of ours begins with, "" for any other message."""
    code = said.partition(": ")[0]
    return code if code in ErrorCode.__members__.values() else ""


def hints(status: int, code: str) -> dict[str, str]:
    """Headers for clients that repeat by themselves: a 5xx is worth another try, a request that kills workers is
    not."""
    if code == ErrorCode.POISON_REQUEST:
        return {"x-should-retry": "false"}
    return {"retry-after": str(RETRY_AFTER_S)} if status == 503 else {}


def is_messages(path: str) -> bool:
    """True for the routes of the Messages API, whose errors have a shape of their own."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def error_of_messages(error: dict[str, Any]) -> dict[str, Any]:
    """The body of an error of the Messages API, from an OpenAI ``error`` object."""
    said = str(error.get("message", ""))
    return {"type": "error", "error": {"type": code_in(said) or str(error.get("type", "api_error")), "message": said}}


def in_shape_of_messages(body: bytes) -> dict[str, Any] | None:
    """An error body of vLLM's, whichever route's shape it has; None for one that has none."""
    try:
        told = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
    error = told.get("error")
    return error_of_messages(error) if isinstance(error, dict) else None


def _typed(body: bytes) -> bytes:
    """vLLM gives every error of a stream one type. Ours begin with their code, which is their type everywhere else."""
    chunk, end, more = body.partition(b"\n\n")
    told: dict[str, Any] = msgspec.json.decode(chunk[len(b"data: ") :])
    code = code_in(str(told["error"].get("message", "")))
    if not code:
        return body
    told["error"]["type"] = code
    return b"data: " + msgspec.json.encode(told) + end + more


def _finish_only(body: bytes) -> bytes:
    """A chunk whose tokens the client has but which also ends the text: only the end goes out."""
    chunk: dict[str, Any] = msgspec.json.decode(body[len(b"data: ") :])
    for choice in chunk.get("choices", ()):
        for name, nothing in (("delta", {}), ("text", ""), ("token_ids", []), ("logprobs", None)):
            if name in choice:
                choice[name] = nothing
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
