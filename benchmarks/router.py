"""What the router costs and what it stands.

    python -m benchmarks.router [--quick] [--json FILE] [--plot FILE]

First a real engine, by way of Belayer, of vLLM's own server and of vllm-router (benchmarks.router_engines). Then
recorded engines, so that the router is what is measured:

``token_delay_cN``: from an engine's step to its token at the client, N streams in lockstep, median and p99 over all
tokens; baseline: the same step at a bare front that reads the worker's socket itself. ``added_latency_p50|p99_cN``:
their difference. ``vllm_router_added_p50|p99_cN``: what vllm-router adds when it stands before that router.
``tokens_per_second_cN``: as fast as they go. ``cpu_per_token_*``: the router process's CPU, by what the journal does.
``stream_memory``: growth of the router's resident memory for one live stream. ``short_requests``: with a worker killed
every 2 s, and every answer compared with the unfailed one. A row is said on stderr as it comes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from belayer.clock import monotonic
from benchmarks import router_engines, vllm_router
from benchmarks.report import Report, parser
from benchmarks.router_engines import Wrong, percentile
from tests.support.killing import Killer
from tests.support.raw_http import Told, ask, problem, stream_body
from tests.support.router_host import FakeWorker, RouterHost

PROMPT = 5
TOKENS_PER_S = 3000.0  # offered at most: below what one front carries, or the delay is that of a queue
STEP_MS = 20.0


@dataclass(frozen=True)
class Size:
    streams: tuple[int, ...]
    length: int
    memory_streams: int
    short: int
    kill_every_s: float
    rounds: int
    tokens: int
    policies: tuple[tuple[str, bool], ...]


FULL = Size(
    streams=(1, 8, 32, 256, 1000),
    length=64,
    memory_streams=1000,
    short=10_000,
    kill_every_s=2.0,
    rounds=3,
    tokens=128,
    policies=(("never", False), ("never", True), ("finish", True), ("always", True)),
)
QUICK = Size(
    streams=(1, 8),
    length=16,
    memory_streams=50,
    short=300,
    kill_every_s=0.5,
    rounds=1,
    tokens=16,
    policies=(("never", False), ("always", True)),
)


def main(argv: list[str] | None = None) -> int:
    arguments = parser("Cost and limits of the router.").parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    size, report = (QUICK if arguments.quick else FULL), Report("router", aloud=True)
    try:
        with tempfile.TemporaryDirectory(prefix="bl-") as folder:
            measure(Path(folder), size, report)
    except Wrong as why:
        print(f"wrong result: {why}", file=sys.stderr)
        return 1
    report.write(arguments)
    return 0


def measure(root: Path, size: Size, report: Report) -> None:
    router_engines.measure(report, size.rounds, size.tokens)
    stream_memory(root / "memory", report, size.memory_streams)
    for policy, named in size.policies:
        folder = root / f"{policy}-{named}"
        folder.mkdir()
        host = RouterHost.start(folder, ["s0", "s1"], f'journal_sync = "{policy}"\nrequest_deadline_s = 60.0')
        try:
            cpu_per_token(host, report, f"{policy}{'_named' if named else ''}", named, size)
            if policy == "never" and not named:
                for count in size.streams:
                    delays(host, report, count, size.length if count < 256 else size.length // 2)
                throughput(host, report, size)
                short_requests(host, report, size)
        finally:
            host.stop()
    several_fronts(root, size, report)


# -- delay of a token ------------------------------------------------------------------------------------------


def several_fronts(root: Path, size: Size, report: Report) -> None:
    """The same streams through two processes that answer on one port."""
    folder = root / "fronts"
    folder.mkdir()
    host = RouterHost.start(folder, ["s0", "s1"], "fronts = 2\nrequest_deadline_s = 60.0")
    try:
        for count in size.streams:
            delays(host, report, count, size.length, "_fronts2")
    finally:
        host.stop()


def delays(host: RouterHost, report: Report, count: int, length: int, kind: str = "") -> None:
    step = max(STEP_MS, count / TOKENS_PER_S * 1e3)
    bare = [delay * 1e3 for delay in asyncio.run(through(host, count, length, step, bare_front))]
    routed = [delay * 1e3 for delay in asyncio.run(through(host, count, length, step, http))]
    report.add(
        f"token_delay{kind}_c{count}", "ms", [percentile(routed, 50)], percentile(bare, 50), f"step {step:.0f} ms"
    )
    report.add(f"token_delay_p99{kind}_c{count}", "ms", [percentile(routed, 99)], percentile(bare, 99))
    for percent in (50, 99):
        added = percentile(routed, percent) - percentile(bare, percent)
        report.add(f"added_latency_p{percent}{kind}_c{count}", "ms", [added])
    if kind or not vllm_router.is_there():
        return
    beside = [delay * 1e3 for delay in asyncio.run(through(host, count, length, step, http_by_vllm_router))]
    for percent in (50, 99):
        added = percentile(beside, percent) - percentile(routed, percent)
        report.add(f"vllm_router_added_p{percent}_c{count}", "ms", [added], note="before our router")


async def through(host: RouterHost, count: int, length: int, step: float, way: Any) -> list[float]:
    """All streams begin held, step together once released; the delay of each token from its step on."""
    times = host.root / "times"
    times.unlink(missing_ok=True)
    args = ("--hold-at", "0", "--step-ms", str(step), "--times", str(times))
    fake = await asyncio.to_thread(lambda: host.worker("s0", *args, register=way is not bare_front))
    try:
        arrivals = await way(host, fake, count, length)
    finally:
        await asyncio.to_thread(host.clear)
    data = times.read_bytes()
    steps = struct.unpack(f"<{len(data) // 8}d", data)
    return [at - steps[position] for row in arrivals for position, at in row]


async def http(
    host: RouterHost, fake: FakeWorker, count: int, length: int, port: int = 0
) -> list[list[tuple[int, float]]]:
    """``port``: of something else before the router."""
    asked = [asyncio.create_task(ask(port or host.port, stream_body(PROMPT, length))) for _ in range(count)]
    await all_on_board(fake, count)
    fake.release()
    return [list(zip(ends(told), told.times, strict=True)) for told in await checked(host, asked, length)]


async def http_by_vllm_router(
    host: RouterHost, fake: FakeWorker, count: int, length: int
) -> list[list[tuple[int, float]]]:
    beside = await asyncio.to_thread(vllm_router.VllmRouter, host.url, host.root)
    try:
        return await http(host, fake, count, length, beside.port)
    finally:
        await asyncio.to_thread(beside.close)


def ends(told: Told) -> list[int]:
    """Position of the last token of each chunk."""
    out, at = [], 0
    for size in told.sizes:
        at += size
        out.append(at - 1)
    return out


async def checked(host: RouterHost, asked: list[asyncio.Task[Told]], length: int) -> list[Told]:
    answers = await asyncio.gather(*asked)
    for told in answers:
        if wrong := problem(told, host.record, PROMPT, length):
            raise Wrong(wrong)
    return answers


async def all_on_board(fake: FakeWorker, count: int) -> None:
    while await asyncio.to_thread(fake.running) < count:  # noqa: ASYNC110  another process is asked
        await asyncio.sleep(0.05)


async def bare_front(host: RouterHost, fake: FakeWorker, count: int, length: int) -> list[list[tuple[int, float]]]:
    """The worker's wire with the msgpack package and nothing else."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.IDENTITY, b"\0\0")
    socket.connect(fake.endpoint)
    for number in range(count):
        params = {"max_tokens": length}
        request = [str(number), [5] * PROMPT, None, params, None, 0.0, None, None, None]
        await socket.send_multipart([b"add", b"", msgpack.packb(request)])
    await all_on_board(fake, count)
    fake.release()
    arrivals: dict[str, list[tuple[int, float]]] = {str(number): [] for number in range(count)}
    left = count
    while left:
        frames = await socket.recv_multipart()
        now = monotonic()
        for output in msgpack.unpackb(frames[2])[1]:
            row = arrivals[output[0]]
            row.append((len(row), now))
            left -= output[5] is not None
    socket.close()
    context.term()
    return list(arrivals.values())


