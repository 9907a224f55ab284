"""What clients send by mistake or on purpose: a clear 4xx or a closed connection, counted apart, and nobody harmed."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from belayer import procs
from tests.support.router_host import RouterHost
from tests.support.streams import Stream, completion
from tests.support.wait import eventually

LIVE = 6  # requests let in at once
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def host() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        one = RouterHost.start(
            Path(root),
            ["s0"],
            f"max_requests = {LIVE}\nread_deadline_s = 5.0\nmax_body_mb = 24\n"
            "request_deadline_s = 60.0\nlink_silence_s = 120.0",
        )
        try:
            yield one
        finally:
            one.stop()


@pytest.fixture(autouse=True)
def unharmed(host: RouterHost) -> Iterator[None]:
    """After each: healthy, nothing live, no engine failure counted, and a good request is answered."""
    if not host.fakes or host.fakes[-1].process.poll() is not None:
        host.worker("s0")
    failed = host.status().failed_total
    yield
    eventually(lambda: (row := host.status()).running + row.waiting == 0, what="nothing is left over")
    assert host.status().failed_total == failed
    assert host.metric("belayer_torn_links_total") == 0
    answer = httpx.post(
        f"{host.url}/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 3}, timeout=300
    )
    assert answer.json()["usage"]["completion_tokens"] == 3


def body(**more: Any) -> bytes:
    return json.dumps({"model": "smollm2", "prompt": "x", **more}).encode()


def tokens(**more: Any) -> bytes:
    return json.dumps({"model": "smollm2", "token_ids": [1, 2], "sampling_params": more}).encode()


HELLO = [{"role": "user", "content": "x"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
BAD: dict[str, tuple[str, bytes, int]] = {
    "a cut object": ("/v1/completions", b'{"model": "smollm2", "prompt": ', 400),
    "an array": ("/v1/completions", b"[1, 2]", 400),
    "nothing": ("/v1/completions", b"", 400),
    "not utf-8": ("/v1/completions", b'{"model": "smollm2", "prompt": "\xff\xfe"}', 400),
    "half a character": ("/v1/completions", b'{"model": "smollm2", "prompt": "\xe6\x9d"}', 400),
    "a lone surrogate": ("/v1/chat/completions", b'{"model": "smollm2", "messages": "\\ud800"}', 400),
    "deep": ("/v1/completions", b'{"model": "smollm2", "prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}", 400),
    "deep beside a field of ours": (
        "/v1/completions",
        b'{"belayer_position": 1, "x": ' + b"[" * 20000 + b"]" * 20000 + b"}",
        400,
    ),
    "prompt a number": ("/v1/completions", body(prompt=5.5), 400),
    "too long": ("/v1/completions", body(prompt=[1] * 4000), 400),
    "tokens of no vocabulary": ("/v1/completions", body(prompt=[10**9]), 400),
    "no such model": ("/v1/completions", body(model="other"), 404),
    "absurd n": ("/v1/completions", body(n=10**6), 400),
    "n a word": ("/v1/completions", body(n="many"), 400),
    "absurd max_tokens": ("/v1/completions", body(max_tokens=10**12), 400),
    "negative max_tokens": ("/v1/completions", body(max_tokens=-1), 400),
    "no choice": ("/v1/completions", body(n=0), 400),
    "absurd logprobs": ("/v1/completions", body(logprobs=10**6), 400),
    "a seed of no engine": ("/v1/completions", body(seed=10**30), 400),
    "no temperature": ("/v1/completions", b'{"model": "smollm2", "prompt": "x", "temperature": NaN}', 400),
    "half a regex": ("/v1/completions", body(structured_outputs={"regex": "(["}), 400),
    "half a schema": ("/v1/completions", body(structured_outputs={"json": "{"}), 400),
    "bias for no token": ("/v1/completions", body(logit_bias={"999999": 1}), 400),
    "stops at no token": ("/v1/completions", body(stop_token_ids=[10**9]), 400),
    "100,000 prompts": ("/v1/completions", body(prompt=["x"] * 100_000), 400),
    "an embedding as prompt": ("/v1/completions", body(prompt=None, prompt_embeds="AAAA"), 400),
    "chat without a message": ("/v1/chat/completions", body(messages=[]), 400),
    "chat: absurd n": ("/v1/chat/completions", body(messages=HELLO, n=10**6), 400),
    "chat: absurd max_tokens": ("/v1/chat/completions", body(messages=HELLO, max_tokens=10**12), 400),
    "an image": ("/v1/chat/completions", body(messages=[{"role": "user", "content": [IMAGE]}]), 400),
    "tokens in: absurd n": ("/inference/v1/generate", tokens(n=10**6), 400),
    "tokens in: an absurd seed": ("/inference/v1/generate", tokens(seed=10**30), 400),
    "tokens in: recorded tokens": ("/inference/v1/generate", tokens(trace_decode_token_ids=[1]), 400),
    "endless number": (
        "/v1/completions",
        b'{"model": "smollm2", "prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
        400,
    ),
    "temperature not a number": ("/v1/completions", body(temperature="hot"), 400),
    "embeddings, which this model does not make": ("/v1/embeddings", body(input="x"), 404),
    "pooling": ("/pooling", body(input="x"), 404),
    "scores": ("/score", body(text_1="x", text_2="y"), 404),
    "tokens in: words": ("/inference/v1/generate", b'{"token_ids": ["a"], "sampling_params": {}}', 400),
    "more than a worker takes in one message": ("/v1/completions", body(vllm_xargs={"a": "x" * (18 << 20)}), 413),
    "wish": ("/v1/completions", body(belayer_on_death="panic"), 400),
    "position": ("/v1/completions", body(belayer_position="here", request_id="x"), 400),
    "id a number": ("/v1/completions", body(request_id=5), 400),
    "a thinking budget": ("/v1/completions", body(thinking_token_budget=5), 400),
    "tokens in: a thinking budget": (
        "/inference/v1/generate",
        b'{"token_ids": [1], "sampling_params": {"thinking_token_budget": 5}}',
        400,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_a_4xx_counted_apart(host: RouterHost, name: str) -> None:
    path, content, status = BAD[name]
    line = f'belayer_client_mistakes_total{{status="{status}"}}'
    before = host.metric(line)
    answer = httpx.post(f"{host.url}{path}", content=content, headers=JSON, timeout=300)
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert said["error"]["message"] if "error" in said else said["detail"]
    eventually(lambda: host.metric(line) >= before + 1, what="it is counted")
    assert host.metric(line) == before + 1


def test_what_is_too_large_for_a_worker_keeps_no_room(host: RouterHost) -> None:
    """It was refused, and counted as one of those that may be live, for ever. ``unharmed`` asks for room afterwards."""
    path, content, status = BAD["more than a worker takes in one message"]
    for _ in range(LIVE):
        assert httpx.post(f"{host.url}{path}", content=content, headers=JSON, timeout=300).status_code == status


def test_a_body_above_the_bound_is_refused_without_being_kept(host: RouterHost) -> None:
    """100 MB, announced and not announced."""
    before = memory(host)

    def in_pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 20)

    for content in (b" " * (100 << 20), in_pieces()):
        answer = httpx.post(f"{host.url}/v1/completions", content=content, headers=JSON, timeout=300)
        said = answer.status_code, answer.json()["error"]["type"]
        # Read until it is too much: on a machine under load the time in which a body must come may be over before.
        late = {(408, "body_too_slow")} if isinstance(content, Iterator) else set()
        assert said in {(413, "body_too_large"), *late}
    assert memory(host) < before + (32 << 20)
    assert host.metric('belayer_requests_declined_total{reason="body_too_large"}') >= 1


def memory(host: RouterHost) -> int:
    status = Path(f"/proc/{host.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) << 10


@pytest.mark.parametrize("start", [b"POST /v1/completions HTT", b""])
def test_a_head_that_never_ends_loses_its_connection(host: RouterHost, start: bytes) -> None:
    """40 of them at once; the router serves meanwhile."""
    slow = [socket.create_connection(("127.0.0.1", host.port)) for _ in range(40)]
    for sock in slow:
        sock.sendall(start)
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 200
    for sock in slow:
        sock.settimeout(300.0)
        assert sock.recv(100) == b""
        sock.close()
    line = 'belayer_requests_declined_total{reason="head_too_slow"}'
    eventually(lambda: host.metric(line) >= 40, what="all are counted")


def test_a_body_that_never_ends_is_a_408(host: RouterHost) -> None:
    with socket.create_connection(("127.0.0.1", host.port)) as sock:
        sock.settimeout(300.0)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        assert sock.recv(20).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x02\x00\x01\x00", b"\xff" * 400, b"GET " + b"a" * 100_000 + b"\r\n\r\n"]
)
def test_what_is_not_http_is_refused(host: RouterHost, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", host.port)) as sock:
        sock.settimeout(300.0)
        try:
            sock.sendall(noise)
            said = sock.recv(100)
        except ConnectionError:
            return
        assert said == b"" or said.startswith(b"HTTP/1.1 4")


def test_a_long_stream_is_no_slow_head(host: RouterHost) -> None:
    """The bound is on what a client sends, not on what it is sent."""
    host.fakes[-1].kill()
    host.unregister(host.fakes[-1])
    slow = host.worker("s0", "--step-ms", "100")
    stream = Stream(host.url, "/v1/completions", completion(30))
    stream.start()
    assert stream.result().finishes == ["length"]
    slow.kill()
    host.unregister(slow)
    host.worker("s0")


def test_above_the_bound_a_request_is_sent_away_with_a_time_to_come_back(host: RouterHost) -> None:
    host.fakes[-1].kill()
    host.unregister(host.fakes[-1])
    fake = host.worker("s0", "--hold-at", "2")
    streams = [Stream(host.url, "/v1/completions", completion(10)) for _ in range(LIVE)]
    for stream in streams:
        stream.start()
    eventually(lambda: host.status().running == LIVE, what="the house is full")
    answer = httpx.post(f"{host.url}/v1/chat/completions", content=b"{}", headers=JSON, timeout=300)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "too_many_requests"
    assert httpx.get(f"{host.url}/v1/models", timeout=300).status_code == 200
    assert host.metric('belayer_requests_declined_total{reason="too_many_requests"}') == 1
    client = openai.OpenAI(base_url=f"{host.url}/v1", api_key="none", max_retries=8)
    fake.release()
    assert client.completions.create(model="smollm2", prompt="x", max_tokens=3).choices[0].finish_reason == "length"
    for stream in streams:
        assert stream.result().finishes == ["length"]


def test_of_a_burst_just_so_many_are_let_in_as_may_be_live(host: RouterHost) -> None:
    """All arrive before any of them has reached the engine; one asks for several answers."""
    host.fakes[-1].kill()
    host.unregister(host.fakes[-1])
    fake = host.worker("s0", "--hold-at", "2")
    before = host.metric('belayer_requests_declined_total{reason="too_many_requests"}')

    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=host.url, timeout=300, limits=httpx.Limits(max_connections=40)) as client:
            bodies = [body(max_tokens=4, n=3 if i == 0 else 1) for i in range(40)]
            posts = [asyncio.create_task(client.post("/v1/completions", content=one, headers=JSON)) for one in bodies]
            most = 0
            while most < sum(not post.done() for post in posts):  # until each of them is held, or was sent away
                await asyncio.wait(posts, timeout=0.05)
                row = await asyncio.to_thread(host.status)
                most = max(most, row.running + row.waiting)
            assert most <= LIVE
            fake.release()
            return list(await asyncio.gather(*posts))

    answers = asyncio.run(burst())
    let_in = [answer for answer in answers if answer.status_code == 200]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert sum(len(answer.json()["choices"]) for answer in let_in) >= LIVE - 2, "room for one is no room for three"
    declined = host.metric('belayer_requests_declined_total{reason="too_many_requests"}')
    assert declined - before == 40 - len(let_in)


def test_more_answers_than_may_ever_be_live_are_refused_by_name(host: RouterHost) -> None:
    answer = httpx.post(f"{host.url}/v1/completions", content=body(prompt=["x", "y"], n=4), headers=JSON, timeout=300)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "bad_request")
    assert "8 answers at once, router.max_requests is 6" in answer.json()["error"]["message"]


def test_unknown_fields_pass(host: RouterHost) -> None:
    answer = httpx.post(
        f"{host.url}/v1/completions", content=body(max_tokens=3, something_new={"a": 1}), headers=JSON, timeout=300
    )
    assert answer.status_code == 200


def test_no_descriptor_is_left_behind(host: RouterHost) -> None:
    def count() -> int:
        return len(list(Path(f"/proc/{host.process.pid}/fd").iterdir()))

    assert procs.start_time(host.process.pid)
    before = count()
    for _ in range(50):
        sock = socket.create_connection(("127.0.0.1", host.port))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{")
        sock.close()
    eventually(lambda: count() <= before + 2, what="closed connections are closed here too")
