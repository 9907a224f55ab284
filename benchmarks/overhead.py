"""What protection costs while nothing fails (R8): tokens per second and CPU time through Belayer over the bare loop.

    python -m benchmarks.overhead [--quick] [--json FILE] [--plot FILE]

The same work at concurrency 1, 8 and 32, interleaved in each round. First on matrices as they are shared: the bare loop
(benchmarks.bare, "unpacked"), the same through router, worker, heartbeat and with an idle shadow ("with"), and without
the shadow ("without": belayerd and the shadow are killed for it, and started again). Then on packed matrices, as
vLLM's own engine has them: the bare loop ("bare") and Belayer with ``packed_weights`` ("packed"). Streams are read over
HTTP by a client in a process of its own, as a framework would; every answer is counted to its last token.

Two rates: ``throughput``, from the moment that every stream has its first token until the first one has its last, which
is what a long rollout sees; and ``whole``, from the first request to the last [DONE]. In the latter the bare loop has
all requests before its first step, while those over HTTP come one by one, so that some steps run with a part of them:
of streams as short as these that is some percent.

All of it shares the cores of one machine: with two, at high concurrency router and client compete with the engine,
which on a GPU host they would not. So beside each rate stands what noise moves less: ``engine_cpu``, milliseconds of
CPU per token of the process that computes, over that of the bare loop's; ``cpu_idle``, ``cpu_load`` and
``wakeups_idle`` of every process of Belayer, per second.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from belayer import procs
from belayer.clock import monotonic
from belayer.errors import BelayerError
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from benchmarks.bare import Bare, Rate, prompt
from benchmarks.cpu import Meter, Spent
from benchmarks.report import Report, parser

MODEL = Path(__file__).parents[1] / ".cache/models/SmolLM2-135M-Instruct"
CONCURRENCY = (1, 8, 32)
TOKENS = {1: 64, 8: 64, 32: 32}  # of each stream, by concurrency: some seconds each
QUICK = dict.fromkeys(CONCURRENCY, 8)
PAIRS = {"with": "unpacked", "packed": "bare"}  # through Belayer: the bare loop with the same arithmetic
IDLE_S = 10.0
EXTRA = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"


def times_of(url: str, number: int, tokens: int) -> list[float]:
    """When each token of a stream was read, monotonic seconds."""
    body = {
        "model": "smollm2",
        "prompt": prompt(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    read: list[float] = []
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                read += [monotonic()] * sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices", ()))
    return read


def steady(streams: list[list[float]]) -> float:
    """Tokens per second while all of them run: after the last stream's first token, up to the first one's last."""
    begin, end = max(stream[0] for stream in streams), min(stream[-1] for stream in streams)
    if end <= begin:
        raise BelayerError("the streams did not run side by side: more tokens are needed")
    return sum(begin < at <= end for stream in streams for at in stream) / (end - begin)


def client(url: str, concurrency: int, tokens: int, first: int) -> None:
    """The client's process: prints both rates, tokens per second."""
    with ThreadPoolExecutor(concurrency) as pool:
        began = monotonic()
        streams = list(pool.map(lambda number: times_of(url, number, tokens), range(first, first + concurrency)))
        seconds = monotonic() - began
    made = sum(map(len, streams))
    if made != concurrency * tokens:
        raise BelayerError(f"{made} tokens instead of {concurrency * tokens}")
    print(made / seconds, steady(streams))


@dataclass
class Found:
    """By kind and concurrency, a value for each round."""

    rate: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))  # tokens/s, steady
    whole: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))  # tokens/s
    engine: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))  # CPU ms per token
    idle: list[Spent] = field(default_factory=list)
    load: list[Spent] = field(default_factory=list)


class Served:
    """Rates over HTTP; prompts are never repeated, so nothing comes from a prefix cache."""

    def __init__(self, host: LocalHost) -> None:
        self._host, self._url, self._used = host, host.until_protected().router_url, 1000
        self._workers: dict[str, int] = {}

    def rate(self, concurrency: int, tokens: int) -> Rate:
        command = [sys.executable, "-m", "benchmarks.overhead", "--client", self._url, str(concurrency), str(tokens)]
        done = subprocess.run([*command, str(self._used)], check=False, capture_output=True, text=True)
        if done.returncode:
            raise BelayerError(f"the client said: {done.stderr.strip().splitlines()[-1:]}")
        self._used += concurrency
        return Rate(*map(float, done.stdout.split()))

    def pids(self) -> dict[str, int]:
        """Of every process of Belayer on this host, by role."""
        status = self._host.status()
        self._workers = {worker.role: worker.pid for worker in status.slots[0].workers}
        daemons = {name: self._host.pid(name) for name in ROLLOUT}
        return {**daemons, **self._workers, "zygote": int(status.zygote.removeprefix("pid "))}

    @property
    def pid(self) -> int:
        """Of the main, also while belayerd is down."""
        return self._workers["main"]

    def lose_the_shadow(self) -> None:
        """belayerd first, so that nobody makes another one."""
        shadow = self.pids()["shadow"]
        self._host.kill9("belayerd")
        pidfd = os.pidfd_open(shadow)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        alive = procs.wait_dead([pidfd], 10.0)
        os.close(pidfd)
        if alive:
            raise BelayerError("the shadow did not die")

    def get_it_back(self) -> None:
        self._host.spawn("belayerd")
        self._host.until_protected()


