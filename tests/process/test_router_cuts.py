"""A real router before recorded engines that are really killed: each token once, in order, whatever the cut."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from belayer.errors import Fenced, SlotUnknown, WorkerGone
from belayer.paths import Paths
from belayerd.router.journal_reader import read
from tests.support.router_host import TREE, FakeWorker, RouterHost
from tests.support.streams import Seen, Stream, chat, completion, tokens_in
from tests.support.wait import eventually

TOKENS = 30
ROUTES = {
    "/v1/chat/completions": chat(TOKENS, logprobs=True, top_logprobs=2),
    "/v1/completions": completion(TOKENS, logprobs=1),
    "/inference/v1/generate": tokens_in(TOKENS, logprobs=1),
}


@pytest.fixture(scope="module")
def router() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        host = RouterHost.start(Path(root), ["s0", "s1", "s2"], "request_deadline_s = 120.0\njournal_every = 8")
        try:
            yield host
        finally:
            host.stop()


@pytest.fixture
def host(router: RouterHost) -> Iterator[RouterHost]:
    yield router
    router.clear()


def unfailed(host: RouterHost, path: str, body: dict[str, Any], slot: str = "s2") -> Seen:
    fake = host.worker(slot)
    stream = Stream(host.url, path, body)
    stream.start()
    seen = stream.result()
    host.unregister(fake, gone=True, reason="planned: reference is done")
    assert seen.status == 200
    assert not seen.errors
    return seen


def held(host: RouterHost, slot: str, tokens: int) -> None:
    """Wait until the router has had exactly ``tokens`` tokens of the slot's worker and it still runs something."""
    eventually(
        lambda: (row := host.slot(slot)).tokens_total == tokens and row.running > 0, what=f"{tokens} tokens of {slot}"
    )


def die(host: RouterHost, fake: FakeWorker, **how: Any) -> None:
    """What belayerd does at a death: see it, tell the router."""
    fake.kill()
    host.unregister(fake, **how)
    assert not host.slot(fake.slot).registered


def fresh(host: RouterHost, slot: str) -> int:
    """Tokens that the router has counted for a slot so far; the counter is per slot name, not per worker."""
    return next((row.tokens_total for row in host.status().slots if row.slot == slot), 0)


def assert_same(seen: Seen, truth: Seen) -> None:
    assert (seen.status, seen.error, seen.errors) == (200, None, [])
    assert seen.text == truth.text
    assert seen.token_ids == truth.token_ids
    assert seen.logprobs == truth.logprobs
    assert seen.finishes == truth.finishes
    assert seen.usages == truth.usages
    assert (seen.roles, len(seen.usages), seen.done) == (truth.roles, len(truth.usages), 1)
    assert len(seen.finishes) == 1


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("cut", [0, 1, 15, TOKENS - 1, TOKENS])
def test_a_stream_outlives_its_worker(host: RouterHost, path: str, cut: int) -> None:
    """Killed after ``cut`` tokens; the slot has no worker for a while; the next life continues. At the last cut all
    tokens were told but not the finish."""
    truth = unfailed(host, path, ROUTES[path])
    before = fresh(host, "s0")
    first = host.worker("s0", "--hold-at", str(cut), "--late-finish")
    stream = Stream(host.url, path, ROUTES[path])
    stream.start()
    held(host, "s0", before + cut)
    die(host, first)
    assert host.status().waiting == 1
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 503
    host.worker("s0")
    seen = stream.result()
    assert_same(seen, truth)
    assert len(truth.token_ids) == TOKENS
    row = host.slot("s0")
    assert row.last_resume is not None
    assert row.last_resume.resumed == 1
    assert row.last_resume.first_token_ms >= 0
    assert row.tokens_total == before + TOKENS


