"""Kill and stop a main worker in mid-generation: how long until its client sees the next token?

Each repetition streams one seeded request with about 400 tokens of context, breaks the main worker after some tokens,
and reads on to the end. The clock starts when the signal is sent and ends at the first token that the new main made,
as the client reads it over HTTP. A repetition counts only if its tokens equal those of the unfailed run.

Two models: SmolLM2-135M, where re-reading the context dominates, and a tiny random one, where the mechanism does; the
former also with ``kv_reuse``, where the new main finds the context in the arena.
Baselines of the same run: a cold restart of the leanest engine and of vLLM's own server, from exec to first token.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from belayer.clock import Stopwatch, monotonic
from belayer.errors import BelayerError
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.common import FaultProof
from belayer.messages.control import Incident, IncidentList, InjectWorkerFault, ListIncidents
from belayer.rpc import call_sync
from benchmarks.cold import engine_seconds, server_seconds
from benchmarks.report import Report, parser
from benchmarks.tiny import make as make_tiny

MODEL = Path(__file__).parents[1] / ".cache/models/SmolLM2-135M-Instruct"
HANG_LIMIT_S = 1.0
# Each repetition is a failure soon after a handover; the benchmark must not end in a quarantine.
EXTRA = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"


@dataclass
class Stream:
    """Token ids and the moment at which each chunk of them was read."""

    tokens: list[int]
    at: list[float]


def stream(url: str, prompt: list[int], count: int, on_token: int = 0, fire: threading.Event | None = None) -> Stream:
    """One seeded completion; sets ``fire`` when ``on_token`` tokens have been read."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0.9,
        "seed": 11,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    out = Stream([], [])
    with urllib.request.urlopen(request, timeout=300) as reply:
        for raw in reply:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise BelayerError(f"the stream ended in an error: {chunk['error']}")
            for choice in chunk["choices"]:
                fresh = choice.get("token_ids") or []
                if fresh:
                    out.tokens += fresh
                    out.at.append(monotonic())
            if fire is not None and len(out.tokens) >= on_token:
                fire.set()
    return out


def pause(seen: Stream, at: float) -> float:
    """Seconds from the fault to the first token of the new main: the end of the longest gap after the fault."""
    pairs = [(b - a, b) for a, b in zip(seen.at, seen.at[1:], strict=False) if b > at]
    return max(pairs)[1] - at


class Bench:
    def __init__(self, host: LocalHost, url: str, context: int, output: int) -> None:
        self._host, self._url = host, url
        self._prompt = [2000 + (i * 7919) % 20000 for i in range(context - output // 2)]
        self._output, self._cut = output, output // 2
        self._reference = self._calm()

    def _calm(self) -> list[int]:
        first = stream(self._url, self._prompt, self._output).tokens
        if stream(self._url, self._prompt, self._output).tokens != first or len(first) != self._output:
            raise BelayerError("two unfailed runs differ: nothing can be compared with them")
        return first

    def once(self, kind: str) -> tuple[float, Incident, float]:
        """(seconds to the next token, the incident, re-arm milliseconds)."""
        fire, sent = threading.Event(), []

        def inject() -> None:
            fire.wait()
            sent.append(monotonic())
            message = InjectWorkerFault(slot="slot0", kind=kind)
            sent.append(call_sync(self._host.paths.belayerd_sock, message, FaultProof, 30.0))

        thread = threading.Thread(target=inject)
        thread.start()
        seen = stream(self._url, self._prompt, self._output, self._cut, fire)
        thread.join()
        if seen.tokens != self._reference:
            raise BelayerError(f"tokens differ from the unfailed run after {kind}: {seen.tokens} {self._reference}")
        status = self._host.until_protected(120.0)
        rows = call_sync(self._host.paths.belayerd_sock, ListIncidents(limit=1), IncidentList, 10.0).incidents
        return pause(seen, sent[0]), rows[0], status.slots[0].rearm_ms


@dataclass
class Figures:
    """Of one model: seconds to the next token by kind, re-arm seconds, milliseconds of each step after a kill."""

    kill: list[float]
    stop: list[float]
    rearm: list[float]
    steps: dict[str, list[float]]


def measure(model: Path, times: int, slot: str = "") -> Figures:
    root = Path(tempfile.mkdtemp(prefix="belayer-bench-"))
    config = demo_config(model, free_port(), slots=1, extra_slot=f"hang_limit_s = {HANG_LIMIT_S}\n{slot}", extra=EXTRA)
    out = Figures([], [], [], {})
    with LocalHost(root, config) as host:
        host.start(ROLLOUT)
        bench = Bench(host, host.until_protected().router_url, context=400, output=60)
        for kind, into in (("kill", out.kill), ("stop", out.stop)):
            for turn in range(times):
                watch = Stopwatch()
                seconds, incident, rearm_ms = bench.once(kind)
                into.append(seconds)
                out.rearm.append(rearm_ms / 1e3)
                if kind == "kill":
                    for step in incident.steps:
                        out.steps.setdefault(step.step, []).append(step.ms)
                    out.steps.setdefault("all steps", []).append(incident.total_ms)
                print(
                    f"{model.name} {kind} {turn + 1}/{times}: {seconds:.3f} s (turn {watch.ms() / 1e3:.0f} s)",
                    file=sys.stderr,
                )
    shutil.rmtree(root)
    return out


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    times = 2 if arguments.quick else 12
    tiny = make_tiny(MODEL.parent / "tiny-qwen3", MODEL)
    report = Report("handover")
    runs = ((MODEL, "", ""), (MODEL, "_reuse", "kv_reuse = true"), (tiny, "_tiny", ""))
    for model, suffix, slot in runs:
        figures = measure(model, times, slot)
        colds = [engine_seconds(model) for _ in range(1 if arguments.quick else 3)]
        servers = [server_seconds(model) for _ in range(1 if arguments.quick else 2)]
        server, engine = min(servers), min(colds)
        report.add(f"kill_to_token{suffix}", "s", figures.kill, server, "baseline: best cold_restart_vllm_server")
        report.add(f"kill_to_token{suffix}_vs_engine", "s", figures.kill, engine, "baseline: best cold_restart_engine")
        report.add(f"stop_to_token{suffix}", "s", figures.stop, server, f"hang limit {HANG_LIMIT_S:g} s included")
        report.add(f"rearm{suffix}", "s", figures.rearm, None, "new main serves -> new shadow ready")
        report.add(f"cold_restart_engine{suffix}", "s", colds)
        report.add(f"cold_restart_vllm_server{suffix}", "s", servers)
        for name, values in figures.steps.items():
            report.add(f"step{suffix}: {name}", "ms", [max(value, 1e-3) for value in values])
    report.write(arguments)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BelayerError as why:
        print(f"handover: {why}", file=sys.stderr)
        sys.exit(1)