def throughput(host: RouterHost, report: Report, size: Size) -> None:
    """Recorded engines that wait for nobody: what one front carries, by how many share it."""
    host.worker("s0", "--step-ms", "1")
    for count in size.streams:
        length = max(16, min(1024, size.length * 128 // count))

        async def scene(count: int = count, length: int = length) -> None:
            rows = [asyncio.create_task(ask(host.port, stream_body(PROMPT, length))) for _ in range(count)]
            await checked(host, rows, length)

        rates = []
        for _ in range(3):
            start = monotonic()
            asyncio.run(scene())
            rates.append(count * length / (monotonic() - start))
        report.add(f"tokens_per_second_c{count}", "1/s", rates, note=f"{length} tokens each, recorded engine")
    host.clear()


# -- CPU, memory, deaths ---------------------------------------------------------------------------------------


def cpu_per_token(host: RouterHost, report: Report, label: str, named: bool, size: Size) -> None:
    """32 streams as fast as they go; the router's own CPU by the tokens that it delivered."""
    count, length = 32, size.length * 4

    async def scene(run: int) -> None:
        header = "X-Request-Id: bench-{}-{}\r\n" if named else ""
        rows = [ask(host.port, stream_body(PROMPT, length), header.format(run, i)) for i in range(count)]
        await checked(host, [asyncio.create_task(row) for row in rows], length)

    host.worker("s0", "--step-ms", "1")
    asyncio.run(scene(0))
    values, rates = [], []
    for run in range(1, 4):
        before, start = cpu(host), monotonic()
        asyncio.run(scene(run))
        values.append((cpu(host) - before) / (count * length) * 1e6)
        rates.append(count * length / (monotonic() - start))
    baseline = next((row.values[0] for row in report.rows if row.metric == "cpu_per_token_never"), None)
    report.add(f"cpu_per_token_{label}", "us", values, baseline, "32 streams")
    report.add(f"tokens_per_second_{label}", "1/s", rates)
    host.clear()


def cpu(host: RouterHost) -> float:
    """Seconds of user and system time of the router process."""
    fields = Path(f"/proc/{host.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def stream_memory(folder: Path, report: Report, count: int) -> None:
    """Of a router that has served nothing before: one that has keeps what it freed, and does not grow at all."""
    folder.mkdir()
    host = RouterHost.start(folder, ["s0", "s1"], 'journal_sync = "never"\nrequest_deadline_s = 60.0')
    try:
        _stream_memory(host, report, count)
    finally:
        host.stop()


def _stream_memory(host: RouterHost, report: Report, count: int) -> None:
    fake = host.worker("s0", "--hold-at", "2")

    async def scene() -> float:
        before = memory(host)
        asked = [asyncio.create_task(ask(host.port, stream_body(PROMPT, 8))) for _ in range(count)]
        await all_on_board(fake, count)
        grown = memory(host) - before
        fake.release()
        await checked(host, asked, 8)
        return grown / count / 1024

    report.add("stream_memory", "KiB", [asyncio.run(scene())], note=f"{count} live streams")
    host.clear()


def memory(host: RouterHost) -> int:
    status = Path(f"/proc/{host.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


def short_requests(host: RouterHost, report: Report, size: Size) -> None:
    length, killer = 4, Killer(host, ["s0", "s1"], "--step-ms", "20")

    async def one(number: int, gate: asyncio.Semaphore) -> str:
        async with gate:
            told = await ask(host.port, stream_body(1 + number % 17, length))
        return problem(told, host.record, 1 + number % 17, length)

    over = asyncio.Event()

    async def due() -> bool:
        await asyncio.wait([asyncio.ensure_future(over.wait())], timeout=size.kill_every_s)
        return not over.is_set()

    async def scene() -> list[str]:
        gate = asyncio.Semaphore(64)
        killing = asyncio.create_task(killer.run(due))
        wrong = await asyncio.gather(*(one(number, gate) for number in range(size.short)))
        over.set()
        await killing
        return [said for said in wrong if said]

    start, before = monotonic(), host.status().resumed_total
    wrong = asyncio.run(scene())
    if wrong:
        raise Wrong(f"{len(wrong)} of {size.short} short requests: {wrong[0]}")
    note = f"{killer.kills} kills, {host.status().resumed_total - before} requests went on, no token lost or doubled"
    report.add("short_requests", "1/s", [size.short / (monotonic() - start)], note=note)
    host.clear()


if __name__ == "__main__":
    raise SystemExit(main())
