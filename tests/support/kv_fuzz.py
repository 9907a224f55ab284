"""Requests over mains that are killed again and again, with KV reuse: every stream must be the one of an unfailed run.

The arena is small (48 blocks of 32 tokens), so blocks are evicted and used again all the time; that is where a log
that says too much would hand wrong KV to the next main. A wrong block shows in the tokens or, far more often, in the
logprobs only.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from belayer import procs
from belayer.clock import monotonic
from tests.support.worker_client import FrontClient, Stream, engine_request
from tests.support.worker_stack import Worker, WorkerStack

BLOCK = 32  # the smallest that the CPU engine takes
BLOCKS = 48
# Prefill and decode use different kernels: float32 logprobs differ in the last bits. A wrong block is off by far more.
SAME = 1e-3
SLOT = f"kv_reuse = true\nblock_size = {BLOCK}\nmax_model_len = 512\nmax_num_batched_tokens = 128\nmax_num_seqs = 8\n"


def slot(bytes_per_token: int) -> str:
    return f"{SLOT}kv_bytes = {BLOCKS * BLOCK * bytes_per_token}\n"


def requests(count: int, seed: int) -> list[EngineCoreRequest]:
    """Prompts of 10-380 tokens, a third of them behind a common prefix; greedy and seeded in turn."""
    rng = random.Random(seed)
    common = [rng.randrange(100, 1000) for _ in range(4 * BLOCK)]
    made = []
    for number in range(count):
        prompt = [rng.randrange(100, 1000) for _ in range(rng.randrange(10, 250))]
        params: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}
        whole = common + prompt if number % 3 == 0 else prompt
        made.append(
            engine_request(f"r{number}", whole, max_tokens=rng.randrange(20, 90), logprobs=1, ignore_eos=True, **params)
        )
    return made


@dataclass
class Outcome:
    """``bad``: names of streams that differ from the unfailed run, with what differs."""

    kills: int = 0
    adopted: int = 0
    resumed: int = 0
    bad: tuple[str, ...] = ()


class Fuzz:
    """``stack`` runs with ``slot(...)``; the unfailed run happens here, on its first main."""

    def __init__(self, stack: WorkerStack, count: int = 24, seed: int = 0) -> None:
        self._stack, self._seed, self._count = stack, seed, count
        self._rng = random.Random(seed)
        self._generation = 0
        self.main = self._next(stack.spawn())[0]
        begun = monotonic()
        self.expected = self._run_to_the_end()
        self.takes_s = monotonic() - begun

    def round(self, kills: int) -> Outcome:
        """All requests once, their mains killed ``kills`` times at random moments of the run."""
        out = Outcome()
        todo = {request.request_id: request for request in requests(self._count, self._seed)}
        seen: dict[str, Stream] = {name: Stream() for name in todo}
        for kill in range(kills + 1):
            shadow = self._stack.spawn() if kill < kills else None
            front = self.main.front()
            front.hello()
            for name, request in todo.items():
                if not seen[name].finish:
                    out.resumed += bool(seen[name].tokens)
                    front.add(request, list(seen[name].tokens), stream=seen[name])
            if shadow is None:
                front.finish(*seen.values())
                front.close()
                break
            self._pump_until_it_works(front, seen)
            self._pump_until(front, monotonic() + self._rng.uniform(0, self.takes_s / (kills + 1)))
            self.main.kill()
            front.drain()
            front.close()
            out.adopted += self.replace(shadow)
            out.kills += 1
        out.bad = tuple(self._differences(seen))
        return out

    def replace(self, shadow: Worker) -> int:
        """Kill the main unless it is dead, and let ``shadow`` take over; returns the blocks that it adopted."""
        if not procs.is_dead(self.main.pidfd):
            self.main.kill()
        self._stack.end_fence()
        self.main, adopted = self._next(shadow)
        return adopted

    def _next(self, worker: Worker) -> tuple[Worker, int]:
        self._generation += 1
        steps = worker.become_main(self._stack.arena().epoch, self._generation)
        return worker, int(steps["adopted"])

    def _run_to_the_end(self) -> dict[str, Stream]:
        front = self.main.front()
        front.hello()
        streams = {request.request_id: front.add(request) for request in requests(self._count, self._seed)}
        front.finish(*streams.values())
        front.close()
        return streams

    def _pump_until_it_works(self, front: FrontClient, seen: dict[str, Stream]) -> None:
        """Until there is one token more, or nothing to wait for: a machine that is slow now was quicker before."""
        had = sum(len(stream.tokens) for stream in seen.values())
        front.until(
            lambda: sum(len(one.tokens) for one in seen.values()) > had or all(one.finish for one in seen.values())
        )

    def _pump_until(self, front: FrontClient, end: float) -> None:
        while monotonic() < end:
            front.pump(wait_ms=1)

    def _differences(self, seen: dict[str, Stream]) -> list[str]:
        bad = []
        for name, want in self.expected.items():
            got = seen[name]
            if got.tokens != want.tokens:
                bad.append(f"{name}: tokens {got.tokens} instead of {want.tokens}")
                continue
            apart = max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
            if apart > SAME:
                bad.append(f"{name}: logprobs differ by {apart:.4f}")
        return bad
