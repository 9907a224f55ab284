"""Many streams, slow readers, many deaths, seen by a client that shares no code with the router: not one token lost or
doubled, and memory is bounded."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killing import Killer
from tests.support.raw_http import Told, ask, problem, stream_body
from tests.support.router_host import RouterHost

STREAMS, LENGTH, SLOW = 1000, 12, 20
SHORT, SHORT_LENGTH, AT_ONCE, KILL_EVERY = 800, 4, 64, 100  # requests; the last: requests between two kills
MEMORY = 512 << 10  # bytes of the router for one live stream, measured far below


@pytest.fixture(scope="module")
def host() -> Iterator[RouterHost]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        one = RouterHost.start(Path(root), ["s0", "s1"], "journal_every = 8\nrequest_deadline_s = 300.0")
        try:
            yield one
        finally:
            one.stop()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def memory(host: RouterHost) -> int:
    status = Path(f"/proc/{host.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


def prompt_of(number: int) -> int:
    return 1 + number % 17


def test_a_thousand_streams_at_once_and_readers_that_do_not_read(host: RouterHost) -> None:
    """The slow ones have an answer that no buffer holds; they begin to read when all others have ended."""
    fakes = [host.worker("s0", "--hold-at", "2"), host.worker("s1", "--hold-at", "2")]
    before = memory(host)

    async def scene() -> tuple[list[Told], list[Told], int]:
        read = asyncio.Event()
        many = [asyncio.create_task(ask(host.port, stream_body(prompt_of(i), LENGTH))) for i in range(STREAMS)]
        slow = [asyncio.create_task(ask(host.port, stream_body(3, 1500), read_when=read)) for _ in range(SLOW)]
        while sum([await asyncio.to_thread(fake.running) for fake in fakes]) < STREAMS + SLOW:
            ended, _ = await asyncio.wait([*many, *slow], timeout=0.2)
            assert not ended, f"before its worker was released: {[task.exception() or task.result() for task in ended]}"
        grown = await asyncio.to_thread(memory, host) - before
        for fake in fakes:
            fake.release()
        quick = await asyncio.gather(*many)
        assert not any(task.done() for task in slow)
        read.set()
        return quick, await asyncio.gather(*slow), grown

    quick, slow, grown = asyncio.run(scene())
    assert [wrong for i, told in enumerate(quick) if (wrong := problem(told, host.record, prompt_of(i), LENGTH))] == []
    assert [wrong for told in slow if (wrong := problem(told, host.record, 3, 1500))] == []
    assert grown / STREAMS < MEMORY
    print(f"\n{STREAMS} streams: {grown / STREAMS / 1024:.0f} KiB each")
    host.clear()


def test_many_short_requests_and_a_death_every_so_many(host: RouterHost) -> None:
    """Also the worker's side of the wire, which it decodes with the msgpack package: each request was given once, or
    again with its tokens."""
    before = host.status()
    killer = Killer(host, ["s0", "s1"], "--step-ms", "40")
    ended = due_for = 0
    progress = asyncio.Event()
    # A kill takes as long as the start of a process: the requests do not come to their end before the kills do.
    room = asyncio.Semaphore(2 * KILL_EVERY)

    async def one(number: int, gate: asyncio.Semaphore) -> str:
        nonlocal ended
        await room.acquire()
        async with gate:
            told = await ask(host.port, stream_body(prompt_of(number), SHORT_LENGTH))
        ended += 1
        if ended % KILL_EVERY == 0:
            progress.set()
        return problem(told, host.record, prompt_of(number), SHORT_LENGTH)

    async def due() -> bool:
        nonlocal due_for
        for _ in range((killer.kills - due_for) * KILL_EVERY):
            room.release()
        due_for = killer.kills
        await progress.wait()
        progress.clear()
        return ended < SHORT

    async def scene() -> list[str]:
        gate = asyncio.Semaphore(AT_ONCE)
        killing = asyncio.create_task(killer.run(due))
        wrong = await asyncio.gather(*(one(number, gate) for number in range(SHORT)))
        progress.set()
        await killing
        return [said for said in wrong if said]

    assert asyncio.run(scene()) == []
    assert killer.kills >= 4
    after = host.status()
    assert after.resumed_total > before.resumed_total, "deaths hit somebody"
    assert after.tokens_total - before.tokens_total == SHORT * SHORT_LENGTH
    assert after.finished_total - before.finished_total == SHORT
    assert after.failed_total == before.failed_total
    given = [row.split() for row in host.told() if row.startswith("add ")]
    assert all(0 <= int(tokens) < SHORT_LENGTH for _, _, tokens in given[-SHORT:])
