"""Errors of a stream on their way out: our code is their type, and they speak of the client's own id."""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from starlette.types import Message
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from belayer.errors import BelayerError, ErrorCode, Refused, from_code
from belayerd.router.answer import Answer
from belayerd.router.client import RouterFault
from belayerd.router.guard import NAMES, inside
from belayerd.router.ticket import Ticket


def told(ticket: Ticket, message: str, status: int) -> tuple[list[Message], dict[str, Any]]:
    """What goes out, and the error in it, when vLLM ends a stream with a GenerationError of this message."""
    chunk = create_error_response(message, "InternalServerError", HTTPStatus(status)).model_dump()
    out: list[Message] = []

    async def send(message: Message) -> None:
        out.append(message)

    async def stream() -> None:
        answer = Answer(send, ticket, Counter())
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await answer({"type": "http.response.start", "status": 200, "headers": headers})
        data = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        await answer({"type": "http.response.body", "body": data, "more_body": True})

    asyncio.run(stream())
    body = out[-1]["body"]
    error: dict[str, Any] = msgspec.json.decode(body.removeprefix(b"data: "))["error"]
    return out, error


@pytest.mark.parametrize("repeats", [True, False], ids=["before the stream", "in the stream"])
@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_typed_error_of_a_stream_has_our_code_as_its_type(code: ErrorCode, repeats: bool) -> None:
    fault = RouterFault(from_code(str(code), "it failed: so", remedy="mend it"), HTTPStatus.CONFLICT)
    out, error = told(Ticket(repeats=repeats), str(fault), 409)
    assert error == {"type": str(code), "message": f"{code}: it failed: so; mend it", "param": None, "code": 409}
    assert out[0]["status"] == (409 if repeats else 200)
    if not repeats:
        assert out[-1]["body"].startswith(b"data: {")
        assert out[-1]["body"].endswith(b"}\n\n")


def test_an_error_of_vllms_own_stays_as_it_is() -> None:
    for said in ("Internal server error", "no code: of ours", ""):
        assert told(Ticket(), said, 500)[1]["type"] == "InternalServerError"


@pytest.mark.parametrize("own", ["mine", "cmpl-1", "a-0", "ü (x)*", "\\1"])
@pytest.mark.parametrize("path", NAMES)
def test_an_error_names_the_id_that_the_client_gave(path: str, own: str) -> None:
    name = NAMES[path].format(own)
    ticket = Ticket(named=True, own=own, inside=inside(path, own))
    for made in (name, f"{name}-0123abcd", f"3_{name}-0123abcd", f"12_{name}"):
        fault = RouterFault(Refused(f"request id {made} belongs to another", remedy=f"not {made}."), None, ticket)
        assert str(fault) == f"refused: request id {own} belongs to another; not {own}."
    longer: BelayerError = Refused(f"request id {name}x is another")
    assert str(RouterFault(longer, None, ticket)) == f"refused: request id {name}x is another"


def test_each_prompt_of_a_request_is_the_client_s_id() -> None:
    ticket = Ticket(named=True, own="mine", inside=inside("/v1/completions", "mine"))
    assert ticket.in_its_words("cmpl-mine-12, 1_cmpl-mine-2-0123abcd") == "mine, mine"
