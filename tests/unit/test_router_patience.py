"""Heads of requests: bounded in size, and what one may take in time does not run inside the answer to another that was
sent along with it."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from belayerd.router.patience import MOST_HEAD, patient


def served(story: Callable[[socket.socket, asyncio.Event], Awaitable[None]], seconds: float) -> Counter[str]:
    """What was dropped while ``story`` has a connection to a server whose answers wait for its event."""

    async def scene() -> Counter[str]:
        dropped: Counter[str] = Counter()
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/late":
                await go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        config = uvicorn.Config(app, http=patient(seconds, dropped), lifespan="off", log_level="warning")
        server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0))
        task = asyncio.create_task(server.serve(sockets=[listening]))
        sock = socket.socket()
        sock.setblocking(False)
        async with asyncio.timeout(60):
            await asyncio.get_running_loop().sock_connect(sock, listening.getsockname())
            try:
                await story(sock, go)
            finally:
                sock.close()
                server.should_exit = True
                await task
        return dropped

    return asyncio.run(scene())


def test_a_head_that_grows_without_end_loses_its_connection() -> None:
    async def story(sock: socket.socket, go: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nhost: x\r\n")
            while True:
                await loop.sock_sendall(sock, b"x-one: " + b"y" * (MOST_HEAD // 4) + b"\r\n")
        except ConnectionError:
            pass  # closed, with what was on its way

    assert served(story, 60.0) == {"head_too_large": 1}


def test_the_time_of_a_head_does_not_run_inside_an_answer() -> None:
    async def story(sock: socket.socket, go: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET /late HTTP/1.1\r\nhost: x\r\n\r\n")
        said = b""
        while b"\r\n\r\nok" not in said:
            said += await loop.sock_recv(sock, 4096)
        loop.call_later(0.5, go.set)  # well after the limit, which began with the end of the first answer
        while said.count(b"\r\n\r\nok") < 2:
            data = await loop.sock_recv(sock, 4096)
            assert data, "closed inside the second answer"
            said += data

    assert served(story, 0.1)["head_too_slow"] <= 1, "only once it has nothing more to answer"
