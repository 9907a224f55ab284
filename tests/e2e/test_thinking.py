"""Thinking on real engines: the budget is kept and the grammar begins behind it, wherever the request is cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from benchmarks import tiny
from tests.support import thinking_model
from tests.support.owner_stack import MODEL, REPO
from tests.support.router_stack import RouterStack
from tests.support.streams import Stream, chat, completion, tokens_in
from tests.support.thinking_model import ENOUGH, THINK
from tests.support.wait import eventually
from tests.support.worker_client import FrontClient, engine_request
from tests.support.worker_client import Stream as Said

pytestmark = pytest.mark.engine

COUNT = 26
BUDGET = 7
PROMPT = [6403, 3980, 253, 655]
REGEX = "[a-z]{3}( [a-z]{4}){3}"
# Both words of thinking come by chance, now and then: by this much above the near-uniform logits of a random model.
BIAS = {THINK: 9.0, ENOUGH: 8.0}
BY_NAME = {str(token): by for token, by in BIAS.items()}
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": COUNT, "logprobs": 1, "ignore_eos": True}
GREEDY = {**DRAWN, "temperature": 0.0}


@pytest.fixture(scope="module")
def host() -> Iterator[RouterStack]:
    cache = REPO / ".cache/models"
    model = thinking_model.make(cache / "belayer-tiny-thinks", tiny.make(cache / "belayer-tiny", MODEL))
    host = RouterStack.up(
        "max_model_len = 1024",
        'reasoning_parser = "deepseek_r1"\nreasoning_end = "\\nSo much for that.\\n</think>"',
        model=model,
    )
    try:
        host.promote(host.stack.spawn())
        yield host
    finally:
        host.stop()


@pytest.fixture
def front(host: RouterStack) -> Iterator[FrontClient]:
    client = host.last.front(9)
    yield client
    client.close()


def end_words(front: FrontClient) -> list[int]:
    """The tokens that are forced: those behind a thought of no token."""
    said = front.generate(engine_request("words", [*PROMPT, THINK], thinking_token_budget=0, **GREEDY))
    return said.tokens[: said.tokens.index(ENOUGH) + 1]


def every_cut(front: FrontClient, name: str, prompt: list[int], params: dict[str, Any]) -> Said:
    """One unfailed run, and what goes on after each number of its tokens."""

    def asked(what: str) -> Any:
        named = dict(params)
        if "regex" in named:
            grammar = StructuredOutputsParams(regex=named.pop("regex"))
            grammar._backend = "xgrammar"
            named["structured_outputs"] = grammar
        return engine_request(f"{name}-{what}", prompt, **named)

    whole = front.generate(asked("whole"))
    cuts = range(1, len(whole.tokens) + 1)
    streams = [front.add(asked(str(cut)), prefix=whole.tokens[:cut]) for cut in cuts]  # in one batch: it is quicker
    front.finish(*streams)
    for cut, got in zip(cuts, streams, strict=True):
        assert whole.tokens[:cut] + got.tokens == whole.tokens, (name, cut)
        assert got.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-3), (name, cut)
        assert (got.finish, got.stop_reason) == (whole.finish, whole.stop_reason), (name, cut)
    return whole


def test_a_budget_goes_on_at_every_cut(front: FrontClient) -> None:
    words = end_words(front)
    assert len(words) > 3, "the forced end is a sequence that can be cut inside"
    opened = every_cut(front, "opened", [*PROMPT, THINK], {**GREEDY, "thinking_token_budget": BUDGET})
    assert opened.tokens[BUDGET : BUDGET + len(words)] == words, "seven tokens, then the end"
    drawn = every_cut(
        front,
        "drawn",
        PROMPT,
        {**DRAWN, "max_tokens": 60, "seed": 8, "logit_bias": BIAS, "thinking_token_budget": BUDGET},
    )
    start = drawn.tokens.index(THINK)
    assert any(drawn.tokens[at : at + len(words)] == words for at in range(start, 60)), "forced once, without a cut"
    every_cut(front, "unbounded", PROMPT, {**DRAWN, "logit_bias": BIAS})


def test_a_grammar_begins_behind_the_thinking_at_every_cut(front: FrontClient) -> None:
    shaped = {**GREEDY, "ignore_eos": False, "max_tokens": 60, "regex": REGEX, "stop_token_ids": [2]}
    thought = every_cut(front, "shaped", [*PROMPT, THINK], {**shaped, "thinking_token_budget": BUDGET})
    assert thought.finish == "stop", "what follows the thinking is as long as the grammar says"
    assert ENOUGH in thought.tokens
    closed = every_cut(front, "closed", [*PROMPT, THINK, 30, ENOUGH], shaped)
    assert closed.finish == "stop"
    assert ENOUGH not in closed.tokens
    drawn = {**shaped, "temperature": 1.0, "seed": 3, "logit_bias": BIAS, "max_tokens": 90}
    assert every_cut(front, "drawn-end", [*PROMPT, THINK], drawn).finish == "stop"


def test_other_parameters_that_no_route_shows_whole_go_on_at_every_cut(front: FrontClient) -> None:
    """Those of belayerd/router/fidelity.py that go on and are cut nowhere else."""
    every_cut(front, "allowed", PROMPT, {**DRAWN, "allowed_token_ids": [30, 31, 40, 41, 50]})
    every_cut(front, "scored", PROMPT, {**DRAWN, "logprobs": None, "logprob_token_ids": [30, 40]})
    bias = {30: 30.0, 31: 29.0}
    detect = RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=1, min_count=6)
    repeats = every_cut(front, "repeats", PROMPT, {**GREEDY, "logit_bias": bias, "repetition_detection": detect})
    assert repeats.finish == "repetition"


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "thinks, then a shape": (
        "/v1/completions",
        completion(
            300,
            prompt=[*PROMPT, THINK],
            thinking_token_budget=120,
            structured_outputs={"regex": "([a-z]{4} ){25}[a-z]"},
        ),
    ),
    "thinks by chance": (
        "/v1/completions",
        completion(
            300, prompt=PROMPT, temperature=1.0, seed=4, logit_bias=BY_NAME, thinking_token_budget=40, ignore_eos=True
        ),
    ),
    "chat": (
        "/v1/chat/completions",
        chat(300, temperature=1.0, seed=6, thinking_token_budget=50, ignore_eos=True, logit_bias={str(THINK): 8.0}),
    ),
    "tokens in": (
        "/inference/v1/generate",
        tokens_in(300, seed=2, temperature=1.0, thinking_token_budget=160, ignore_eos=True, logit_bias={THINK: 9.0}),
    ),
}


def test_what_thinks_goes_on_through_a_killed_worker(host: RouterStack) -> None:
    def start() -> dict[str, Stream]:
        streams = {name: Stream(host.url, path, body) for name, (path, body) in BODIES.items()}
        for stream in streams.values():
            stream.start()
        return streams

    truths = {name: stream.result() for name, stream in start().items()}
    for name, truth in truths.items():
        assert (truth.status, truth.done, truth.errors) == (200, 1, []), (name, truth.chunks[:2])
        assert ENOUGH in truth.token_ids, name
    shadow = host.stack.spawn()
    for _ in range(5):
        streams = start()
        eventually(lambda: all(len(one.seen.token_ids) >= 5 for one in streams.values()), what="all have begun")  # noqa: B023
        if host.caught_running(host.last, 1):
            break
        assert [stream.result().errors for stream in streams.values()] == [[]] * len(streams)
    else:
        raise AssertionError("five times all streams had ended when the worker was to die")
    host.lose(host.last)
    assert host.status().waiting >= 1
    host.promote(shadow)
    for name, stream in streams.items():
        seen, truth = stream.result(), truths[name]
        assert seen.token_ids == truth.token_ids, name
        assert thoughts(seen) == thoughts(truth), name
        assert (seen.text, seen.finishes, seen.usages) == (truth.text, truth.finishes, truth.usages), name
        assert seen.done == 1


def thoughts(seen: Any) -> str:
    return "".join(choice.get("delta", {}).get("reasoning") or "" for choice in seen.choices)


@pytest.mark.parametrize("budget", [-2, "much", 1.5])
def test_a_budget_that_is_none_is_refused_by_vllm(host: RouterStack, budget: Any) -> None:
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 3, "thinking_token_budget": budget}
    assert httpx.post(f"{host.url}/v1/completions", json=body, timeout=300).status_code == 400
