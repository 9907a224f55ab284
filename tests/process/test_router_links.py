"""The wire between router and worker, broken on purpose: a stolen place, garbage, a worker that does not answer, a
client that leaves at the worst moment. Every request still ends, each token once."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgpack
import pytest
import zmq

from belayer.clock import monotonic
from belayer.errors import WorkerGone
from belayer.messages.common import Ping, Pong
from belayer.paths import Paths
from belayer.rpc import call_sync
from tests.support.router_host import FakeWorker, RouterHost
from tests.support.streams import Seen, Stream, chat, completion
from tests.support.wait import eventually

TOKENS = 30
SILENCE_S = 4.0  # of a link


@pytest.fixture(scope="module")
def router() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        host = RouterHost.start(
            Path(root),
            ["s0", "s1"],
            f"request_deadline_s = 30.0\nsilence_s = 15.0\nlink_silence_s = {SILENCE_S}",
            urls=True,
        )
        try:
            yield host
        finally:
            host.stop()


@pytest.fixture
def host(router: RouterHost) -> Iterator[RouterHost]:
    yield router
    router.clear()


def truth_of(host: RouterHost) -> Seen:
    fake = host.worker("s1")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    seen = stream.result()
    host.unregister(fake, gone=True, reason="planned: reference is done")
    return seen


def begun(host: RouterHost, tokens: int) -> Stream:
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    eventually(lambda: len(stream.seen.token_ids) == tokens, what="the stream has begun")
    return stream


class Thief:
    """A peer with the identity of the router's front at a worker's socket."""

    def __init__(self, fake: FakeWorker) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IDENTITY, b"\0\0")
        self._socket.connect(fake.endpoint)

    def say(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def hear(self) -> list[bytes]:
        assert self._socket.poll(300_000), "the place is taken"
        return self._socket.recv_multipart()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_a_peer_that_takes_the_routers_place_costs_no_token(host: RouterHost) -> None:
    truth = truth_of(host)
    before = host.metric("belayer_torn_links_total")
    fake = host.worker("s0", "--hold-at", "5", "--step-ms", "10")
    stream = begun(host, 5)
    thief = Thief(fake)
    thief.say(b"hello")
    assert thief.hear()[0] == b"ready"
    fake.release()
    assert thief.hear()[0] == b"out", "output went to the thief"
    thief.close()
    seen = stream.result()
    assert (seen.token_ids, seen.text, seen.finishes) == (truth.token_ids, truth.text, truth.finishes)
    assert host.metric("belayer_torn_links_total") > before
    assert host.status().failed_total == 0


def test_a_request_lost_on_the_way_to_its_worker_is_given_again(host: RouterHost) -> None:
    """The worker has nothing to say about it, ever; only the count of what it got tells."""
    truth = truth_of(host)
    told = len(host.told())
    host.worker("s0", "--lose-add")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    seen = stream.result()
    assert (seen.token_ids, seen.finishes) == (truth.token_ids, truth.finishes)
    assert [row.split()[0] for row in host.told()[told:]] == ["lost", "add"]


@pytest.mark.parametrize("frames", [[b"garbage"], [b"add"], [b"add", b"", b"\xc1"], [b"\x00" * 5000], [b"abort", b"x"]])
def test_garbage_on_a_workers_socket_harms_nobody(host: RouterHost, frames: list[bytes]) -> None:
    """From a stranger with an identity of a front: dropped or answered with an error, never the end of the worker."""
    fake = host.worker("s0", "--hold-at", "3")
    stream = begun(host, 3)
    stranger = zmq.Context()
    with stranger.socket(zmq.DEALER) as sock:
        sock.set(zmq.LINGER, 200)
        sock.set(zmq.IDENTITY, b"\x07\0")
        sock.connect(fake.endpoint)
        sock.send_multipart(frames)
        sock.send_multipart([b"hello"])
        assert sock.poll(300_000), "it still answers"
    stranger.term()
    fake.release()
    assert stream.result().finishes == ["length"]


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70, b"\x00"])
def test_garbage_on_the_control_socket_harms_nobody(host: RouterHost, noise: bytes) -> None:
    path = Paths(host.root).router_sock
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        raw.sendall(noise)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sock:
        sock.set(zmq.LINGER, 200)
        sock.connect(f"ipc://{path}")
        for frames in ([noise], [b"1", noise], [b"1", msgpack.packb({"type": "Nonsense"})], [b"", b"", b""]):
            sock.send_multipart(frames)
    context.term()
    assert call_sync(path, Ping(), Pong).daemon == "belayer-router"


def test_a_worker_that_does_not_answer_the_hello_is_not_registered_until_it_does(host: RouterHost) -> None:
    """It is in a long call when a router that has just come back asks: whoever registered it hears so, and is not
    needed again."""
    fake = host.worker("s0", register=False)
    told = len(host.told())
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sock:
        sock.set(zmq.LINGER, 200)
        sock.connect(fake.endpoint)
        sock.send_multipart([b"util", msgpack.packb([0, 7, "collective_rpc", ["hold"]])])
        eventually(lambda: "hold" in host.told()[told:], what="it is in a call")
        with pytest.raises(WorkerGone, match="did not answer the hello"):
            host.register(fake)
    context.term()
    assert not host.slot("s0").registered
    fake.release()
    eventually(lambda: host.slot("s0").registered, what="it answered, and serves")
    stream = Stream(host.url, "/v1/completions", completion(TOKENS))
    stream.start()
    assert stream.result().finishes == ["length"]


def test_a_worker_that_never_answers_is_let_go_when_it_is_unregistered(host: RouterHost) -> None:
    deaf = host.worker("s0", "--deaf", register=False)
    with pytest.raises(WorkerGone, match="did not answer the hello"):
        host.register(deaf)
    host.unregister(deaf)
    host.worker("s0")
    assert host.slot("s0").registered


def test_a_request_about_which_its_worker_is_silent_moves_to_another_slot(host: RouterHost) -> None:
    truth = truth_of(host)
    silent = host.worker("s0", "--hold-at", "4")
    stream = begun(host, 4)
    host.worker("s1")
    seen = stream.result()
    assert (seen.token_ids, seen.finishes) == (truth.token_ids, truth.finishes)
    eventually(lambda: silent.running() == 0, what="the silent engine was told to drop it")


def test_without_another_slot_the_silence_is_a_typed_error(host: RouterHost) -> None:
    host.worker("s0", "--hold-at", "4")
    seen = begun(host, 4).result()
    assert "request_stalled" in seen.errors[0]["message"]
    assert (seen.finishes, seen.done) == ([], 1)


def test_no_worker_for_too_long_is_a_typed_error(host: RouterHost) -> None:
    before = host.status().failed_total
    streamed = Stream(host.url, "/v1/chat/completions", chat(5))
    streamed.start()
    whole = httpx.post(
        f"{host.url}/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 5}, timeout=300
    )
    assert whole.status_code == 503
    assert whole.json()["error"]["type"] == "no_healthy_slot"
    seen = streamed.result()
    assert [error["code"] for error in seen.errors] == [503]
    assert "no_healthy_slot" in seen.errors[0]["message"]
    assert not seen.finishes
    assert host.status().failed_total == before + 2


def test_a_client_that_leaves_inside_a_handover_is_given_to_nobody(host: RouterHost) -> None:
    """It leaves after the death was told and before the next worker comes; another client stays."""
    first = host.worker("s0", "--hold-at", "4")
    told = len(host.told())
    stays = begun(host, 4)
    with httpx.stream("POST", f"{host.url}/v1/completions", json=completion(TOKENS), timeout=300):
        # Told by the engine itself: the router counts a request as running when it is sent.
        eventually(lambda: len(host.told()[told:]) == 2, what="both are on board")
        first.kill()
        host.unregister(first)
        assert host.status().waiting == 2
    eventually(lambda: host.status().waiting == 1, what="the leaver is gone from the queue")
    host.worker("s0")
    assert stays.result().finishes == ["length"]
    assert [row.split()[0] for row in host.told()[told:]] == ["add", "add", "add"], "two, and then only who stayed"


def test_a_client_that_leaves_right_after_the_handover_frees_the_new_engine(host: RouterHost) -> None:
    first = host.worker("s0", "--hold-at", "4")
    told = len(host.told())
    with httpx.stream("POST", f"{host.url}/v1/completions", json=completion(TOKENS), timeout=300):
        eventually(lambda: first.running() == 1, what="it is on board")
        first.kill()
        host.unregister(first)
        second = host.worker("s0", "--hold-at", "4")
        eventually(lambda: second.running() == 1, what="the new engine has it")
    eventually(lambda: second.running() == 0, what="the new engine is free")
    assert [row.split()[0] for row in host.told()[told:]] == ["add", "add", "abort"]


def test_an_admin_call_may_take_longer_than_a_link_may_be_silent(host: RouterHost) -> None:
    """Its worker says nothing meanwhile, on the link nor about its requests, and is right: the call is answered, and
    the stream beside it goes on."""
    truth = truth_of(host)
    torn = host.metric("belayer_torn_links_total")
    fake = host.worker("s0", "--hold-at", "5")
    told = len(host.told())
    stream = begun(host, 5)
    answers: list[httpx.Response] = []

    def call() -> None:
        answers.append(httpx.post(f"{host.url}/collective_rpc", json={"method": "hold"}, timeout=300))

    caller = threading.Thread(target=call)
    caller.start()
    eventually(lambda: "hold" in host.told()[told:], what="it runs in the engine's loop")
    since = monotonic()
    eventually(lambda: monotonic() - since > 2 * SILENCE_S + 2, what="it would have been given up")
    assert (answers, stream.is_alive()) == ([], True)
    fake.release()
    caller.join(300)
    assert [(one.status_code, one.json()) for one in answers] == [(200, {"results": ["held"]})]
    seen = stream.result()
    assert (seen.token_ids, seen.text, seen.finishes) == (truth.token_ids, truth.text, truth.finishes)
    assert [row.split()[0] for row in host.told()[told:]] == ["add", "hold"], "nothing was given again"
    assert host.metric("belayer_torn_links_total") == torn


def test_the_url_of_a_slot_looks_like_that_engine_alone(host: RouterHost) -> None:
    """Health, placement and admin calls; a request there waits for that slot, whoever else is idle."""
    one = host.worker("s0", "--hold-at", "3")
    first = host.slot("s0").url
    host.worker("s1")
    second = host.slot("s1").url
    assert len({host.url, first, second}) == 3
    streams = [Stream(first, "/v1/completions", completion(TOKENS)) for _ in range(4)]
    for stream in streams:
        stream.start()
    eventually(lambda: host.slot("s0").running == 4, what="all are on the slot of that URL")
    assert host.slot("s1").running == 0
    one.kill()
    host.unregister(one)
    assert httpx.get(f"{first}/health", timeout=300).status_code == 503
    assert httpx.get(f"{second}/health", timeout=300).status_code == 200
    assert httpx.get(f"{host.url}/health", timeout=300).status_code == 200
    late = Stream(first, "/v1/completions", completion(TOKENS))
    late.start()
    eventually(lambda: host.status().waiting == 5, what="they wait for their slot")
    again = host.worker("s0")
    for stream in (*streams, late):
        assert stream.result().finishes == ["length"]
    assert httpx.post(f"{second}/pause?mode=keep", timeout=300).status_code == 200
    assert httpx.get(f"{second}/is_paused", timeout=300).json() == {"is_paused": True}
    assert httpx.get(f"{first}/is_paused", timeout=300).json() == {"is_paused": False}
    assert httpx.post(f"{second}/resume", timeout=300).status_code == 200
    assert again.running() == 0