def test_the_openai_client_sees_no_difference(host: RouterHost) -> None:
    client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0)

    def talk() -> tuple[str, list[str], list[str | None], list[Any]]:
        body = chat(TOKENS)
        ids = body.pop("return_token_ids")
        rows = list(client.chat.completions.create(**body, extra_body={"return_token_ids": ids}))
        deltas = [row.choices[0] for row in rows if row.choices]
        text = "".join(choice.delta.content or "" for choice in deltas)
        finishes = [choice.finish_reason for choice in deltas if choice.finish_reason]
        return text, [c.delta.role for c in deltas if c.delta.role], finishes, [r.usage for r in rows if r.usage]

    reference = host.worker("s2")
    truth = talk()
    host.unregister(reference, gone=True, reason="planned: reference is done")
    before = fresh(host, "s0")
    first = host.worker("s0", "--hold-at", "7")
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(talk()), daemon=True)
    thread.start()
    held(host, "s0", before + 7)
    die(host, first)
    host.worker("s0")
    thread.join(300)
    assert got == [truth]
    assert (truth[1], truth[2], len(truth[3])) == (["assistant"], ["length"], 1)


def test_the_answer_that_is_not_streamed_is_equal_too(host: RouterHost) -> None:
    body = {**completion(TOKENS, n=3, temperature=0.8, seed=5), "stream": False}
    del body["stream_options"]
    reference = host.worker("s2")
    truth = httpx.post(f"{host.url}/v1/completions", json=body, timeout=300).json()
    host.unregister(reference, gone=True, reason="planned: reference is done")
    before = fresh(host, "s0")
    first = host.worker("s0", "--hold-at", "9")
    got: list[Any] = []
    ask = threading.Thread(
        target=lambda: got.append(httpx.post(f"{host.url}/v1/completions", json=body, timeout=300).json()), daemon=True
    )
    ask.start()
    eventually(lambda: host.slot("s0").running == 3 and fresh(host, "s0") >= before + 9)
    die(host, first)
    host.worker("s0")
    ask.join(300)
    assert got[0]["choices"] == truth["choices"]
    assert got[0]["usage"] == truth["usage"]


def test_two_slots_one_dies_every_stream_is_equal(host: RouterHost) -> None:
    bodies = [completion(TOKENS, prompt="word " * n) for n in range(1, 9)]
    truths = [unfailed(host, "/v1/completions", body) for body in bodies]
    first = host.worker("s0", "--hold-at", "5")
    second = host.worker("s1", "--hold-at", "5")  # or a fast slot is the least loaded for ever
    streams = [Stream(host.url, "/v1/completions", body) for body in bodies]
    for stream in streams:
        stream.start()
    eventually(lambda: host.slot("s0").running >= 3, what="streams on both slots")
    second.release()
    die(host, first)
    host.worker("s0")
    for stream, truth in zip(streams, truths, strict=True):
        assert_same(stream.result(), truth)


def test_a_quarantined_slot_gives_its_streams_to_the_others(host: RouterHost) -> None:
    truth = unfailed(host, "/v1/chat/completions", chat(TOKENS))
    before = fresh(host, "s0")
    first = host.worker("s0", "--hold-at", "11")
    stream = Stream(host.url, "/v1/chat/completions", chat(TOKENS))
    stream.start()
    held(host, "s0", before + 11)
    host.worker("s1")
    die(host, first, gone=True)
    assert_same(stream.result(), truth)


def test_a_worker_that_outlived_its_replacement_is_not_heard(host: RouterHost) -> None:
    """Paused, replaced, released: it goes on talking to a closed door."""
    truth = unfailed(host, "/v1/completions", completion(TOKENS))
    before = fresh(host, "s0")
    old = host.worker("s0", "--hold-at", "4")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    held(host, "s0", before + 4)
    host.unregister(old)
    old.release()
    eventually(lambda: old.running() == 0, what="the old engine ran to its end")
    host.worker("s0")
    assert_same(stream.result(), truth)
    assert fresh(host, "s0") == before + TOKENS


def test_output_stamped_with_an_old_generation_is_dropped_and_counted(host: RouterHost) -> None:
    truth = unfailed(host, "/v1/completions", completion(TOKENS))
    before = fresh(host, "s0")
    liar = host.worker("s0", "--stamp-generation", "0")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    eventually(lambda: host.slot("s0").late_dropped_total >= TOKENS, what="late output counted")
    assert fresh(host, "s0") == before
    die(host, liar)
    host.worker("s0")
    assert_same(stream.result(), truth)


