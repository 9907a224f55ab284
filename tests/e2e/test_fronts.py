"""A whole host whose router has two fronts, with real engines: streams through both while a main, a front and the
router are killed; ids, limits, metrics and admin calls are one, whichever front is asked.

One host serves all tests. While a trainer's pause holds the engine, what is under way stays under way.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from belayer import procs
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from tests.support import fronts
from tests.support.streams import Seen, Stream, completion
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

MODEL = Path(__file__).parents[2] / ".cache/models/SmolLM2-135M-Instruct"
LOGS = Path(__file__).parents[2] / ".cache/logs/test_fronts"
TOKENS, LIVE = 100, 8


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    port = free_port()
    text = demo_config(MODEL, port, slots=1, extra="[envkeeper]\nenabled = false\n")
    host = LocalHost(root, text.replace("[router]\n", f"[router]\nfronts = 2\nmax_requests = {LIVE}\n", 1))
    try:
        host.start(ROLLOUT)
        host.until_protected()
        yield host
    finally:
        host.stop()
        shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
        remove_tree(root)


@pytest.fixture(scope="module")
def url(host: LocalHost) -> str:
    return host.status().router_url


@pytest.fixture(scope="module")
def truth(url: str) -> Seen:
    seen = [ended(begun(stream(url))) for _ in range(2)]
    assert seen[0].token_ids == seen[1].token_ids
    assert len(seen[0].token_ids) == TOKENS
    return seen[0]


def stream(url: str, name: str = "", position: int | None = None) -> Stream:
    headers = {"x-request-id": name} if name else {}
    if position is not None:
        headers["x-belayer-position"] = str(position)
    return Stream(url, "/v1/completions", completion(TOKENS, ignore_eos=True), headers)


def begun(one: Stream) -> Stream:
    one.start()
    return one


def ended(one: Stream) -> Seen:
    seen = one.result(600)
    assert (seen.error, seen.errors, seen.done) == (None, [], 1)
    return seen


def same(one: Stream, truth: Seen) -> None:
    seen = ended(one)
    assert (seen.token_ids, seen.text, seen.finishes) == (truth.token_ids, truth.text, truth.finishes)
    assert (seen.usages, seen.roles) == (truth.usages, truth.roles)


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    eventually(lambda: procs.is_dead(pidfd), what=f"death of {pid}")
    os.close(pidfd)


def main_pid(host: LocalHost) -> int:
    return next(worker.pid for worker in host.status().slots[0].workers if worker.role == "main")


def pause(client: httpx.Client, mode: str = "keep") -> None:
    assert client.post("/pause", params={"mode": mode}).status_code == 200


def resume(client: httpx.Client) -> None:
    assert client.post("/resume").status_code == 200


@contextmanager
def at_each(url: str) -> Iterator[dict[int, httpx.Client]]:
    """A client whose connection is at one front, for each front, by its pid. Engines run when it ends."""
    found = fronts.clients(url)
    try:
        yield found
    finally:
        assert httpx.post(f"{url}/resume", timeout=120).status_code == 200
        for client in found.values():
            client.close()


def flowing(*streams: Stream) -> None:
    eventually(lambda: all(len(one.seen.token_ids) >= 8 for one in streams), within=120, what="tokens on every stream")
    assert all(one.is_alive() for one in streams), "a stream ended before the fault"


def test_streams_through_both_fronts_outlive_the_main(host: LocalHost, url: str, truth: Seen) -> None:
    before = host.until_protected().slots[0].generation
    dead = main_pid(host)
    with at_each(url) as clients:
        first, second = clients.values()
        pause(first)
        served = fronts.one_on_each(url, lambda: stream(url))
        assert all(fronts.is_front(one.pid, host.pid("belayer-router")) for one in served)
        resume(second)
        flowing(*(one.stream for one in served))
        kill(dead)
        for one in served:
            same(one.stream, truth)
    assert host.until_protected().slots[0].generation > before


def test_while_paused_ids_limits_metrics_and_health_are_one(url: str, truth: Seen) -> None:
    """Paused by one front, asked at both, resumed by the other."""
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    mine = {"x-request-id": "mine"}
    with at_each(url) as clients:
        first, second = clients.values()
        pause(first)
        streams = [fronts.begin(url, lambda: stream(url, "mine")).stream]
        for client in clients.values():
            assert client.get("/is_paused").json() == {"is_paused": True}
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=body, headers=mine).status_code == 409
        while len(streams) < LIVE:
            streams.append(fronts.begin(url, lambda: stream(url)).stream)
        for client in clients.values():
            answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        texts = [client.get("/metrics").text for client in clients.values()]
        for name in ("belayer_requests_total", 'belayer_requests_declined_total{reason="too_many_requests"}'):
            values = [row for text in texts for row in text.splitlines() if row.startswith(f"{name} ")]
            assert len(values) == 2
            assert values[0] == values[1]
        infos = [client.get("/weight_info").json() for client in clients.values()]
        assert infos[0] == infos[1]
        resume(second)
        for one in streams:
            same(one, truth)
        assert first.get("/is_paused").json() == {"is_paused": False}
        for client in clients.values():
            assert client.post("/reset_prefix_cache").status_code == 200
            whole = client.post(
                "/v1/completions", json=body | {"return_token_ids": True}, headers=mine | {"x-belayer-position": "0"}
            )
            assert whole.json()["choices"][0]["token_ids"] == truth.token_ids


def aborted(url: str) -> float:
    row = next(row for row in fronts.metrics(url).splitlines() if row.startswith("belayer_requests_aborted_total "))
    return float(row.split()[1])


def test_a_front_is_killed_and_only_its_streams_break(url: str, truth: Seen) -> None:
    before = aborted(url)
    with at_each(url) as clients:
        pause(next(iter(clients.values())))
        named = fronts.begin(url, lambda: stream(url, "goes-on"))
        others: list[fronts.Served] = []
        while {one.pid for one in others} != set(clients):
            assert len(others) < LIVE - 1, "connections are not spread"
            others.append(fronts.begin(url, lambda: stream(url)))
        resume(clients[named.pid])
        flowing(named.stream, *(one.stream for one in others))
        kill(named.pid)
    for one in (named, *others):
        if one.pid == named.pid:
            assert one.stream.result().error is not None
        else:
            same(one.stream, truth)
    eventually(
        lambda: len([pid for pid in fronts.serving(url) if pid != named.pid]) == 2, within=120, what="a new front"
    )
    rest = fronts.begin(url, lambda: stream(url, "goes-on", named.stream.seen.position))
    assert rest.pid != named.pid
    seen = ended(rest.stream)
    assert named.stream.seen.token_ids + seen.token_ids == truth.token_ids
    assert named.stream.seen.text + seen.text == truth.text
    broken = [one for one in others if one.pid == named.pid]
    assert broken
    eventually(lambda: aborted(url) - before == len(broken), what="those without an id ended in the engine")


def test_the_router_is_killed_with_all_its_fronts_and_comes_back(host: LocalHost, url: str, truth: Seen) -> None:
    with at_each(url) as clients:
        pause(next(iter(clients.values())))
        served = fronts.begin(url, lambda: stream(url, "over"))
        resume(next(iter(clients.values())))
        flowing(served.stream)
        pids = [os.pidfd_open(pid) for pid in clients]
        host.kill9("belayer-router")
        eventually(lambda: all(procs.is_dead(pidfd) for pidfd in pids), what="its fronts are dead")
        for pidfd in pids:
            os.close(pidfd)
        assert served.stream.result().error is not None
        host.spawn("belayer-router")
        host.until_protected()
        eventually(lambda: healthy(url), within=240, what="the engine is known to the new router", every=0.1)
        rest = begun(stream(url, "over", served.stream.seen.position))
        assert served.stream.seen.token_ids + ended(rest).token_ids == truth.token_ids
        assert not set(fronts.serving(url)) & set(clients)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.HTTPError:
        return False
