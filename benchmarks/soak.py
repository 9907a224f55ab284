"""A soak of mixed load: does the supervisor ever see a fault that nobody injected, and does it see every one that was?

    python -m benchmarks.soak [--quick] [--json FILE] [--plot FILE]

Quiet scenes are everything legal that looks like a fault: a burst of 1280 requests, a first-shape stall of 10 s inside
an announced phase, prefills of the longest context, weight updates under load, a trainer's pause, idle time, CPU hogs
beside starved workers, a host that stood still and came back watcher first. Between them real faults are injected, the
same stall without its announcement first of all. Exit status 1 when there was one false alarm, one fault that was not
found, or one answer that is not whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer import procs
from belayer.errors import BelayerError
from benchmarks import tiny
from benchmarks.report import Report, parser
from benchmarks.soak_host import CONTEXT, HANG_LIMIT_S, Ledger, Scene, SoakHost, dumps, hogs, rest, slot_of, until
from gpuowner.publish import publishing
from tests.support.raw_http import Told, ask, stream_body

CACHE = Path(__file__).parents[1] / ".cache/models"
SMOL = CACHE / "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Size:
    burst: int
    stall_s: float
    prefills: int
    updates: int
    idle_s: float
    hogs_s: float
    still_s: float
    faults: int
    tokens: int  # of one answer that a scene happens in
    hang_s: float  # limit of each slot
    nice: int  # of the hogs, where that is allowed

    @property
    def stuck_s(self) -> float:
        """Longer than a loop may go round with requests and without a step."""
        return 5 * self.hang_s + 1.0


FULL = Size(
    1280,
    10.0,
    prefills=6,
    updates=6,
    idle_s=60.0,
    hogs_s=60.0,
    still_s=10.0,
    faults=3,
    tokens=300,
    hang_s=HANG_LIMIT_S,
    nice=-5,
)
# Of the faults only the controls: a stall that nobody announced, and a loop that nobody paused. As a test it runs
# beside others: a scene must last until a crowded machine has looked at it, a SIGCONT of ours may come late, and hogs
# of a higher priority would starve them all.
QUICK = Size(
    160, 5.0, prefills=1, updates=1, idle_s=0.5, hogs_s=2.0, still_s=4.0, faults=1, tokens=200, hang_s=1.5, nice=0
)


class Load:
    """Streams over HTTP in a thread of its own; ``end`` says what is wrong with the answers."""

    def __init__(self, port: int, bodies: list[dict[str, Any]]) -> None:
        self._port, self._bodies = port, bodies
        self._told: list[Told | BaseException] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        asked = (asyncio.wait_for(ask(self._port, body), 300) for body in self._bodies)
        self._told += await asyncio.gather(*asked, return_exceptions=True)

    def end(self, scene: Scene) -> None:
        self._thread.join()
        scene.requests += len(self._bodies)
        for body, told in zip(self._bodies, self._told, strict=True):
            if isinstance(told, BaseException):
                scene.wrong.append(repr(told))
            elif (len(told.tokens), told.done, told.errors) != (body["max_tokens"], 1, []):
                scene.wrong.append(f"{len(told.tokens)} of {body['max_tokens']} tokens, {told.errors}")


def bodies(count: int, tokens: int, prompt: int = 16) -> list[dict[str, Any]]:
    """Prompts that share nothing."""
    first = iter(range(1000, 1000 + count))
    return [{**stream_body(0, tokens), "prompt": [next(first), *range(200, 199 + prompt)]} for _ in range(count)]


class Soak:
    def __init__(self, host: SoakHost, size: Size, other: Path, model: Path) -> None:
        self._host, self._size, self._folders = host, size, (other, model)
        self.ledger = Ledger(host)

    def run(self) -> None:
        quiet: dict[str, Callable[[Scene], None]] = {
            "burst": self.burst,
            "announced stall": self.announced,
            "longest prefill": self.prefill,
            "weight update": self.update,
            "trainer's pause": self.pause,
            "idle": lambda scene: rest(self._size.idle_s),
            "CPU hogs": self.starved,
            "host stands still": self.still,
        }
        faults: dict[str, Callable[[Scene], None]] = {
            "stall, not announced": lambda scene: self.stall(scene, f"stall {self._size.stall_s:g}", "hang"),
            "spin, not announced": lambda scene: self.stall(scene, f"spin {self._size.stall_s:g}", "hang"),
            "loops without a step": lambda scene: self.stall(scene, "stuck", "stuck"),
            "main stopped, idle": lambda scene: self.signalled(scene, signal.SIGSTOP, "hang"),
            "main killed, busy": self.killed,
        }
        if self._size is QUICK:
            faults = {name: faults[name] for name in ("stall, not announced", "loops without a step")}
        for name, scene in quiet.items():
            self.ledger.play(name, scene)
        for turn in range(self._size.faults):
            for name, scene in faults.items():
                self.ledger.play(f"fault: {name} {turn + 1}", scene)
        self.ledger.play("burst, afterwards", self.burst)

    # --- quiet ---

    def load(self, count: int, tokens: int, prompt: int = 16) -> Load:
        return Load(self._host.port, bodies(count, tokens, prompt))

    def burst(self, scene: Scene) -> None:
        self.load(self._size.burst, 4).end(scene)

    def announced(self, scene: Scene) -> None:
        load = self.load(8, self._size.tokens)
        with self._host.stalled(f"phase {self._size.stall_s:g}"):
            load.end(scene)

    def prefill(self, scene: Scene) -> None:
        self.load(self._size.prefills, 4, CONTEXT - 8).end(scene)

    def update(self, scene: Scene) -> None:
        load = self.load(4, self._size.tokens)
        for turn in range(self._size.updates):
            with publishing(self._host.paths, "smollm2") as update:
                update.write_folder(self._folders[turn % 2])
        load.end(scene)

    def pause(self, scene: Scene) -> None:
        """Kept requests stand still for as long as a trainer likes."""
        load = self.load(4, self._size.tokens)
        until("a step", lambda: self._busy() > 0, 120.0)
        self._host.post("/pause?mode=keep")
        rest(self._size.stuck_s)
        self._host.post("/resume")
        load.end(scene)

    def starved(self, scene: Scene) -> None:
        """Twice as many hogs as cores, of higher priority where that is allowed: also the watcher starves."""
        with hogs(2 * (os.cpu_count() or 1), self._size.nice if os.geteuid() == 0 else 0):
            load = self.load(16, 32)
            rest(self._size.hogs_s)
            load.end(scene)

    def still(self, scene: Scene) -> None:
        """A hypervisor or a debugger stops everything; what runs again first is the watcher."""
        load = self.load(4, self._size.tokens)
        until("a step", lambda: self._busy() > 0, 120.0)
        workers = [w.pid for slot in self._host.status().slots for w in slot.workers]
        watcher = self._host.pid("belayerd")
        for pid in (watcher, *workers):
            os.kill(pid, signal.SIGSTOP)
            until("a stop", lambda pid=pid: procs.state(pid) == "T", 60.0)  # type: ignore[misc]
        rest(self._size.still_s)
        os.kill(watcher, signal.SIGCONT)
        rest(0.2 * self._size.hang_s)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):  # a false alarm killed it: the ledger will say so
                os.kill(pid, signal.SIGCONT)
        load.end(scene)

    def _busy(self) -> int:
        return sum(w.running for slot in self._host.status().slots for w in slot.workers)

    # --- faults ---

    def stall(self, scene: Scene, words: str, cause: str) -> None:
        load = self.load(8, self._size.tokens)
        with self._host.stalled(words):
            name = self._host.flag.with_suffix(".begun").read_text()
            scene.expected.append((name, cause))
            generation = self._generation(name)
            until(f"a handover of {name}", lambda: self._generation(name) > generation, 120.0)
        load.end(scene)

    def signalled(self, scene: Scene, number: signal.Signals, cause: str) -> None:
        pid, generation = self._host.pid("slot0"), self._generation("slot0")
        os.kill(pid, number)
        until("the fault", lambda: procs.state(pid) in ("T", "Z", ""), 60.0)
        scene.expected.append(("slot0", cause))
        until("a handover", lambda: self._generation("slot0") > generation, 120.0)

    def killed(self, scene: Scene) -> None:
        load = self.load(8, self._size.tokens)
        until("a step", lambda: self._busy() > 0, 120.0)
        self.signalled(scene, signal.SIGKILL, "death")
        load.end(scene)

    def _generation(self, name: str) -> int:
        return next(row.generation for row in self._host.status().slots if row.slot == name)


def report(ledger: Ledger) -> Report:
    out, scenes = Report("soak"), ledger.scenes
    for scene in scenes:
        said = f"{scene.requests} requests, {scene.found} of {len(scene.expected)} faults found"
        out.add(scene.name, "s", [scene.seconds], note="; ".join([said, *scene.false, *scene.wrong[:3]]))
    out.add("false_alarms", "", [sum(len(scene.false) for scene in scenes)])
    out.add("faults_injected", "", [sum(len(scene.expected) for scene in scenes)])
    out.add("faults_missed", "", [sum(len(scene.expected) - scene.found for scene in scenes)])
    out.add("answers_wrong", "", [sum(len(scene.wrong) for scene in scenes)])
    out.extra["scenes"] = dumps(scenes)
    return out


def main(argv: list[str] | None = None) -> int:
    arguments = parser(__doc__ or "").parse_args(argv)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    one, two = (tiny.make(CACHE / f"belayer-tiny{suffix}", SMOL, seed) for suffix, seed in (("", 0), ("-two", 1)))
    root, size = Path(tempfile.mkdtemp(prefix="belayer-soak-")), QUICK if arguments.quick else FULL
    with SoakHost(root, one, slot=slot_of(size.hang_s)) as host:
        host.up()
        soak = Soak(host, size, two, one)
        soak.run()
    shutil.rmtree(root)
    report(soak.ledger).write(arguments)
    good = all(not s.false and not s.wrong and s.found == len(s.expected) for s in soak.ledger.scenes)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BelayerError as why:
        print(f"soak: {why}", file=sys.stderr)
        sys.exit(1)