def test_an_unreadable_message_costs_the_link_not_the_streams(host: RouterHost) -> None:
    truth = unfailed(host, "/v1/completions", completion(TOKENS))
    before = fresh(host, "s0")
    babbler = host.worker("s0", "--hold-at", "6")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    held(host, "s0", before + 6)
    log = host.root / "router.log"
    torn = log.read_text().count("link_torn")
    babbler.babble()
    # Not by the status: the router makes the link anew at once, and a glance may miss the moment between the two.
    eventually(lambda: log.read_text().count("link_torn") > torn, what="the link was closed")
    host.worker("s0")
    assert_same(stream.result(), truth)


def test_old_generations_are_fenced(host: RouterHost) -> None:
    old = host.worker("s0")
    host.unregister(old)
    new = host.worker("s0")
    with pytest.raises(Fenced):
        host.register(old)
    with pytest.raises(Fenced):
        host.unregister(old)
    host.register(new)  # told again: no error, nothing changes
    assert host.slot("s0").worker_id == new.worker_id


def test_a_worker_that_does_not_answer_is_refused_and_may_come_later(host: RouterHost) -> None:
    silent = host.worker("s0", register=False)
    silent.kill()
    with pytest.raises(WorkerGone):
        host.register(silent)
    assert not host.slot("s0").registered
    with pytest.raises(SlotUnknown):
        host.register(FakeWorker("nowhere", 1, "nowhere-1", "ipc:///tmp/none", silent.process))
    host.worker("s0")


@pytest.mark.parametrize("registered", [True, False])
def test_a_client_that_leaves_frees_the_engine(host: RouterHost, registered: bool) -> None:
    fake = host.worker("s0", "--hold-at", "3") if registered else None
    before = host.status()
    with httpx.stream("POST", f"{host.url}/v1/completions", json=completion(TOKENS), timeout=300):
        if fake is not None:
            eventually(lambda: fake.running() == 1, what="the engine has it")
        else:
            eventually(lambda: host.status().waiting == 1, what="it waits")
    eventually(lambda: host.status().running + host.status().waiting == 0, what="the router forgot it")
    if fake is not None:
        eventually(lambda: fake.running() == 0, what="the engine was told")
    assert host.status().failed_total == before.failed_total


BAD: dict[str, tuple[str, bytes | dict[str, Any], int]] = {
    "not json": ("/v1/completions", b"{", 400),
    "wrong type": ("/v1/completions", {"model": "smollm2", "prompt": 5.5}, 400),
    "too long": ("/v1/completions", {"model": "smollm2", "prompt": [1] * 4000, "max_tokens": 5}, 400),
    "no such model": ("/v1/completions", {"model": "other", "prompt": "x"}, 404),
    "absurd n": ("/v1/completions", {"model": "smollm2", "prompt": "x", "n": 100000}, 400),
    "negative max_tokens": ("/v1/completions", {"model": "smollm2", "prompt": "x", "max_tokens": -1}, 400),
    "not utf-8": ("/v1/completions", b'{"model": "\xff\xfe"}', 400),
    "no messages": ("/v1/chat/completions", {"model": "smollm2"}, 400),
}


@pytest.mark.parametrize("name", BAD)
def test_a_client_mistake_is_4xx_and_harms_nobody(host: RouterHost, name: str) -> None:
    path, body, status = BAD[name]
    host.worker("s0")
    before = host.status()
    send: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = httpx.post(f"{host.url}{path}", headers={"content-type": "application/json"}, timeout=300, **send)
    assert answer.status_code == status, answer.text
    assert answer.json()
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 200
    after = host.status()
    assert (after.failed_total, after.running, after.waiting) == (before.failed_total, 0, 0)


