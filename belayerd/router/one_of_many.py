"""What a front among several cannot answer by itself: the metrics of all, and the end of requests of the others."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest, multiprocess
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from belayerd.router.remote_heart import RemoteHeart

ABORTS = ("/abort_requests", "/inference/v1/abort_requests")


class _Names(msgspec.Struct):
    request_ids: list[str] | None = None


def of_all_fronts() -> bytes:
    """vLLM's own metrics, summed over the files that all fronts write (prometheus-client's multiprocess mode)."""
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return generate_latest(registry)


class OneOfMany:
    """ASGI middleware between the guard, which hands bodies over in one piece, and vLLM's routes."""

    def __init__(self, app: ASGIApp, heart: RemoteHeart) -> None:
        self._app, self._heart = app, heart

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and scope["method"] == "GET" and path.rstrip("/") == "/metrics":
            await self._metrics(send)
        elif scope["type"] == "http" and scope["method"] == "POST" and path in ABORTS:
            await self._abort(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _metrics(self, send: Send) -> None:
        body = await asyncio.to_thread(of_all_fronts) + await self._heart.scrape()
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _abort(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Here first: what vLLM refuses is not done elsewhere either. Its answer goes out when all have done it."""
        first = await receive()
        left: list[Message] = [first]
        answer: list[Message] = []

        async def again() -> Message:
            return left.pop() if left else await receive()

        async def hold(message: Message) -> None:
            answer.append(message)

        await self._app(scope, again, hold)
        if answer and answer[0].get("status") == 200:
            names = _names(first.get("body", b""))
            if names or _ends_all(scope["path"]):
                elsewhere = await self._heart.abort_elsewhere(names or None)
                if not names:
                    answer = _counted(answer, elsewhere)
        for message in answer:
            await send(message)


def _ends_all(path: str) -> bool:
    """vLLM's route for trainers takes no names as all; that of the token-in-token-out API as none."""
    return path == ABORTS[0]


def _names(body: bytes) -> list[str]:
    try:
        return msgspec.json.decode(body, type=_Names).request_ids or []
    except msgspec.DecodeError:  # vLLM took it, so it named nothing that we would know
        return []


def _counted(answer: list[Message], elsewhere: int) -> list[Message]:
    """vLLM's ``{"status": "aborted", "aborted": N}``, with those of the other fronts."""
    start, *rest = answer
    said: dict[str, Any] = msgspec.json.decode(b"".join(one.get("body", b"") for one in rest))
    body = msgspec.json.encode({**said, "aborted": said["aborted"] + elsewhere})
    rows = [row for row in start["headers"] if row[0].lower() != b"content-length"]
    start = {**start, "headers": [*rows, (b"content-length", str(len(body)).encode())]}
    return [start, {"type": "http.response.body", "body": body}]
