"""Rollout failures that users of other systems reported, tried on the router: the rows whose promise is about one whole
answer or one whole run. Row numbers are those of rollout_rows.py, which also names the tests of all other rows."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.router_host import FakeWorker, RouterHost
from tests.support.streams import chat, completion, tokens_in
from tests.support.wait import eventually

TOKENS, CUT = 24, 9
SLOTS = ["s0", "s1", "s2", "s3"]
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


@pytest.fixture(scope="module")
def host() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        one = RouterHost.start(Path(root), SLOTS, "request_deadline_s = 20.0")
        try:
            yield one
        finally:
            one.stop()


@pytest.fixture(autouse=True)
def no_worker_is_left(host: RouterHost) -> Iterator[None]:
    yield
    host.clear()


def whole(path: str, **more: Any) -> dict[str, Any]:
    """A request whose answer comes in one piece, as trainers ask."""
    make = {PATHS[0]: completion, PATHS[1]: chat, PATHS[2]: tokens_in}[path]
    asked = make(TOKENS, **more)
    return {name: value for name, value in asked.items() if name not in ("stream", "stream_options")}


def ask(host: RouterHost, path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return httpx.post(host.url + path, json=whole(path, **more), headers=headers, timeout=300)


def cut_at(host: RouterHost, fake: FakeWorker, tokens: int, before: int) -> None:
    """Wait for the place at which the recorded engine holds, then kill it and tell the router."""
    eventually(lambda: host.slot(fake.slot).tokens_total - before == tokens, what=f"{tokens} tokens are made")
    fake.kill()
    host.unregister(fake)
    assert host.status().waiting == 1


def made(host: RouterHost, slot: str) -> int:
    return next((row.tokens_total for row in host.status().slots if row.slot == slot), 0)


def is_made(host: RouterHost, slot: str, tokens: int) -> bool:
    return made(host, slot) == tokens


@pytest.mark.parametrize("path", PATHS)
def test_rows_40_41_every_array_of_a_resumed_answer_is_as_long_as_its_tokens(host: RouterHost, path: str) -> None:
    """Rows 40 and 41: per-token arrays doubled, or of another length, after a resume."""
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if path == PATHS[1] else {"logprobs": 1}
    before = made(host, "s0")
    first = host.worker("s0", "--hold-at", str(CUT))
    with ThreadPoolExecutor(1) as pool:
        asked: Future[httpx.Response] = pool.submit(ask, host, path, **more)
        cut_at(host, first, CUT, before)
        host.worker("s0")
        answer = asked.result(300).json()
    choice = answer["choices"][0]
    rows = choice["logprobs"]
    lengths = {len(rows["content"])} if "content" in rows else {len(rows["tokens"]), len(rows["token_logprobs"])}
    assert lengths | {len(choice["token_ids"]), answer["usage"]["completion_tokens"]} == {TOKENS}


def test_row_42_a_sample_of_two_weight_versions_says_which_token_is_of_which(host: RouterHost) -> None:
    """Row 42: weight versions mixed inside one sample without a word."""
    before = made(host, "s0")
    first = host.worker("s0", "--hold-at", str(CUT), "--weight-version", "1")
    with ThreadPoolExecutor(1) as pool:
        asked: Future[httpx.Response] = pool.submit(ask, host, PATHS[2])
        cut_at(host, first, CUT, before)
        host.worker("s0", "--weight-version", "2")
        choice = asked.result(300).json()["choices"][0]
    assert choice["weight_versions"] == [
        {"version": "1", "start": 0, "end": CUT},
        {"version": "2", "start": CUT, "end": TOKENS},
    ]
    assert len(choice["token_ids"]) == TOKENS


def test_row_44_a_generation_that_failed_is_an_error_and_no_empty_text(host: RouterHost) -> None:
    """Row 44: a failed generation was taken for an answer and trained on with reward zero. Once with tokens already
    made when its worker dies, once with no worker at all, for as long as the router's deadline."""
    answers: list[tuple[httpx.Response, str]] = []
    with ThreadPoolExecutor(len(PATHS)) as pool:
        for path in PATHS:
            before = made(host, "s0")
            first = host.worker("s0", "--hold-at", str(CUT))
            asked: Future[httpx.Response] = pool.submit(ask, host, path, {"x-belayer-on-death": "error"})
            eventually(partial(is_made, host, "s0", before + CUT), what="tokens are made")
            first.kill()
            host.unregister(first)
            answers.append((asked.result(300), "worker_gone"))
        answers += [(answer, "no_healthy_slot") for answer in pool.map(partial(ask, host), PATHS)]
    for answer, kind in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == kind
        assert "choices" not in answer.json()


def test_row_52_one_of_four_engines_dies_for_good_and_the_run_goes_on(host: RouterHost) -> None:
    """Row 52: one dead engine ended the run, and an affine request tried it again and again. Each request of the dead
    one is moved once, evenly; new ones of its session go elsewhere; all answers are those of the unfailed run."""
    truth = None
    fakes = {slot: host.worker(slot, "--hold-at", str(CUT)) for slot in SLOTS}
    before = host.status().resumed_total
    with ThreadPoolExecutor(12) as pool:
        sessions = [{"x-session-id": f"session-{number}"} for number in range(12)]
        asked = [pool.submit(ask, host, PATHS[2], session) for session in sessions]
        eventually(lambda: all(host.slot(slot).running == 3 for slot in SLOTS), what="three requests on each slot")
        lost = fakes["s0"]
        lost.kill()
        host.unregister(lost, gone=True, reason="quarantined")
        assert [host.slot(slot).running for slot in SLOTS] == [0, 4, 4, 4]
        for slot in SLOTS[1:]:
            fakes[slot].release()
        answers = [one.result(300) for one in asked]
    for answer in answers:
        assert answer.status_code == 200
        tokens = answer.json()["choices"][0]["token_ids"]
        truth = truth or tokens
        assert tokens == truth
        assert len(tokens) == TOKENS
    assert host.status().resumed_total - before == 3
    again = [ask(host, PATHS[2], session) for session in sessions]
    assert [one.json()["choices"][0]["token_ids"] for one in again] == [truth] * 12
