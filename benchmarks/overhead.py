"""What protection costs while nothing fails: tokens per second through Belayer over the bare engine loop (R8).

    python -m benchmarks.overhead [--quick] [--json FILE] [--plot FILE]

The same work at concurrency 1, 8 and 32, interleaved in each round: the bare loop (benchmarks.bare), and the same on
matrices that can be shared ("unpacked": what sharing costs on this CPU is apart from what Belayer costs); through
router, worker, heartbeat and with an idle shadow; the same without the shadow (belayerd and the shadow are killed for
it, and started again). Streams are read over HTTP by a client in a process of its own, as a framework would. All of it
shares the cores of one machine: with two, at high concurrency router and client compete with the engine, which on a GPU
host they would not; the row without a shadow tells the shadow's own share apart. Every answer is counted to its last
token.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from belayer import procs
from belayer.clock import monotonic
from belayer.errors import BelayerError
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from benchmarks.bare import Bare, prompt
from benchmarks.report import Report, parser

MODEL = Path(__file__).parents[1] / ".cache/models/SmolLM2-135M-Instruct"
CONCURRENCY = (1, 8, 32)
TOKENS = {1: 128, 8: 64, 32: 24}  # of each stream, by concurrency: some seconds each
KINDS = ("bare", "unpacked", "with", "without")
EXTRA = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"


def tokens_of(url: str, number: int, tokens: int) -> int:
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
    made = 0
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                made += sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices", ()))
    return made


def client(url: str, concurrency: int, tokens: int, first: int) -> None:
    """The client's process: prints tokens per second from the first request to the last [DONE]."""
    with ThreadPoolExecutor(concurrency) as pool:
        began = monotonic()
        made = sum(pool.map(lambda number: tokens_of(url, number, tokens), range(first, first + concurrency)))
        seconds = monotonic() - began
    if made != concurrency * tokens:
        raise BelayerError(f"{made} tokens instead of {concurrency * tokens}")
    print(made / seconds)


class Served:
    """Rates over HTTP; prompts are never repeated, so nothing comes from a prefix cache."""

    def __init__(self, host: LocalHost, url: str) -> None:
        self._host, self._url, self._used = host, url, 1000

    def rate(self, concurrency: int, tokens: int) -> float:
        command = [sys.executable, "-m", "benchmarks.overhead", "--client", self._url, str(concurrency), str(tokens)]
        done = subprocess.run([*command, str(self._used)], check=True, capture_output=True, text=True)
        self._used += concurrency
        return float(done.stdout)

    def lose_the_shadow(self) -> None:
        """belayerd first, so that nobody makes another one."""
        shadow = next(w for w in self._host.status().slots[0].workers if w.role == "shadow")
        self._host.kill9("belayerd")
        pidfd = os.pidfd_open(shadow.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        alive = procs.wait_dead([pidfd], 10.0)
        os.close(pidfd)
        if alive:
            raise BelayerError("the shadow did not die")

    def get_it_back(self) -> None:
        self._host.spawn("belayerd")
        self._host.until_protected()


def measure(rounds: int, length: dict[int, int]) -> dict[str, dict[int, list[float]]]:
    """kind -> concurrency -> tokens per second of each round."""
    out: dict[str, dict[int, list[float]]] = {kind: {c: [] for c in CONCURRENCY} for kind in KINDS}
    root = Path(tempfile.mkdtemp(prefix="belayer-bench-"))
    try:
        with (
            LocalHost(root, demo_config(MODEL, free_port(), slots=1, extra=EXTRA)) as host,
            Bare(MODEL) as bare,
            Bare(MODEL, packed=False) as unpacked,
        ):
            host.start(ROLLOUT)
            served = Served(host, host.until_protected().router_url)
            served.rate(1, 8)
            kinds: list[tuple[str, Bare | Served]] = [("bare", bare), ("unpacked", unpacked), ("with", served)]
            for turn in range(rounds):
                for concurrency in CONCURRENCY:
                    # By turns first and second, so that a machine that warms up or slows down favours none.
                    for kind, way in kinds if turn % 2 else reversed(kinds):
                        rate = way.rate(concurrency, length[concurrency])
                        out[kind][concurrency].append(rate)
                        print(f"round {turn + 1} {kind} {concurrency}: {rate:.1f} tokens/s", file=sys.stderr)
                served.lose_the_shadow()
                for concurrency in CONCURRENCY:
                    rate = served.rate(concurrency, length[concurrency])
                    out["without"][concurrency].append(rate)
                    print(f"round {turn + 1} without {concurrency}: {rate:.1f} tokens/s", file=sys.stderr)
                served.get_it_back()
    finally:
        shutil.rmtree(root)
    return out


def main() -> int:
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2], *map(int, sys.argv[3:6]))
        return 0
    arguments = parser(__doc__ or "").parse_args()
    found = measure(1, dict.fromkeys(CONCURRENCY, 8)) if arguments.quick else measure(4, TOKENS)
    report = Report("overhead")
    for concurrency in CONCURRENCY:
        bare, unpacked, shadowed, alone = (found[kind][concurrency] for kind in KINDS)
        ratios = [one / other for one, other in zip(shadowed, bare, strict=True)]
        report.add(f"throughput_ratio {concurrency}", "", ratios, 1.0, "with shadow / bare loop, by round")
        ratios = [one / other for one, other in zip(shadowed, unpacked, strict=True)]
        report.add(f"throughput_ratio_unpacked {concurrency}", "", ratios, 1.0, "with shadow / bare loop, unpacked")
        ratios = [one / other for one, other in zip(shadowed, alone, strict=True)]
        report.add(f"shadow_ratio {concurrency}", "", ratios, 1.0, "with shadow / without, by round")
        named = (("bare loop", bare), ("bare unpacked", unpacked), ("with shadow", shadowed), ("without", alone))
        for kind, values in named:
            report.add(f"tokens/s {kind} {concurrency}", "1/s", values)
    report.write(arguments)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BelayerError as why:
        print(f"overhead: {why}", file=sys.stderr)
        sys.exit(1)
