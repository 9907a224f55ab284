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


def served(
    story: Callable[[socket.socket, asyncio.Event], Awaitable[None]], seconds: float, unread_s: float = 60.0
) -> Counter[str]:
    """What was dropped while ``story`` has a connection to a server whose answers wait for its event; ``/long`` is
    longer than any buffer, and sets the event when it has ended."""

    async def scene() -> Counter[str]:
        dropped: Counter[str] = Counter()
        go = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/late":
                await go.wait()
            if scope["path"] == "/long":
                await long(send)
                go.set()
                return
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        config = uvicorn.Config(app, http=patient(seconds, dropped, unread_s), lifespan="off", log_level="warning")
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


PIECE, PIECES = 1 << 16, 256


async def long(send: Any) -> None:
    size = str(PIECE * PIECES).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
    for left in reversed(range(PIECES)):
        await send({"type": "http.response.body", "body": b"x" * PIECE, "more_body": left > 0})


async def ask_long(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")


def test_a_client_that_never_reads_loses_its_connection_and_what_runs_for_it() -> None:
    async def story(sock: socket.socket, go: asyncio.Event) -> None:
        await ask_long(sock)
        await go.wait()  # the application is told: it does not wait for this client for ever

    assert served(story, 60.0, 0.4) == {"answer_not_read": 1}


def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    """As long as there are several looks between two of its reads, and several bounds in all."""
    unread_s = 0.8

    async def story(sock: socket.socket, go: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await ask_long(sock)
        got = 0
        while got < PIECE * PIECES:
            due: asyncio.Future[None] = loop.create_future()
            slow = loop.time() < began + 3 * unread_s
            loop.call_later(unread_s / 8 if slow else 0.0, due.set_result, None)
            await due
            for _ in range(8):  # more than the step in which a kernel tells that there is room again
                data = await loop.sock_recv(sock, 1 << 16)
                assert data, "cut while it read"
                got += len(data)
                if got >= PIECE * PIECES or not slow:
                    break
        await go.wait()

    assert "answer_not_read" not in served(story, 60.0, unread_s)


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
