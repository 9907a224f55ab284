"""The router before real workers on real shared memory: streams of many kinds through one SIGKILL, compared with the
unfailed run. Tokens, text, finish, usage are equal; logprobs as close as prefill and decode kernels are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from belayer.messages.common import Done
from belayer.messages.router import RegisterWorker, RouterStatus, RouterStatusReply, UnregisterWorker
from belayer.rpc import SyncClient
from tests.support.router_host import free_port
from tests.support.streams import Seen, Stream, chat, completion, tokens_in
from tests.support.wait import eventually
from tests.support.worker_stack import Worker, WorkerStack

pytestmark = pytest.mark.engine

TOKENS = 60
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat greedy": ("/v1/chat/completions", chat(TOKENS, logprobs=True, top_logprobs=2)),
    "chat seeded": ("/v1/chat/completions", chat(TOKENS, temperature=0.8, seed=7)),
    "chat n=3": ("/v1/chat/completions", chat(TOKENS, temperature=0.9, seed=5, n=3)),
    "completion penalties": ("/v1/completions", completion(TOKENS, presence_penalty=0.8, frequency_penalty=0.5)),
    "completion stop string": ("/v1/completions", completion(TOKENS, ignore_eos=True)),
    "completion min tokens": ("/v1/completions", completion(TOKENS, min_tokens=50, logprobs=1)),
    "chat json": (
        "/v1/chat/completions",
        chat(TOKENS, response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}),
    ),
    "tokens in": ("/inference/v1/generate", tokens_in(TOKENS, seed=3, temperature=1.0, logprobs=1)),
}


@dataclass
class Host:
    """Owners, zygote, router; the supervisor's part is played by the test."""

    stack: WorkerStack
    url: str
    rpc: SyncClient
    generation: int = 0

    def promote(self, worker: Worker) -> None:
        """Lease, flush, oracle, become main, register: the order of a handover after its fence."""
        self.generation += 1
        worker.become_main(self.stack.arena().epoch, self.generation)
        self.rpc.call(
            RegisterWorker(
                slot="slot0",
                generation=self.generation,
                worker_id=worker.worker_id,
                endpoint=f"ipc://{worker.path}",
                model="smollm2",
                weight_version=1,
            ),
            Done,
        )

    def lose(self, worker: Worker) -> None:
        """SIGKILL, seen dead; unregister first of all, then fence."""
        worker.kill()
        self.rpc.call(UnregisterWorker(slot="slot0", generation=self.generation, reason="killed"), Done)
        self.stack.end_fence()

    def status(self) -> RouterStatusReply:
        return self.rpc.call(RouterStatus(), RouterStatusReply)

    def start(self, name: str) -> Stream:
        path, body = BODIES[name]
        stream = Stream(self.url, path, body)
        stream.start()
        return stream


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    port = free_port()
    stack = WorkerStack(f"max_model_len = 1024\n[router]\nport = {port}\n")
    try:
        stack.start()
        router = stack.daemon("belayerd.router")
        eventually(stack.paths.router_sock.exists, within=180, what=f"the router serves; see {stack.root}", every=0.1)
        assert router.poll() is None
        yield Host(stack, f"http://127.0.0.1:{port}", SyncClient(stack.paths.router_sock))
    finally:
        stack.stop()


def assert_same(seen: Seen, truth: Seen, name: str) -> None:
    assert seen.error is None, name
    assert not seen.errors, (name, seen.errors)

    def by_choice(one: Seen) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for choice in one.choices:
            rows.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        return rows

    assert by_choice(seen) == by_choice(truth), name
    assert sorted(seen.finishes) == sorted(truth.finishes), name
    assert seen.usages == truth.usages, name
    assert (seen.roles, seen.done) == (truth.roles, 1), name
    if len(by_choice(truth)) == 1:
        assert seen.text == truth.text, name
    for got, wanted in zip(numbers(seen.logprobs), numbers(truth.logprobs), strict=True):
        assert math.isclose(got, wanted, abs_tol=1e-3), name


def numbers(thing: Any) -> list[float]:
    """All floats of nested rows, in order: the logprobs and nothing else."""
    if isinstance(thing, float):
        return [thing]
    if isinstance(thing, dict):
        thing = list(thing.values())
    return [one for row in thing for one in numbers(row)] if isinstance(thing, list | tuple) else []


def late_piece(text: str) -> str:
    """A few characters that first occur in the last third of ``text``, across a token border or not."""
    start = 2 * len(text) // 3
    return next(text[start : start + n] for n in range(4, 60) if text.index(text[start : start + n]) == start)


def in_its_middle(stream: Stream) -> bool:
    return len(stream.seen.token_ids) >= 5 or not stream.is_alive()


def test_streams_of_every_kind_outlive_a_killed_worker(host: Host) -> None:
    first = host.stack.spawn()
    host.promote(first)
    assert httpx.get(f"{host.url}/health").status_code == 200
    plain = host.start("completion stop string").result(120)
    BODIES["completion stop string"][1]["stop"] = [late_piece(plain.text)]
    truths = {name: stream.result(180) for name, stream in [(name, host.start(name)) for name in BODIES]}
    assert truths["completion stop string"].finishes == ["stop"]
    for name, truth in truths.items():
        assert truth.status == 200, (name, truth)
        assert not truth.errors, (name, truth.errors)
    shadow = host.stack.spawn()
    streams = {name: host.start(name) for name in BODIES}
    eventually(
        lambda: all(map(in_its_middle, streams.values())),
        within=60,
        what="every stream is in its middle",
    )
    host.lose(first)
    interrupted = host.status().waiting
    assert interrupted >= 5
    host.promote(shadow)
    seen = {name: stream.result(180) for name, stream in streams.items()}
    for name, one in seen.items():
        assert_same(one, truths[name], name)
    report = host.status().slots[0].last_resume
    assert report is not None
    assert report.resumed == interrupted
    assert report.first_token_ms > 0
    print(f"\nresumed {report.resumed}, first token {report.first_token_ms:.0f} ms after register")
    host.lose(shadow)


def test_the_last_worker_goes_and_another_comes_later(host: Host) -> None:
    first = host.stack.spawn()
    host.promote(first)
    truth = host.start("chat greedy").result(120)
    stream = host.start("chat greedy")
    eventually(lambda: len(stream.seen.token_ids) >= 10, within=60, what="ten tokens")
    host.lose(first)
    assert httpx.get(f"{host.url}/health").status_code == 503
    host.promote(host.stack.spawn())
    assert_same(stream.result(120), truth, "chat greedy")
