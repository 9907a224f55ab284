"""The same real engine by four ways: tokens per second, and what each way adds to the time between two tokens.

Part of ``benchmarks.router``. A tiny model, so that the way is most of what is seen; greedy; concurrency 1, 8, 32,
interleaved in each round:

- bare: the engine loop in one process, nothing around it (benchmarks.bare); unpacked: the same on matrices that can be
  shared, as a worker's are: what sharing costs on this CPU is the difference of these two, and not the router's;
- belayer: router, worker, heartbeat, idle shadow; belayer-packed: the same with ``packed_weights``, so with the
  arithmetic of the bare loop and of vLLM's server;
- vllm: vLLM's own server; vllm-router: the same server behind vllm-router.

``added_pP`` of a way is the P-th percentile of its gaps between two tokens of a stream, less that of the steps of the
bare loop with the same arithmetic (belayer: unpacked) in the same round. Clients are processes of their own, with their
own parser, on the same cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer.clock import monotonic
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from benchmarks import vllm_router
from benchmarks.bare import Bare, prompt
from benchmarks.cold import environment
from benchmarks.report import Report
from benchmarks.tiny import make as make_tiny
from tests.support.raw_http import Told, ask

MODEL = Path(__file__).parents[1] / ".cache/models/SmolLM2-135M-Instruct"
EXTRA = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"
CONCURRENCY = (1, 8, 32)
BARE = ("bare", "unpacked")


class Wrong(Exception):
    """An answer that is not the one it must be."""


@dataclass(frozen=True)
class Run:
    """``rate``: tokens per second of all streams; ``p50``, ``p99``: of the gaps between two tokens, ms."""

    rate: float
    p50: float
    p99: float
    tokens: tuple[int, ...] = field(default=(), compare=False)  # of the first stream


def body(number: int, tokens: int) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def gaps(told: Told) -> list[float]:
    """ms between tokens; a chunk of several counts as so many equal gaps."""
    out: list[float] = []
    for before, at, size in zip(told.times, told.times[1:], told.sizes[1:], strict=False):
        out += [(at - before) / size * 1e3] * size
    return out


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def client(port: int, concurrency: int, tokens: int, first: int) -> None:
    """The client's process: prints one JSON line."""

    async def scene() -> list[Told]:
        return list(await asyncio.gather(*(ask(port, body(first + i, tokens)) for i in range(concurrency))))

    began = monotonic()
    answers = asyncio.run(scene())
    seconds = monotonic() - began
    for told in answers:
        ends = (told.status, len(told.tokens), told.finishes, told.done, told.errors)
        if ends != (200, tokens, ["length"], 1, []):
            raise Wrong(f"{ends} instead of {tokens} tokens")
    apart = [gap for told in answers for gap in gaps(told)]
    print(json.dumps([concurrency * tokens / seconds, percentile(apart, 50), percentile(apart, 99), answers[0].tokens]))