def test_slots_that_all_gave_up_are_told_at_once(host: RouterHost) -> None:
    """Whatever request_deadline_s says: none of them comes back by itself. A stream that waits, new requests, an admin
    call; and when one is on its way again, requests wait as before."""
    before = fresh(host, "s0")
    fake = host.worker("s0", "--hold-at", "3")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    held(host, "s0", before + 3)
    die(host, fake, gone=True)
    eventually(lambda: host.status().waiting == 1, what="it waits for another worker")
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 5}
    with host.given_up("s0", "s1", "s2"):
        seen = stream.result()
        assert len(seen.token_ids) == 3
        assert "all slots of this host have given up" in seen.errors[0]["message"]
        answer = httpx.post(f"{host.url}/v1/completions", json=body, timeout=300)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "no_healthy_slot")
        assert "all slots of this host have given up" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 0
        admin = httpx.post(f"{host.url}/reset_prefix_cache", timeout=300)
        assert (admin.status_code, "has given up" in admin.text) == (503, True)
        assert host.status().given_up == ("s0", "s1", "s2")
    with host.given_up("s0", "s1"):
        later = Stream(host.url, "/v1/completions", completion(TOKENS))
        later.start()
        eventually(lambda: host.status().waiting == 1, what="s2 may come, so it waits")
        host.worker("s2")
        assert later.result().finishes


def test_no_fleet_is_said_by_exit_2(host: RouterHost) -> None:
    for words in (["fleet"], ["fleet", "--json"]):
        command = [sys.executable, "-m", "belayerctl", *words]
        env = {**os.environ, "BELAYER_ROOT": str(host.root)}
        done = subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "is in no fleet: fleet.listen is not set" in done.stderr
        assert bool(done.stdout) == ("--json" in words)


def test_a_request_that_kills_workers_is_ended_and_its_siblings_freed(host: RouterHost) -> None:
    body = {"model": "smollm2", "prompt": "x", "max_tokens": TOKENS, "n": 2}
    got: list[httpx.Response] = []
    ask = threading.Thread(
        target=lambda: got.append(httpx.post(f"{host.url}/v1/completions", json=body, timeout=300)), daemon=True
    )
    ask.start()
    for _ in range(3):
        fake = host.worker("s0", "--hold-at", "0")
        eventually(lambda fake=fake: fake.running() == 2, what="both choices are on board")
        die(host, fake)
    ask.join(300)
    (answer,) = got
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "poison_request"
    assert answer.headers["x-should-retry"] == "false"
    eventually(lambda: host.status().running + host.status().waiting == 0, what="its sibling is gone too")


def test_a_session_stays_on_its_slot(host: RouterHost) -> None:
    host.worker("s0", "--hold-at", "1")
    host.worker("s1", "--hold-at", "1")
    streams = [
        Stream(host.url, "/v1/completions", completion(TOKENS), {"x-smg-routing-key": "trajectory-7"}) for _ in range(4)
    ]
    for stream in streams:
        stream.start()
    eventually(lambda: host.status().running == 4)
    assert sorted(row.running for row in host.status().slots if row.registered) == [0, 4]
    for fake in host.fakes:
        fake.release()
    for stream in streams:
        assert stream.result().finishes == ["length"]


def test_many_streams_and_many_deaths_not_one_token_lost_or_doubled(host: RouterHost) -> None:
    """40 streams of different lengths over two slots; a worker dies whenever 150 more tokens have come."""
    # The shortest is longer than its share of the 600 tokens after which the last kill comes: both slots are at work.
    bodies = [completion(40 + n, prompt="word " * (n % 7 + 1)) for n in range(40)]
    reference = host.worker("s2")
    asked = [Stream(host.url, "/v1/completions", body) for body in bodies]
    for stream in asked:
        stream.start()
    truths = [stream.result() for stream in asked]
    host.unregister(reference, gone=True, reason="planned: reference is done")
    slow = ("--step-ms", "120")  # at the last kill, some time later, they are still in their midst
    workers = [host.worker("s0", *slow), host.worker("s1", *slow)]
    # Started beforehand: while a process starts, the other slot would come to the end of its work.
    spares = [[host.worker(name, *slow, register=False) for _ in range(2)] for name in ("s0", "s1")]
    start = host.status().tokens_total
    streams = [Stream(host.url, "/v1/completions", body) for body in bodies]
    for stream in streams:
        stream.start()
    for kill in range(1, 5):
        eventually(lambda kill=kill: host.status().tokens_total >= start + 150 * kill, what=f"kill {kill}")
        victim = workers[kill % 2]
        assert host.slot(victim.slot).running > 0
        die(host, victim)
        workers[kill % 2] = spares[kill % 2].pop(0)
        host.register(workers[kill % 2])
    for stream, truth in zip(streams, truths, strict=True):
        assert_same(stream.result(), truth)
    assert host.status().tokens_total == start + sum(40 + n for n in range(40))


