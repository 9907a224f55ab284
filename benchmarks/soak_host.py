"""The host under the soak, and the ledger of what its supervisor did to it.

A handover, a replaced shadow, a new zygote, a lost slot: each is either the answer to a fault that the soak injected,
or a false alarm. The ledger compares who plays which role before and after every scene, so that an alarm is seen also
when it left no incident (a shadow that is replaced).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from belayer.clock import Stopwatch, monotonic
from belayer.errors import BelayerError
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.control import Incident, IncidentList, ListIncidents
from belayer.rpc import call_sync
from tests.support.patience import patient

HANG_LIMIT_S = 0.5
CONTEXT = 4096
KV_BYTES = 256 << 20  # SmolLM2 needs 180 MiB for one request of that length
# The second fault of a scene comes soon after the first, and must not end in a quarantine.
EXTRA = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"


def slot_of(hang_limit_s: float) -> str:
    """Lines of each [[slot]]."""
    return f"hang_limit_s = {hang_limit_s}\nmax_num_batched_tokens = {CONTEXT}\n"


SLOT = slot_of(HANG_LIMIT_S)


class SoakHost(LocalHost):
    """``slots`` slots, and a zygote whose workers stall when the file ``sabotage`` says so."""

    def __init__(
        self, root: Path, model: Path, around_zygote: Sequence[str] = (), slots: int = 2, slot: str = SLOT
    ) -> None:
        """``around_zygote``: a command that ends by running the words that follow it; ``slot``: lines of each [[slot]]
        after those of ``demo_config``, whose length of a context is ``CONTEXT`` here."""
        config = demo_config(model, free_port(), slots=slots, extra_slot=slot, extra=EXTRA)
        config = config.replace("max_model_len = 2048", f"max_model_len = {CONTEXT}")
        super().__init__(root, patient(config.replace(f"kv_bytes = {128 << 20}", f"kv_bytes = {KV_BYTES}")))
        self.flag = self.paths.run / "sabotage"
        self.zygote: subprocess.Popen[bytes] | None = None
        self._around = list(around_zygote)

    def up(self) -> None:
        with self.paths.log("zygote").open("ab") as log:
            env = {**os.environ, "BELAYER_ROOT": str(self.root)}
            command = [*self._around, sys.executable, "-m", "tests.support.sabotage"]
            self.zygote = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        self.wait("zygote", self._listens, 900.0)
        self.start(ROLLOUT)
        self.until_protected()

    def _listens(self) -> bool | None:
        assert self.zygote is not None
        if self.zygote.poll() is not None:
            raise BelayerError(f"the zygote ended with {self.zygote.returncode}: {self.tail('zygote')}")
        return self.paths.zygote_sock.exists() or None

    def __exit__(self, *_: object) -> None:
        if self.zygote is not None:  # first, or it forks one more
            self.zygote.kill()
            self.zygote.wait()
        self.stop()

    @property
    def port(self) -> int:
        return int(self.status().router_url.rsplit(":", 1)[1])

    def post(self, path: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as reply:
            reply.read()

    def pid(self, name: str, role: str = "main") -> int:
        """Of a daemon, or of the worker that plays ``role`` in the slot ``name``."""
        if name.startswith("slot"):
            return next(w.pid for s in self.status().slots if s.slot == name for w in s.workers if w.role == role)
        return super().pid(name)

    @contextmanager
    def stalled(self, words: str) -> Iterator[None]:
        """Every main stalls once as ``words`` say, in a step; the block waits until one has begun to."""
        begun = self.flag.with_suffix(".begun")
        begun.unlink(missing_ok=True)
        self.flag.write_text(words)
        try:
            self.wait("a stall", lambda: (begun.exists() and begun.read_text()) or None, 120.0)
            yield
        finally:
            self.flag.unlink(missing_ok=True)


@dataclass(frozen=True)
class Roles:
    """Who plays which role; ``generations`` by slot."""

    generations: dict[str, int]
    workers: dict[tuple[str, str], str]
    zygote: int


@dataclass
class Scene:
    """``expected``: causes of the faults that were injected, by slot. ``found``: those that were answered by one
    handover of that cause. ``false``: everything else that the supervisor did, in words."""

    name: str
    seconds: float = 0.0
    requests: int = 0
    expected: list[tuple[str, str]] = field(default_factory=list)
    found: int = 0
    false: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Ledger:
    """``scenes``: all that ran, in order."""

    def __init__(self, host: SoakHost) -> None:
        self._host = host
        self.scenes: list[Scene] = []

    def roles(self) -> Roles:
        slots = self._host.status().slots
        found = self._host.zygote
        return Roles(
            {slot.slot: slot.generation for slot in slots},
            {(slot.slot, worker.role): worker.worker_id for slot in slots for worker in slot.workers},
            found.pid if found is not None and found.poll() is None else 0,
        )

    def incidents(self) -> dict[str, Incident]:
        rows = call_sync(self._host.paths.belayerd_sock, ListIncidents(limit=200), IncidentList, 60.0).incidents
        return {row.incident_id: row for row in rows if row.cause != "start"}

    def play(self, name: str, run: Callable[[Scene], None]) -> Scene:
        """Run a scene between two looks. A scene that injects appends to ``expected``."""
        before, known, watch, scene = self.roles(), self.incidents(), Stopwatch(), Scene(name)
        self.scenes.append(scene)
        run(scene)
        self._host.until_protected(300.0)
        scene.seconds = watch.ms() / 1e3
        self._judge(scene, before, {k: v for k, v in self.incidents().items() if k not in known})
        print(
            f"{name}: {scene.seconds:.1f} s, {scene.requests} requests, {scene.found} of {len(scene.expected)} faults "
            f"found, false alarms {scene.false or 'none'}, wrong {scene.wrong or 'none'}",
            file=sys.stderr,
        )
        return scene

    def _judge(self, scene: Scene, before: Roles, fresh: dict[str, Incident]) -> None:
        after, open_ = self.roles(), list(scene.expected)
        for row in fresh.values():
            if (row.slot, row.cause) in open_ and row.outcome == "served":
                open_.remove((row.slot, row.cause))
            else:
                scene.false.append(f"{row.slot}: {row.cause}, {row.detail}: {row.outcome}")
        scene.found = len(scene.expected) - len(open_)
        hit = {slot for slot, _ in scene.expected}
        for role, worker in before.workers.items():
            if role[0] not in hit and after.workers.get(role) != worker:
                scene.false.append(f"{' '.join(role)}: {worker} is {after.workers.get(role)} now")
        for slot, generation in before.generations.items():
            due = sum(one == slot for one, _ in scene.expected)
            if after.generations[slot] != generation + due:
                scene.false.append(f"{slot}: generation {generation} to {after.generations[slot]}, {due} faults")
        if after.zygote != before.zygote:
            scene.false.append("the zygote was replaced")


@contextmanager
def hogs(count: int, nice: int) -> Iterator[None]:
    """Processes beside the host that take every core they can get."""
    code = f"import os\nos.nice({nice})\nwhile True: pass"
    children = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def rest(seconds: float) -> None:
    threading.Event().wait(seconds)


def until(what: str, fact: Callable[[], bool], within: float) -> None:
    """Wait for a fact; raises BelayerError."""
    end = monotonic() + within
    while not fact():
        if monotonic() > end:
            raise BelayerError(f"{what} did not happen in {within:g} s")
        rest(0.02)


def dumps(scenes: list[Scene]) -> list[dict[str, object]]:
    return json.loads(json.dumps([vars(scene) for scene in scenes]))  # type: ignore[no-any-return]