def asked(port: int, concurrency: int, tokens: int, first: int) -> Run:
    command = [sys.executable, "-m", "benchmarks.router_engines", *map(str, (port, concurrency, tokens, first))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Wrong(done.stderr.strip().splitlines()[-1])
    rate, p50, p99, made = json.loads(done.stdout)
    return Run(rate, p50, p99, tuple(made))


class Server:
    """vLLM's own server as a process; ``wait`` until it answers."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [
            "--served-model-name",
            "smollm2",
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "2048",
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--block-size", "32", "--max-num-seqs", "64"]
        command += ["--max-model-len", "2048", "--max-num-batched-tokens", "2048", "--disable-uvicorn-access-log"]
        env = {key: value for key, value in environment(str(folder)).items() if key != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self._log = folder / "server.log"
        with self._log.open("wb") as out:
            self._child = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)

    def wait(self) -> None:
        asyncio.run(self._wait(300.0))

    async def _wait(self, within: float) -> None:
        async with asyncio.timeout(within):
            while not await asyncio.to_thread(self._answers):
                if self._child.poll() is not None:
                    raise RuntimeError(f"vLLM's server ended: {self._log.read_text(errors='replace')[-400:]}")
                await asyncio.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(30)


@contextlib.contextmanager
def ways() -> Iterator[dict[str, Any]]:
    """The port of each way, and the bare loop; all start at once."""
    tiny = make_tiny(MODEL.parent / "tiny-qwen3", MODEL)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bl-", ignore_cleanup_errors=True)))
        server = Server(tiny, folder)
        stack.callback(server.close)
        port = free_port()
        host = stack.enter_context(LocalHost(folder / "h", demo_config(tiny, port, slots=1, extra=EXTRA)))
        host.start(ROLLOUT)
        same = free_port()  # the arithmetic of vLLM's server
        config = demo_config(tiny, same, slots=1, extra_slot="packed_weights = true", extra=EXTRA)
        packing = stack.enter_context(LocalHost(folder / "p", config))
        packing.start(ROLLOUT)
        bare = stack.enter_context(Bare(tiny))
        unpacked = stack.enter_context(Bare(tiny, packed=False))
        host.until_protected()
        packing.until_protected()
        server.wait()
        found = {"bare": bare, "unpacked": unpacked, "belayer": port, "belayer-packed": same, "vllm": server.port}
        if vllm_router.is_there():
            found["vllm-router"] = stack.enter_context(
                vllm_router.VllmRouter(f"http://127.0.0.1:{server.port}", folder)
            ).port
        yield found


def measure(report: Report, rounds: int, tokens: int) -> None:
    """Adds the rows. Raises Wrong when an answer is short, or when two ways tell other tokens for the same prompt."""
    with ways() as found:
        for port in found.values():
            if isinstance(port, int):
                asked(port, 4, 8, 10_000)  # first use
        runs: dict[tuple[str, int], list[Run]] = {}
        for turn in range(rounds):
            order = list(found) if turn % 2 else list(reversed(found))
            for number, concurrency in enumerate(CONCURRENCY):
                first = 100 * (turn * len(CONCURRENCY) + number + 1)
                made = {way: one(found[way], concurrency, tokens, first) for way in order}
                for way, run in made.items():
                    runs.setdefault((way, concurrency), []).append(run)
                told = {run.tokens for run in made.values() if run.tokens}
                if concurrency == 1 and len(told) != 1:
                    raise Wrong("the ways tell other tokens for the same prompt")
    if "vllm-router" not in found:
        report.extra["not_measured"] = vllm_router.ABSENT
        print(vllm_router.ABSENT, file=sys.stderr)
    rows(report, runs, [way for way in found if way not in BARE])


def one(way: Bare | int, concurrency: int, tokens: int, first: int) -> Run:
    if isinstance(way, int):
        return asked(way, concurrency, tokens, first)
    rate = way.rate(concurrency, tokens).whole
    return Run(rate, percentile(way.steps_ms, 50), percentile(way.steps_ms, 99))


def rows(report: Report, runs: dict[tuple[str, int], list[Run]], names: list[str]) -> None:
    for concurrency in CONCURRENCY:
        for way in BARE:
            report.add(f"tokens/s {way} c{concurrency}", "1/s", [run.rate for run in runs[way, concurrency]])
            report.add(f"step_p50 {way} c{concurrency}", "ms", [run.p50 for run in runs[way, concurrency]])
        for way in names:
            base = "unpacked" if way == "belayer" else "bare"
            mine, bare = runs[way, concurrency], runs[base, concurrency]
            middle = statistics.median(run.rate for run in bare)
            report.add(f"tokens/s {way} c{concurrency}", "1/s", [run.rate for run in mine], middle, f"baseline: {base}")
            for name in ("p50", "p99"):
                added = [getattr(a, name) - getattr(b, name) for a, b in zip(mine, bare, strict=True)]
                report.add(f"added_{name} {way} c{concurrency}", "ms", added, note=f"between two tokens, over {base}")


if __name__ == "__main__":
    client(*map(int, sys.argv[1:5]))