def test_a_beam_search_goes_on_through_a_death(host: RouterHost) -> None:
    """Each of its tokens is a request of its own: none needs to be continued, and all find a worker."""
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 8, "n": 2, "use_beam_search": True, "temperature": 0}

    def search() -> Any:
        answer = httpx.post(f"{host.url}/v1/completions", json=body, timeout=300).json()
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]], answer["usage"]

    reference = host.worker("s2")
    truth = search()
    host.unregister(reference, gone=True, reason="planned: reference is done")
    before = fresh(host, "s0")
    first = host.worker("s0", "--step-ms", "1000")
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(search()), daemon=True)
    thread.start()
    eventually(lambda: before + 3 <= fresh(host, "s0"), what="the search is in its midst")
    die(host, first)
    assert not got
    host.worker("s0")
    thread.join(300)
    assert got == [truth]


def test_admin_routes_reach_all_workers(host: RouterHost) -> None:
    host.worker("s0")
    host.worker("s1")
    assert httpx.post(f"{host.url}/pause?mode=keep", timeout=300).status_code == 200
    # vLLM asks all and wants one answer
    assert httpx.get(f"{host.url}/is_paused", timeout=300).json() == {"is_paused": True}
    assert httpx.post(f"{host.url}/resume", timeout=300).status_code == 200
    assert httpx.get(f"{host.url}/is_paused", timeout=300).json() == {"is_paused": False}
    assert httpx.post(f"{host.url}/reset_prefix_cache", timeout=300).status_code == 200
    refused = httpx.post(f"{host.url}/sleep", timeout=300)
    assert refused.status_code == 500
    assert "no sleep" in refused.json()["error"]["message"]


def test_a_worker_that_comes_during_a_pause_is_paused_before_it_gets_requests(host: RouterHost) -> None:
    truth = unfailed(host, "/v1/completions", completion(TOKENS))
    before = fresh(host, "s0")
    first = host.worker("s0", "--hold-at", "5")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    held(host, "s0", before + 5)
    assert httpx.post(f"{host.url}/pause?mode=keep", timeout=300).status_code == 200
    die(host, first)
    second = host.worker("s0")
    assert httpx.get(f"{host.url}/is_paused", timeout=300).json() == {"is_paused": True}
    eventually(lambda: second.running() == 1, what="the second has the request")
    assert fresh(host, "s0") == before + 5
    assert httpx.post(f"{host.url}/resume", timeout=300).status_code == 200
    assert_same(stream.result(), truth)


def test_metrics_stand_beside_those_of_vllm(host: RouterHost) -> None:
    host.worker("s0")
    text = httpx.get(f"{host.url}/metrics", timeout=300).text
    assert 'belayer_slot_up{slot="s0"} 1.0' in text
    assert "belayer_tokens_total" in text
    assert "vllm:" in text


def test_the_journal_tells_each_request_with_its_makers(host: RouterHost) -> None:
    before = fresh(host, "s0")
    first = host.worker("s0", "--hold-at", "10")
    stream = Stream(host.url, "/v1/completions", {**completion(TOKENS), "request_id": "for-the-journal"})
    stream.start()
    held(host, "s0", before + 10)
    die(host, first)
    second = host.worker("s0")
    seen = stream.result()

    def told() -> Any:
        stories = read(Paths(host.root).journal).stories.values()
        return next((one for one in stories if "for-the-journal" in one.external_id and one.reason), None)

    story = eventually(told, what="its end is in the journal")
    assert story.tokens == seen.token_ids
    assert story.reason == "length"
    assert [span[:3] for span in story.spans] == [(0, "s0", first.generation), (10, "s0", second.generation)]
