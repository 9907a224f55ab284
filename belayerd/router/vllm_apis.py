"""How an answer of vLLM's two other APIs, /v1/messages and /v1/responses, ends when its request fails.

Both are served by vLLM's own handlers, above the same engine as all routes. What they make of an error in a stream is
not an error of their API: /v1/messages reads it as a chunk of a chat and tells what is wrong with that chunk, and
/v1/responses has no event for it, breaks, and with it the connection. Here each ends by its own API's error event, with
our code: ``event: error`` with an ``error`` object, and ``event: error`` with ``code`` and ``message``.

/v1/messages also logs a traceback of every error that it answers, mistakes of clients too; other routes do not.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

import msgspec
import vllm.entrypoints.openai.responses.serving as responses
from openai.types.responses import ResponseErrorEvent
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError

from belayerd.router.answer import code_in, error_of_messages

_ERROR = 'data: {"error"'
_PLAIN = "server_error"  # the OpenAI code of what has none of ours

_LOGS_ALL = "vllm.entrypoints.anthropic.api_router"
_CONVERTER = "message_stream_converter"
_IN_EVENTS = "_convert_generation_error_to_streaming_response"


def problems(messages: Any = AnthropicServingMessages, module: Any = responses) -> Iterator[str]:
    """What of this vLLM is not as needed here, in words. The arguments are this vLLM's own; a test gives others."""
    if not callable(getattr(messages, _CONVERTER, None)):
        yield f"{messages.__name__}.{_CONVERTER} is missing"
    if not hasattr(module, "StreamingResponsesResponse"):
        yield f"{module.__name__}.StreamingResponsesResponse is missing"
    elif not callable(getattr(module.OpenAIServingResponses, _IN_EVENTS, None)):
        yield f"OpenAIServingResponses.{_IN_EVENTS} is missing"


def end_by_error(state: Any) -> None:
    """``state``: of vLLM's app, with its handlers made."""
    logging.getLogger(_LOGS_ALL).addFilter(is_news)
    messages = state.anthropic_serving_messages
    if messages is not None:
        setattr(messages, _CONVERTER, _told_as_message(messages.message_stream_converter))
    if state.openai_serving_responses is not None:
        responses.StreamingResponsesResponse |= ResponseErrorEvent
        setattr(state.openai_serving_responses, _IN_EVENTS, as_event)


def is_news(record: logging.LogRecord) -> bool:
    """False for the traceback of an error that has a name: it was answered by it, and counted."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, VLLMClientError | GenerationError | GracefulHTTPError)


def as_event(error: GenerationError) -> str:
    """An error event of the Responses API; vLLM puts its number in the stream into it."""
    said = str(error)
    event = {"type": "error", "code": code_in(said) or _PLAIN, "message": said, "param": None, "sequence_number": -1}
    return msgspec.json.encode(event).decode()


def as_message(chunk: str) -> str:
    """An error event of the Messages API, from the error chunk of a chat (``data: {"error": ...}``)."""
    told: dict[str, Any] = msgspec.json.decode(chunk.removeprefix("data: ").partition("\n\n")[0])
    return f"event: error\ndata: {msgspec.json.encode(error_of_messages(told['error'])).decode()}\n\n"


def _told_as_message(converter: Any) -> Any:
    """vLLM's converter of a chat's stream, which is given the stream up to an error and no further."""

    async def message_stream_converter(chat: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        error: list[str] = []

        async def until_error() -> AsyncGenerator[str, None]:
            async with aclosing(chat) as chunks:
                async for chunk in chunks:
                    if chunk.startswith(_ERROR):
                        error.append(chunk)
                        return
                    yield chunk

        async with aclosing(converter(until_error())) as events:
            async for event in events:
                yield event
        for chunk in error:
            yield as_message(chunk)

    return message_stream_converter
