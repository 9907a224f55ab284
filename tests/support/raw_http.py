"""An HTTP and SSE client that shares nothing with the router: bytes in, bytes out, its own parser."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import Any

from belayer.clock import monotonic


@dataclass
class Told:
    """What came of one streamed request. ``times``: when each chunk with tokens came, seconds."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    done: int = 0
    usages: int = 0
    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    asked: float = 0.0


def stream_body(prompt: int, count: int) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": [5] * prompt,
        "max_tokens": count,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": True,
        "temperature": 0,
    }


def expected(record: list[int], prompt: int, count: int) -> list[int]:
    """What the recorded engine says (tests/support/fake_worker.py)."""
    return [record[(prompt + i) % len(record)] for i in range(count)]


async def ask(port: int, body: dict[str, Any], headers: str = "", read_when: asyncio.Event | None = None) -> Told:
    """One request on a connection of its own. ``read_when``: not one byte of the answer is read before it is set."""
    sock = socket.socket()
    sock.setblocking(False)
    if read_when is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # a reader whose own buffer helps it little
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 16)
    told = Told(asked=monotonic())
    try:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        if read_when is not None:
            await read_when.wait()
        told.status = int((await reader.readline()).split()[1])
        while (await reader.readline()) != b"\r\n":
            pass
        pending = b""
        while size := int(await reader.readline(), 16):
            pending += await reader.readexactly(size)
            await reader.readexactly(2)
            *events, pending = pending.split(b"\n\n")
            for event in events:
                take(told, event)
    finally:
        writer.close()
    return told


def take(told: Told, event: bytes) -> None:
    """One event: lines of ``field: value``, of which only ``data`` counts."""
    data = b"\n".join(line[6:] for line in event.split(b"\n") if line.startswith(b"data: "))
    if data == b"[DONE]":
        told.done += 1
        return
    chunk = json.loads(data)
    if "error" in chunk:
        told.errors.append(chunk["error"]["message"])
        return
    told.usages += bool(chunk.get("usage"))
    for choice in chunk["choices"]:
        told.tokens += choice.get("token_ids") or ()
        if choice.get("token_ids"):
            told.times.append(monotonic())
            told.sizes.append(len(choice["token_ids"]))
        if choice["finish_reason"]:
            told.finishes.append(choice["finish_reason"])


def problem(told: Told, record: list[int], prompt: int, count: int) -> str:
    """What is wrong with an answer, "" when it is exactly the unfailed one."""
    if told.tokens != expected(record, prompt, count):
        return f"{len(told.tokens)} tokens of {count}, or other ones; {told.errors}"
    ends = (told.status, told.finishes, told.usages, told.done, told.errors)
    return "" if ends == (200, ["length"], 1, 1, []) else f"ends {ends}"
