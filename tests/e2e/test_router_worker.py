"""The router before real workers on real shared memory: streams of many kinds through one SIGKILL, compared with the
unfailed run. Tokens, text, finish, usage are equal; logprobs as close as prefill and decode kernels are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.apis import APIS, Asking, asking, same
from tests.support.router_stack import RouterStack
from tests.support.streams import Seen, Stream, chat, completion, tokens_in
from tests.support.wait import eventually
from tests.support.worker_stack import Worker

pytestmark = pytest.mark.engine

TOKENS = 60
SOME = 5  # streams that must be in their middle when the worker dies
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
TOOL = {"type": "function", "function": {"name": "person", "parameters": SCHEMA}}
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
    "completion truncations": (
        "/v1/completions",
        completion(TOKENS, temperature=1.1, seed=9, top_k=40, min_p=0.02, top_p=0.95, repetition_penalty=1.2),
    ),
    "completion bias": ("/v1/completions", completion(TOKENS, logit_bias={"28": 3.0, "30": -100})),
    "completion bad words": ("/v1/completions", completion(TOKENS, bad_words=["the", "little girl", "was"])),
    "completion stop ids": ("/v1/completions", completion(TOKENS, stop_token_ids=[30], ignore_eos=True)),
    "completion regex": ("/v1/completions", completion(TOKENS, structured_outputs={"regex": "[a-z]{3}( [a-z]{4}){4}"})),
    "chat choice": (
        "/v1/chat/completions",
        chat(TOKENS, structured_outputs={"choice": ["a long thin rope", "a knot"]}),
    ),
    "completion salt and priority": ("/v1/completions", completion(TOKENS, cache_salt="pepper", priority=3)),
    "chat tool": (
        "/v1/chat/completions",
        chat(TOKENS, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "person"}}),
    ),
}
# Cut by a client that leaves at its position and comes back: the same resume without the cost of a death each time.
CUTS = (1, TOKENS // 2, TOKENS - 1, TOKENS)
ONE_CHOICE = [name for name in BODIES if name != "chat n=3"]


class Host(RouterStack):
    def start(self, name: str) -> Stream:
        path, body = BODIES[name]
        stream = Stream(self.url, path, body)
        stream.start()
        return stream


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host.up(router='tool_parser = "hermes"')
    try:
        yield host
    finally:
        host.stop()


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
        assert seen.arguments == truth.arguments, name
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


def leave_and_return(host: Host, name: str, cut: int, truth: Seen) -> tuple[Seen, Seen]:
    """Both parts of a stream whose client leaves with ``cut`` tokens, or one before the end when it is shorter."""
    path, body = BODIES[name]
    headers = {"x-request-id": f"{name}-{cut}"}
    first = Stream(host.url, path, body, headers, until=min(cut, len(truth.token_ids) - 1))
    first.start()
    had = first.result()
    headers["x-belayer-position"] = str(had.position)
    second = Stream(host.url, path, body, headers)
    second.start()
    return had, second.result()


def test_every_feature_goes_on_at_every_cut(host: Host) -> None:
    """Tokens, text, logprobs, arguments, finish and usage of both parts together are those of one unfailed run."""
    host.promote(host.stack.spawn())
    plain = host.start("completion stop string").result()
    BODIES["completion stop string"][1]["stop"] = [late_piece(plain.text)]
    with ThreadPoolExecutor(len(BODIES)) as pool:
        truths = dict(zip(ONE_CHOICE, pool.map(lambda name: host.start(name).result(), ONE_CHOICE), strict=True))
        for name, truth in truths.items():
            assert (truth.status, truth.done, len(truth.finishes)) == (200, 1, 1), (name, truth)
        for cut in CUTS:
            parts = pool.map(lambda name: leave_and_return(host, name, cut, truths[name]), ONE_CHOICE)  # noqa: B023
            for name, (first, second) in zip(ONE_CHOICE, parts, strict=True):
                label, truth = f"{name} cut at {cut}", truths[name]
                assert not second.errors, (label, second.errors)
                assert first.token_ids + second.token_ids == truth.token_ids, label
                assert first.text + second.text == truth.text, label
                assert first.arguments + second.arguments == truth.arguments, label
                assert (second.finishes, second.done) == (truth.finishes, 1), label
                assert second.usages == truth.usages, label
                got, wanted = numbers(first.logprobs + second.logprobs), numbers(truth.logprobs)
                assert got == pytest.approx(wanted, abs=1e-3), label
    assert host.status().resumed_total >= len(ONE_CHOICE)
    prompt_logprobs_are_told_again(host)
    host.retire()


def prompt_logprobs_are_told_again(host: Host) -> None:
    """They came with the first token, from the engine; the second time they come from the journal."""
    body = {**completion(8, prompt_logprobs=1, logprobs=1), "stream": False}
    del body["stream_options"]
    headers = {"x-request-id": "prompt-logprobs"}
    first = httpx.post(f"{host.url}/v1/completions", json=body, headers=headers, timeout=300).json()
    assert first["choices"][0]["prompt_logprobs"][1]
    headers["x-belayer-position"] = "0"
    tokens = host.status().tokens_total
    again = httpx.post(f"{host.url}/v1/completions", json=body, headers=headers, timeout=300).json()
    assert (again["choices"], again["usage"]) == (first["choices"], first["usage"])
    assert host.status().tokens_total == tokens, "no engine was asked"


def test_streams_of_every_kind_outlive_a_killed_worker(host: Host) -> None:
    first = host.stack.spawn()
    host.promote(first)
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 200
    plain = host.start("completion stop string").result()
    BODIES["completion stop string"][1]["stop"] = [late_piece(plain.text)]
    truths = {name: stream.result() for name, stream in [(name, host.start(name)) for name in BODIES]}
    assert truths["completion stop string"].finishes == ["stop"]
    for name, truth in truths.items():
        assert truth.status == 200, (name, truth)
        assert not truth.errors, (name, truth.errors)
    other_truths = {path: asking(host.url, path, TOKENS).result() for path in APIS}
    shadow = host.stack.spawn()
    streams, others = caught(host, first)
    host.lose(first)
    interrupted = host.status().waiting
    assert interrupted >= 1
    host.promote(shadow)
    seen = {name: stream.result() for name, stream in streams.items()}
    for name, one in seen.items():
        assert_same(one, truths[name], name)
    for path, other in others.items():
        same(other.result(), other_truths[path])
    report = host.status().slots[0].last_resume
    assert report is not None
    assert report.resumed == interrupted
    assert report.first_token_ms > 0
    print(f"\nresumed {report.resumed}, first token {report.first_token_ms:.0f} ms after register")
    host.lose(shadow)


def caught(host: Host, worker: Worker) -> tuple[dict[str, Stream], dict[str, Asking]]:
    """Streams of every kind and of the other APIs, whose worker stands still while some of them are in their middle,
    and none at its beginning. They come to it at once, so that none has ended when the last one begins."""
    for _ in range(5):
        worker.stop()
        before = host.status().running
        streams = {name: host.start(name) for name in BODIES}
        others = {path: asking(host.url, path, TOKENS) for path in APIS}
        wanted = before + sum(body.get("n", 1) for _, body in BODIES.values()) + len(APIS)
        eventually(lambda wanted=wanted: host.status().running >= wanted, what="all are with the worker")
        worker.go_on()
        eventually(
            lambda streams=streams, others=others: (
                all(map(in_its_middle, streams.values()))
                and all(one.told.text or not one.is_alive() for one in others.values())
            ),
            what="every stream is in its middle",
        )
        if host.caught_running(worker, SOME):
            return streams, others
        assert not [one.result().errors for one in streams.values() if one.result().errors]
        assert not [one.result().errors for one in others.values() if one.result().errors]
    raise AssertionError(f"five times fewer than {SOME} streams were in their middle")


def test_the_last_worker_goes_and_another_comes_later(host: Host) -> None:
    first = host.stack.spawn()
    host.promote(first)
    truth = host.start("chat greedy").result()
    stream = host.start("chat greedy")
    eventually(lambda: len(stream.seen.token_ids) >= 10, what="ten tokens")
    host.lose(first)
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 503
    host.promote(host.stack.spawn())
    assert_same(stream.result(), truth, "chat greedy")
