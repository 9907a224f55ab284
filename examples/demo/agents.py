"""Four agents in four threads: think (stream from the router), act (in a sandbox), checkpoint while thinking."""

from __future__ import annotations

import hashlib
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from belayer.clock import monotonic
from belayer.errors import BelayerError, SandboxLost
from belayer.messages.sandbox import CheckpointInfo, RestoreInfo
from belayer.paths import Paths
from belayer.rollout import Trajectory
from belayer.sandbox import Sandbox
from examples.demo.script import ACTIONS, MANIFEST, opening

TOKENS = 48


class StreamBroken(BelayerError):
    """The stream ended in an error, or without a finish: never taken for an answer."""


@dataclass
class Thought:
    """``tokens``: token ids as streamed; ``at``: monotonic seconds of each chunk."""

    text: str
    tokens: tuple[int, ...]
    at: tuple[float, ...]


@dataclass
class Result:
    """All that two runs are compared by, and what was seen on the way."""

    thoughts: list[Thought] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    manifest: str = ""
    files: int = 0
    checkpoints: list[CheckpointInfo] = field(default_factory=list)
    restores: list[RestoreInfo] = field(default_factory=list)
    thrown_away: int = 0


# Called with (trajectory, turn, "token" or "action", count): where the demo breaks things.
Hook = Callable[[int, int, str, int], None]


def chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Server-sent events of one streaming request, as dicts; the [DONE] line is checked and left out."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    done = False
    with urllib.request.urlopen(request, timeout=300) as reply:
        for raw in reply:
            line = raw.decode().strip()
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                yield json.loads(line[6:])
    if not done:
        raise StreamBroken("the stream ended without [DONE]")


def think(url: str, messages: list[dict[str, Any]], seed: int, on_token: Callable[[int], None]) -> Thought:
    """One seeded answer of exactly ``TOKENS`` tokens. Raises StreamBroken."""
    body = {
        "model": "smollm2",
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    text, finish = "", None
    tokens: list[int] = []
    at: list[float] = []
    for chunk in chunks(url, body):
        if "error" in chunk:
            raise StreamBroken(f"the stream ended in an error: {chunk['error']}")
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            fresh = choice.get("token_ids") or []
            finish = choice.get("finish_reason") or finish
            if fresh:
                tokens += fresh
                at.append(monotonic())
                on_token(len(tokens))
    if finish != "length" or len(tokens) != TOKENS:
        raise StreamBroken(f"finish {finish!r} after {len(tokens)} of {TOKENS} tokens")
    return Thought(text, tuple(tokens), tuple(at))


class Agent:
    """One trajectory from its opening to its last action."""

    def __init__(self, number: int, url: str, paths: Paths, hook: Hook, sandboxes: dict[int, Sandbox]) -> None:
        self._number, self._url, self._hook = number, url, hook
        self.result = Result()
        self._box = Sandbox.create(name=f"demo-{number}", paths=paths)
        sandboxes[number] = self._box
        self._run = Trajectory(self._box, opening(number))

    def go(self) -> Result:
        turns = len(ACTIONS[self._number])
        with ThreadPoolExecutor(1) as keeper:
            pending: Future[CheckpointInfo] | None = keeper.submit(self._run.checkpoint)
            while self._box.boundary < turns:
                self._turn(self._box.boundary, pending)
                pending = keeper.submit(self._run.checkpoint) if self._box.boundary < turns else None
        seen = self._box.exec(MANIFEST, context=self._run.messages)
        self.result.manifest = hashlib.sha256(seen.stdout.encode()).hexdigest()
        self.result.files = seen.stdout.count("\n")
        self._box.destroy()
        return self.result

    def _turn(self, turn: int, pending: Future[CheckpointInfo] | None) -> None:
        """The checkpoint of the boundary runs while the model thinks, and is ready before the next action."""
        thought = think(
            self._url,
            self._run.messages,
            1000 * self._number + turn,
            lambda count: self._hook(self._number, turn, "token", count),
        )
        if pending is not None:
            self.result.checkpoints.append(pending.result())
        self._run.say(thought.text)
        self._hook(self._number, turn, "action", 0)
        try:
            seen = self._run.act(ACTIONS[self._number][turn])
        except SandboxLost:
            # The action's fate is unknown: back to the last ready prefix, and the model thinks again from there.
            self.result.restores.append(self._run.recover())
            back = self._box.boundary
            self.result.thrown_away += 1
            self.result.thoughts = self.result.thoughts[:back]
            self.result.observations = self.result.observations[:back]
            return
        self.result.thoughts = [*self.result.thoughts[:turn], thought]
        self.result.observations.append(f"{seen.exit_code} {seen.stdout} {seen.stderr}")


def run_all(url: str, paths: Paths, hook: Hook, sandboxes: dict[int, Sandbox]) -> list[Result]:
    """All four at once. The first failure of any is raised after all have ended."""
    with ThreadPoolExecutor(len(ACTIONS)) as pool:
        futures = [pool.submit(_one, number, url, paths, hook, sandboxes) for number in range(len(ACTIONS))]
    return [future.result() for future in futures]


def _one(number: int, url: str, paths: Paths, hook: Hook, sandboxes: dict[int, Sandbox]) -> Result:
    return Agent(number, url, paths, hook, sandboxes).go()


class Once:
    """Runs ``action`` in a thread of its own the first time that it is asked to; keeps its result or its error."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action, self._lock = action, threading.Lock()
        self._thread: threading.Thread | None = None
        self.result: Any = None
        self.error: BelayerError | None = None
        self.at = 0.0

    def fire(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work)
                self._thread.start()

    def _work(self) -> None:
        try:
            self.at = monotonic()
            self.result = self._action()
        except BelayerError as why:
            self.error = why

    def join(self) -> bool:
        """True when it was fired and did its work."""
        if self._thread is not None:
            self._thread.join(60)
        return self.result is not None
