"""One host for many handovers: a stream, a fault in its middle, and everything put right again before the next."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from belayer.clock import monotonic
from belayer.errors import BelayerError
from belayer.messages.common import FaultProof
from belayer.messages.control import Incident, IncidentList, InjectWorkerFault, ListIncidents
from belayer.rpc import call_sync
from benchmarks.soak_host import SoakHost

OUTPUT, CUT = 32, 12  # tokens of an answer, and those that were read when the main breaks


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


@dataclass
class Turns:
    """Of one kind of fault at one context. Seconds, but ``steps``: milliseconds by step. ``different``: answers that
    were not those of the unfailed run, which count in no figure."""

    seconds: list[float] = field(default_factory=list)
    rearm: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    different: int = 0

    def note(self, seconds: float, incident: Incident, rearm_ms: float) -> None:
        self.seconds.append(seconds)
        self.rearm.append(rearm_ms / 1e3)
        for step in incident.steps:
            self.steps.setdefault(step.step, []).append(step.ms)
        to_registered = sum(step.ms for step in incident.steps if not step.step.startswith("5"))
        self.steps.setdefault("1-4 all", []).append(to_registered)


class Bench:
    """``turn(kind)`` breaks the main of slot0 once; kinds: kill, stop (signals), stall (blocked in a step), stuck (its
    loop goes round and schedules nothing)."""

    def __init__(self, host: SoakHost, context: int) -> None:
        self._host, self._url = host, host.until_protected().router_url
        self._prompt = [2000 + (i * 7919) % 20000 for i in range(context - CUT)]
        self._reference = stream(self._url, self._prompt, OUTPUT).tokens
        if stream(self._url, self._prompt, OUTPUT).tokens != self._reference or len(self._reference) != OUTPUT:
            raise BelayerError("two unfailed runs differ: nothing can be compared with them")

    def turn(self, kind: str, into: Turns) -> None:
        fire, sent = threading.Event(), list[float]()

        def inject() -> None:
            fire.wait()
            sent.append(monotonic())
            self._faults(kind)()

        thread = threading.Thread(target=inject)
        thread.start()
        seen = stream(self._url, self._prompt, OUTPUT, CUT, fire)
        thread.join()
        status = self._host.until_protected(180.0)
        rows = call_sync(self._host.paths.belayerd_sock, ListIncidents(limit=1), IncidentList, 10.0).incidents
        if seen.tokens != self._reference:
            into.different += 1
        else:
            into.note(pause(seen, sent[0]), rows[0], status.slots[0].rearm_ms)

    def _faults(self, kind: str) -> Callable[[], None]:
        if kind in ("kill", "stop"):
            return lambda: self._signal(kind)
        return lambda: self._sabotage("stall 600" if kind == "stall" else "stuck")

    def _signal(self, kind: str) -> None:
        call_sync(self._host.paths.belayerd_sock, InjectWorkerFault(slot="slot0", kind=kind), FaultProof, 30.0)

    def _sabotage(self, words: str) -> None:
        with self._host.stalled(words):
            return


class Figures:
    """Of one model with or without reuse: ``turns`` by kind and context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turns: dict[tuple[str, int], Turns] = {}
        self.engines: list[float] = []
        self.servers: list[float] = []