def take(found: Found, kind: str, way: Bare | Served, concurrency: int, tokens: int) -> None:
    meter = Meter(way.pids() if kind in PAIRS and isinstance(way, Served) else {"engine": way.pid})
    rate = way.rate(concurrency, tokens)
    spent = meter.spent()
    if kind in PAIRS:
        found.load.append(spent)
    per_token = spent.cpu_ms["main" if kind in PAIRS else "engine"] / (concurrency * tokens)
    found.rate[kind, concurrency].append(rate.steady)
    found.whole[kind, concurrency].append(rate.whole)
    found.engine[kind, concurrency].append(per_token)
    print(
        f"{kind} {concurrency}: {rate.steady:.1f} tokens/s, {rate.whole:.1f} in whole, {per_token:.2f} ms of CPU each",
        file=sys.stderr,
    )


@contextlib.contextmanager
def served(extra_slot: str) -> Iterator[Served]:
    root = Path(tempfile.mkdtemp(prefix="belayer-bench-"))
    try:
        with LocalHost(root, demo_config(MODEL, free_port(), slots=1, extra_slot=extra_slot, extra=EXTRA)) as host:
            host.start(ROLLOUT)
            yield Served(host)
    finally:
        shutil.rmtree(root)


def measure(rounds: int, length: dict[int, int], idle_s: float) -> Found:
    found = Found()
    for kind, base in PAIRS.items():
        packed = kind == "packed"
        with served("packed_weights = true" if packed else "") as way, Bare(MODEL, packed=packed) as bare:
            way.rate(1, 8)  # first use
            meter, pause = Meter(way.pids()), threading.Event()
            pause.wait(idle_s)
            found.idle.append(meter.spent())
            for turn in range(rounds):
                for concurrency, tokens in length.items():
                    # By turns first and second, so that a machine that warms up or slows down favours none.
                    pair: list[tuple[str, Bare | Served]] = [(base, bare), (kind, way)]
                    for name, one in pair if turn % 2 else reversed(pair):
                        take(found, name, one, concurrency, tokens)
                if kind == "with":
                    way.lose_the_shadow()
                    for concurrency, tokens in length.items():
                        take(found, "without", way, concurrency, tokens)
                    way.get_it_back()
    return found


def rows(report: Report, found: Found) -> None:
    for concurrency in CONCURRENCY:
        for kind, base, metric in (
            ("with", "unpacked", "throughput_ratio"),
            ("packed", "bare", "throughput_ratio_packed"),
            ("with", "without", "shadow_ratio"),
        ):
            mine, other = found.rate[kind, concurrency], found.rate[base, concurrency]
            ratios = [one / than for one, than in zip(mine, other, strict=True)]
            report.add(f"{metric} {concurrency}", "", ratios, 1.0, f"{kind} / {base}, by round")
            mine, other = found.whole[kind, concurrency], found.whole[base, concurrency]
            ratios = [one / than for one, than in zip(mine, other, strict=True)]
            report.add(f"whole_{metric} {concurrency}", "", ratios, 1.0, f"{kind} / {base}, ramps included")
            mine, other = found.engine[kind, concurrency], found.engine[base, concurrency]
            ratios = [than / one for one, than in zip(mine, other, strict=True)]
            report.add(f"{metric}_cpu {concurrency}", "", ratios, 1.0, f"CPU of the engine: {base} / {kind}, by round")
        for (kind, at), values in found.rate.items():
            if at == concurrency:
                report.add(f"tokens/s {kind} {concurrency}", "1/s", values)
                report.add(f"engine_cpu {kind} {concurrency}", "ms", found.engine[kind, at], note="per token")
    for name in found.idle[0].cpu_ms:
        report.add(f"cpu_idle {name}", "ms/s", [one.cpu_ms[name] / one.seconds for one in found.idle])
        report.add(f"wakeups_idle {name}", "1/s", [one.wakeups[name] / one.seconds for one in found.idle])
        loads = [one.cpu_ms[name] / one.seconds for one in found.load if name in one.cpu_ms]
        report.add(f"cpu_load {name}", "ms/s", loads, note="all concurrencies")


def main() -> int:
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2], *map(int, sys.argv[3:6]))
        return 0
    arguments = parser(__doc__ or "").parse_args()
    report = Report("overhead")
    rows(report, measure(1, QUICK, 3.0) if arguments.quick else measure(3, TOKENS, IDLE_S))
    report.write(arguments)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BelayerError as why:
        print(f"overhead: {why}", file=sys.stderr)
        sys.exit(1)
