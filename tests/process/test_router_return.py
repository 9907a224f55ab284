"""A router that is really killed and comes back: clients repeat their id and get the rest of their stream; ended
requests are told again without an engine; what cannot be is a typed error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from belayer.paths import Paths
from belayerd.router.journal_reader import read
from tests.support.router_host import RouterHost
from tests.support.streams import Seen, Stream, chat, completion, tokens_in
from tests.support.wait import eventually

TOKENS = 30
CUT = 11
ROUTES = {
    "/v1/chat/completions": chat(TOKENS, logprobs=True, top_logprobs=2),
    "/v1/completions": completion(TOKENS, logprobs=1, temperature=0.9),  # unseeded
    "/inference/v1/generate": tokens_in(TOKENS, logprobs=1),
}
IDS = {path: f"mine-{number}" for number, path in enumerate(ROUTES)}


@pytest.fixture(scope="module")
def host() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        one = RouterHost.start(Path(root), ["s0", "s1"], "journal_every = 8\nrequest_deadline_s = 120.0")
        try:
            yield one
        finally:
            one.stop()


def repeat(host: RouterHost, path: str, name: str, position: int | None, body: dict[str, Any] | None = None) -> Seen:
    headers = {"x-request-id": name}
    if position is not None:
        headers["x-belayer-position"] = str(position)
    stream = Stream(host.url, path, body or ROUTES[path], headers)
    stream.start()
    return stream.result()


def tokens_of(seen: Seen) -> list[int]:
    return seen.token_ids


def positions(seen: Seen) -> list[int]:
    return [chunk["belayer"]["position"] for chunk in seen.chunks if "belayer" in chunk]


def assert_joined(first: Seen, second: Seen, truth: Seen) -> None:
    """What came before and after make the unfailed answer, and the second part ends as a whole one does."""
    assert first.finishes == []
    assert first.token_ids + second.token_ids == truth.token_ids
    assert first.text + second.text == truth.text
    assert first.logprobs + second.logprobs == truth.logprobs
    assert (second.finishes, second.usages, second.done) == (truth.finishes, truth.usages, 1)
    assert (first.roles + second.roles, second.errors) == (truth.roles, [])


def test_a_router_is_killed_and_every_stream_goes_on_where_its_client_was(host: RouterHost) -> None:
    """All routes at once, one of them sampled without a seed; and an answer that is not streamed, and one without an
    id. The worker ran on, its output went nowhere, and it drops it for the new router."""
    reference = host.worker("s1")
    truths = {path: repeat(host, path, f"truth-{path}", None) for path in ROUTES}
    host.unregister(reference, gone=True, reason="planned: reference is done")
    reference.kill()
    fake = host.worker("s0", "--step-ms", "150")
    fake.stop()  # they are all given their first token in one step, and none is at its end when the last one has it
    whole_body = {**completion(TOKENS), "stream": False, "request_id": "whole"}
    del whole_body["stream_options"]
    streams = {path: Stream(host.url, path, body, {"x-request-id": IDS[path]}) for path, body in ROUTES.items()}
    streams["whole"] = Stream(host.url, "/v1/completions", whole_body)
    streams["nobody"] = Stream(host.url, "/v1/completions", completion(TOKENS))
    for stream in streams.values():
        stream.start()
    begun = [*ROUTES, "nobody"]
    eventually(lambda: host.slot("s0").running == 5, what="all five are there")
    fake.go_on()
    eventually(lambda: all(streams[name].seen.token_ids for name in begun), what="all clients have some")
    fake.stop()
    assert host.slot("s0").running == 5
    host.process.kill()
    host.process.wait(300)
    seen = {name: stream.result() for name, stream in streams.items()}
    assert all(one.error is not None and one.done == 0 for one in seen.values()), "the death is real"
    fake.go_on()
    eventually(lambda: fake.running() == 0, what="the engine ran on, and nobody heard it")
    host.come_back()
    assert host.status().slots[0].registered
    for path, first in seen.items():
        if path not in ROUTES:
            continue
        have = len(first.token_ids)
        assert positions(first)[-1] == have
        second = repeat(host, path, IDS[path], have)
        assert_joined(first, second, truths[path])
        assert positions(second)[0] > have
    headers = {"x-belayer-position": "0"}
    answer = httpx.post(f"{host.url}/v1/completions", json=whole_body, headers=headers, timeout=300).json()
    assert answer["choices"][0]["token_ids"] == truths["/v1/completions"].token_ids
    assert answer["usage"]["completion_tokens"] == TOKENS
    assert answer["belayer"] == {"slot": "s0", "generation": fake.generation, "position": TOKENS}
    stories = read(Paths(host.root).journal).stories.values()
    assert sorted(one.reason for one in stories if not one.name) == ["left"], "the one without an id was ended"
    assert host.metric("belayer_requests_recovered_total") == 4


def test_an_ended_request_is_told_from_any_position_with_no_worker_at_all(host: RouterHost) -> None:
    """Of the life before; also the multi-byte characters that a position may fall into."""
    fake = host.worker("s1", "--step-ms", "100")  # slower than the router, so that chunks are not merged
    truth = repeat(host, "/v1/chat/completions", "told-again", None)
    ends = sorted({0, *positions(truth)})
    assert len(ends) > 3
    host.clear()
    assert host.status().running == 0
    host.kill_and_return()
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 503
    assert fake.process.poll() is not None
    for position in ends:
        again = repeat(host, "/v1/chat/completions", "told-again", position)
        assert truth.token_ids[position:] == again.token_ids
        assert truth.text.endswith(again.text)
        assert (again.finishes, again.usages, again.done) == (truth.finishes, truth.usages, 1)
        assert again.roles == (1 if position == 0 else 0)
        before = "".join(choice["delta"].get("content") or "" for choice in until(truth, position))
        assert before + again.text == truth.text
    assert host.metric("belayer_requests_replayed_total") == len(ends)


def until(seen: Seen, position: int) -> list[dict[str, Any]]:
    """The choices of all chunks that end at or before ``position``."""
    taken = []
    for chunk in seen.chunks:
        if chunk.get("choices") and chunk["belayer"]["position"] <= position:
            taken += chunk["choices"]
    return taken


ENDS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["größer"]},
    "stop token": {"stop_token_ids": [25844]},  # one that has a text, which a stop does not show
    "length, with text held back": {"stop": ["never said, but long"]},
}


@pytest.mark.parametrize("how", ENDS)
def test_however_a_text_ended_it_is_told_again_to_its_last_character(host: RouterHost, how: str) -> None:
    """From each position that a chunk named, the last included: there only the end is left to tell."""
    body = completion(TOKENS, **ENDS[how])
    host.worker("s1", "--step-ms", "30")
    truth = repeat(host, "/v1/completions", how, None, body)
    host.clear()
    assert truth.finishes == ["length" if how.startswith("length") else "stop"]
    for position in sorted({0, *positions(truth)}):
        again = repeat(host, "/v1/completions", how, position, body)
        before = "".join(choice["text"] for choice in until(truth, position))
        assert before + again.text == truth.text, position
        assert again.token_ids == truth.token_ids[position:]
        assert (again.finishes, again.usages, again.done) == (truth.finishes, truth.usages, 1)


def test_several_choices_are_told_again_too(host: RouterHost) -> None:
    host.worker("s1")
    several = {**completion(TOKENS, n=3, temperature=0.5), "stream": False}
    del several["stream_options"]
    headers = {"x-request-id": "several"}
    choices = httpx.post(f"{host.url}/v1/completions", json=several, headers=headers, timeout=300).json()["choices"]
    host.clear()
    headers["x-belayer-position"] = "0"
    again = httpx.post(f"{host.url}/v1/completions", json=several, headers=headers, timeout=300).json()["choices"]
    assert again == choices


def test_a_client_that_left_goes_on_and_the_engine_was_freed(host: RouterHost) -> None:
    truth = repeat_with_worker(host, "/v1/completions")
    first = host.worker("s0", "--hold-at", str(CUT))
    before = len(host.told())
    with httpx.stream(
        "POST",
        f"{host.url}/v1/completions",
        json=ROUTES["/v1/completions"],
        headers={"x-request-id": "went"},
        timeout=300,
    ) as answer:
        part = Seen()
        for line in answer.iter_lines():
            if line.startswith("data: "):
                part.chunks.append(json.loads(line[6:]))
            if len(part.token_ids) >= CUT:
                break
    eventually(lambda: first.running() == 0, what="the engine was freed")
    assert [row.split()[0] for row in host.told()[before:]] == ["add", "abort"]
    first.release()
    second = repeat(host, "/v1/completions", "went", CUT)
    assert_joined(part, second, truth)
    assert host.told()[-1].split()[0::2] == ["add", str(CUT)]


def repeat_with_worker(host: RouterHost, path: str) -> Seen:
    reference = host.worker("s1")
    truth = repeat(host, path, "reference", None)
    host.unregister(reference, gone=True, reason="planned: reference is done")
    return truth


def test_the_same_id_twice_at_once_one_runs_the_other_is_refused_or_attaches_by_its_position(host: RouterHost) -> None:
    truth = repeat_with_worker(host, "/v1/completions")
    fake = host.worker("s0", "--hold-at", "5")
    one = Stream(host.url, "/v1/completions", ROUTES["/v1/completions"], {"x-request-id": "twice"})
    one.start()
    eventually(lambda: len(one.seen.token_ids) == 5, what="the first runs")
    refused = repeat(host, "/v1/completions", "twice", None)
    assert refused.status == 409
    two = Stream(
        host.url,
        "/v1/completions",
        ROUTES["/v1/completions"],
        {"x-request-id": "twice", "x-belayer-position": "3"},
    )
    two.start()
    eventually(lambda: two.seen.token_ids == truth.token_ids[3:5], what="the second has what the first got since")
    assert host.slot("s0").running == 1
    fake.release()
    assert one.result().token_ids == truth.token_ids
    assert two.result().token_ids == truth.token_ids[3:]
    assert (two.seen.finishes, two.seen.usages) == (truth.finishes, truth.usages)


BAD = {
    "unknown": ({"x-request-id": "never-was", "x-belayer-position": "0"}, 404, "request_unknown"),
    "no id": ({"x-belayer-position": "0"}, 404, "request_unknown"),
    "no number": ({"x-request-id": "x", "x-belayer-position": "-1"}, 400, "bad_request"),
    "no such wish": ({"x-belayer-on-death": "panic"}, 400, "bad_request"),
    "endless id": ({"x-request-id": "i" * 300}, 400, "bad_request"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_a_typed_error(host: RouterHost, name: str) -> None:
    headers, status, kind = BAD[name]
    answer = httpx.post(f"{host.url}/v1/completions", json=completion(3), headers=headers, timeout=300)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


OTHER = {
    "/v1/chat/completions": chat(TOKENS, top_p=0.5),
    "/v1/completions": completion(TOKENS, prompt="something else"),
    "/inference/v1/generate": tokens_in(TOKENS + 1),
}


@pytest.mark.parametrize("path", ROUTES)
def test_another_content_under_a_known_id_is_a_409_before_the_stream_begins(host: RouterHost, path: str) -> None:
    """Its route answers with a stream, and finds out what is asked for only when that stream has begun."""
    host.worker("s1")
    name = f"content{path.replace('/', '-')}"
    headers = {"x-request-id": name, "x-belayer-position": "0"}
    truth = repeat(host, path, name, None)
    refused = httpx.post(host.url + path, json=OTHER[path], headers=headers, timeout=300)
    assert (refused.status_code, refused.headers["content-type"]) == (409, "application/json")
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("refused", 409)
    assert error["message"].startswith(f"refused: request id {name} belongs to a request with another content")
    again = repeat(host, path, name, 0)  # the story itself is as it was
    assert (again.status, again.token_ids, again.done) == (200, truth.token_ids, 1)
    assert repeat(host, path, name, TOKENS + 1).status == 404
    eventually(lambda: host.status().running + host.status().waiting == 0, what="nothing is left of them")


SHAPES = {
    "two choices": ("/v1/completions", completion(TOKENS, n=2, temperature=0.9)),
    "two choices of a chat": ("/v1/chat/completions", chat(TOKENS, n=2, temperature=0.9)),
    "two choices of tokens": ("/inference/v1/generate", tokens_in(TOKENS, n=2, temperature=0.9)),
    "two prompts": ("/v1/completions", completion(TOKENS, prompt=["one", "two"])),
    "two prompts of tokens": ("/v1/completions", completion(TOKENS, prompt=[[1, 2], [3]])),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_position_in_several_streams_at_once_is_refused_before_they_begin(host: RouterHost, shape: str) -> None:
    host.worker("s1")
    path, body = SHAPES[shape]
    name = f"shape-{shape}"
    assert repeat(host, path, name, None, body).status == 200
    headers = {"x-request-id": name, "x-belayer-position": "3"}
    refused = httpx.post(host.url + path, json=body, headers=headers, timeout=300)
    assert (refused.status_code, refused.json()["error"]["type"]) == (409, "refused")
    eventually(lambda: host.status().running + host.status().waiting == 0, what="nothing is left of it")


@pytest.mark.parametrize(("wish", "finishes"), [("abort", ["abort"]), ("error", []), ("resume", ["length"])])
def test_what_becomes_of_a_stream_whose_worker_dies_is_its_wish(
    host: RouterHost, wish: str, finishes: list[str]
) -> None:
    first = host.worker("s0", "--hold-at", str(CUT))
    stream = Stream(host.url, "/inference/v1/generate", ROUTES["/inference/v1/generate"], {"x-belayer-on-death": wish})
    stream.start()
    eventually(lambda: len(stream.seen.token_ids) == CUT, what="it runs")
    first.kill()
    host.unregister(first)
    second = host.worker("s0")
    seen = stream.result()
    assert seen.finishes == finishes
    assert len(seen.token_ids) == (TOKENS if wish == "resume" else CUT)
    if wish == "error":
        assert "worker_gone" in seen.errors[0]["message"]
    else:
        assert seen.done == 1
        assert not seen.errors
    eventually(lambda: second.running() == 0, what="its engine has nothing")
