"""/v1/messages and /v1/responses, which vLLM's front end serves too: a stream goes on exactly, or ends by an error of
its own API; never by a broken connection, and never by an end that says nothing of what is missing.

The router of this module cuts requests short when a worker dies (``on_death = "abort"``), which neither API can tell;
those that go on wish for it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.support.apis import APIS, MESSAGES, RESPONSES, WORDS, Asking, Told, asking, body, same
from tests.support.router_host import FakeWorker, RouterHost
from tests.support.wait import eventually

TOKENS, CUT = 30, 11
HELD = ("--hold-at", str(CUT))
each = pytest.mark.parametrize("path", APIS)


@pytest.fixture(scope="module")
def router() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        host = RouterHost.start(Path(root), ["s0", "s1"], 'request_deadline_s = 60.0\non_death = "abort"')
        try:
            yield host
        finally:
            host.stop()


@pytest.fixture
def host(router: RouterHost) -> Iterator[RouterHost]:
    yield router
    router.clear()
    eventually(lambda: (row := router.status()).running + row.waiting == 0, what="nothing is left over")


@pytest.fixture(scope="module")
def truths(router: RouterHost) -> dict[str, Told]:
    fake = router.worker("s0")
    found = {path: asking(router.url, path, TOKENS).result() for path in APIS}
    router.unregister(fake, gone=True, reason="planned: reference is done")
    fake.kill()
    assert all(len(one.text) > 20 and one.end for one in found.values())
    return found


def held(host: RouterHost, path: str, **headers: str) -> tuple[Asking, FakeWorker]:
    """A stream in its middle."""
    worker = host.worker("s0", *HELD)
    one = asking(host.url, path, TOKENS, **headers)
    eventually(lambda: one.told.text, what="it has begun")
    return one, worker


@each
def test_the_main_is_killed_and_the_stream_goes_on(host: RouterHost, truths: dict[str, Told], path: str) -> None:
    one, worker = held(host, path, on_death="resume")
    worker.kill()
    host.unregister(worker)
    assert host.status().waiting == 1
    host.worker("s0")
    same(one.result(), truths[path])


@each
def test_the_slot_is_quarantined_and_the_stream_goes_on(host: RouterHost, truths: dict[str, Told], path: str) -> None:
    one, worker = held(host, path, on_death="resume")
    other = host.worker("s1")
    worker.kill()
    host.unregister(worker, gone=True)
    same(one.result(), truths[path])
    assert other.process.poll() is None


def error_of(told: Told, path: str) -> tuple[str, str]:
    """Code and message of the one error, which ends the stream."""
    assert told.broken is None, "the stream is ended, not broken off"
    assert told.status == 200
    assert [name for name, _ in told.events][-1] == "error"
    (data,) = told.errors
    assert data["type"] == "error"
    if path == MESSAGES:
        assert set(data) == {"type", "error"}
        return data["error"]["type"], data["error"]["message"]
    assert data["sequence_number"] == len(told.events) - 1
    return data["code"], data["message"]


@each
@pytest.mark.parametrize("wish", ["error", ""], ids=["as it wished", "cut short by the configuration"])
def test_a_stream_that_ends_does_so_by_an_error_of_its_api(host: RouterHost, path: str, wish: str) -> None:
    one, worker = held(host, path, **({"on_death": wish} if wish else {}))
    worker.kill()
    host.unregister(worker)
    told = one.result()
    code, said = error_of(told, path)
    assert code == "worker_gone"
    assert said.startswith("worker_gone: ")
    assert told.end == {}, "nothing says that it is whole"


@each
def test_a_stream_that_an_admin_aborts_ends_by_an_error(host: RouterHost, path: str) -> None:
    one, worker = held(host, path)
    assert httpx.post(f"{host.url}/abort_requests", json={}, timeout=300).status_code == 200
    told = one.result()
    assert error_of(told, path)[0] == "refused"
    assert told.end == {}
    eventually(lambda: worker.running() == 0, what="the engine is free")


@each
@pytest.mark.parametrize("wish", ["error", ""], ids=["as it wished", "cut short by the configuration"])
def test_an_answer_that_is_no_stream_is_an_error_of_its_api(host: RouterHost, path: str, wish: str) -> None:
    worker = host.worker("s0", *HELD)
    answers: list[httpx.Response] = []
    one = Whole(host.url + path, body(path, TOKENS, stream=False), wish, answers)
    one.start()
    eventually(lambda: worker.running() == 1, what="it is on board")
    worker.kill()
    host.unregister(worker)
    one.join(300)
    (answer,) = answers
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    said = answer.json()
    assert said["error"]["type"] == "worker_gone"
    assert said["error"]["message"].startswith("worker_gone: ")
    assert said.get("type") == ("error" if path == MESSAGES else None)


class Whole(Asking):
    def __init__(self, url: str, what: dict[str, Any], wish: str, answers: list[httpx.Response]) -> None:
        super().__init__(url, "", 0)
        self._what, self._answers = what, answers
        self._wish = {"x-belayer-on-death": wish} if wish else {}

    def run(self) -> None:
        self._answers.append(httpx.post(self._url, json=self._what, headers=self._wish, timeout=300))


@each
def test_a_client_that_leaves_frees_the_engine(host: RouterHost, path: str) -> None:
    worker = host.worker("s0", "--step-ms", "20")
    one = asking(host.url, path, 2000)
    eventually(lambda: one.told.text, what="it has begun")
    one.leave()
    one.result()
    eventually(lambda: worker.running() == 0, what="the engine is free")


@each
@pytest.mark.parametrize("headers", [{"x-belayer-position": "3"}, {"x-belayer-on-death": "abort"}])
def test_what_an_api_cannot_say_cannot_be_asked_for(host: RouterHost, path: str, headers: dict[str, str]) -> None:
    answer = httpx.post(host.url + path, json=body(path, TOKENS), headers=headers, timeout=300)
    assert answer.status_code == 409
    assert answer.json()["error"]["type"] == "refused"
    assert path in answer.json()["error"]["message"]
    assert answer.json().get("type") == ("error" if path == MESSAGES else None)


def test_the_clients_of_both_apis_understand_their_errors(host: RouterHost) -> None:
    """What users have: anthropic's raises for the event, openai's hands it on as its own error event."""
    wish = {"x-belayer-on-death": "error"}
    worker = host.worker("s0", *HELD)
    theirs = anthropic.Anthropic(base_url=host.url, api_key="none", max_retries=0, timeout=300)
    stream = theirs.messages.create(
        model="smollm2",
        max_tokens=TOKENS,
        messages=[{"role": "user", "content": WORDS}],
        stream=True,
        extra_headers=wish,
    )
    assert next(event for event in stream if event.type == "content_block_delta")
    worker.kill()
    host.unregister(worker)
    with pytest.raises(anthropic.APIStatusError, match="worker_gone"):
        list(stream)
    worker = host.worker("s0", *HELD)
    ours = openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=0, timeout=300)
    last = None
    for event in ours.responses.create(model="smollm2", input=WORDS, stream=True, extra_headers=wish):
        last = event
        if event.type == "response.output_text.delta" and worker.process.poll() is None:
            worker.kill()
            host.unregister(worker)
    assert last is not None
    assert (last.type, getattr(last, "code", "")) == ("error", "worker_gone")


BAD: dict[str, tuple[str, dict[str, Any], int]] = {
    "messages without a bound": (MESSAGES, {"messages": [{"role": "user", "content": "x"}]}, 400),
    "messages of nobody": (MESSAGES, {"max_tokens": 3, "messages": [{"role": "nobody", "content": "x"}]}, 400),
    "messages too long": (MESSAGES, {"max_tokens": 3, "messages": [{"role": "user", "content": "x " * 5000}]}, 400),
    "messages for no model": (MESSAGES, {**body(MESSAGES, 3), "model": "other"}, 404),
    "messages with a budget to think": (
        MESSAGES,
        {**body(MESSAGES, 3), "thinking": {"type": "enabled", "budget_tokens": 5}},
        400,
    ),
    "input a number": (RESPONSES, {"input": 5}, 400),
    "input too long": (RESPONSES, {"input": "x " * 5000}, 400),
    "an answer before that nobody kept": (RESPONSES, {"input": "x", "previous_response_id": "resp_none"}, 404),
    "in the background": (RESPONSES, {"input": "x", "background": True}, 400),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_4xx_and_no_failure(host: RouterHost, name: str) -> None:
    path, what, status = BAD[name]
    host.worker("s0")
    failed = host.status().failed_total
    mistakes = host.metric(f'belayer_client_mistakes_total{{status="{status}"}}')
    answer = httpx.post(host.url + path, json={"model": "smollm2", **what}, timeout=300)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert answer.json().get("type") == ("error" if path == MESSAGES else None)
    assert host.status().failed_total == failed
    assert host.metric(f'belayer_client_mistakes_total{{status="{status}"}}') == mistakes + 1
    said = (host.root / "router.log").read_text()
    assert "Traceback" not in said, "of errors that were told by name, here and in the tests before"
