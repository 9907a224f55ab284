"""A router with two fronts before recorded engines: any front answers for all, and a front's death is its own.

One router serves all tests of this module, in their order; each leaves two fronts that serve and an engine that runs
nothing. What must differ with several fronts is here; that nothing else does, tests/contract/test_hearts.py shows.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from belayer import procs
from belayer.errors import Refused
from belayer.localhost import free_port
from belayer.messages.common import FaultProof
from belayer.messages.router import InjectFrontFault, RouterFront
from belayer.paths import Paths
from tests.support import fronts
from tests.support.router_host import MODEL, FakeWorker, RouterHost, config_text, spawn_router
from tests.support.streams import Seen, Stream, completion
from tests.support.wait import eventually

TOKENS, CUT, LIVE = 30, 11, 8
HELD = ("--hold-at", str(CUT))
SILENCE_S = 20.0  # of a front (and of a link): long enough for a machine that is busy with other tests


@pytest.fixture(scope="module")
def router() -> Iterator[RouterHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        more = f"fronts = 2\nmax_requests = {LIVE}\nlink_silence_s = {SILENCE_S}\nrequest_deadline_s = 120.0\n"
        host = RouterHost.start(Path(root), ["s0"], more, urls=True)
        try:
            yield host
        finally:
            host.stop()


@pytest.fixture
def host(router: RouterHost) -> Iterator[RouterHost]:
    yield router
    router.clear()
    eventually(lambda: (row := router.status()).running + row.waiting == 0, what="nothing is left over")


@contextmanager
def on_each(host: RouterHost) -> Iterator[dict[int, httpx.Client]]:
    """A client at each front."""
    found = fronts.clients(host.url)
    assert all(fronts.is_front(pid, host.process.pid) for pid in found)
    try:
        yield found
    finally:
        for client in found.values():
            client.close()


def stream(host: RouterHost, name: str = "", position: int | None = None, url: str = "") -> Stream:
    headers = {"x-request-id": name} if name else {}
    if position is not None:
        headers["x-belayer-position"] = str(position)
    return Stream(url or host.url, "/v1/completions", completion(TOKENS, logprobs=1), headers)


def ended(one: Stream) -> Seen:
    seen = one.result()
    assert (seen.error, seen.errors, seen.done, len(seen.finishes)) == (None, [], 1, 1)
    return seen


@pytest.fixture(scope="module")
def truth(router: RouterHost) -> Seen:
    fake = router.worker("s0")
    one = stream(router)
    one.start()
    seen = ended(one)
    assert len(seen.token_ids) == TOKENS
    router.unregister(fake, gone=True, reason="planned: reference is done")
    fake.kill()
    return seen


def same(seen: Seen, truth: Seen) -> None:
    assert (seen.token_ids, seen.text, seen.logprobs) == (truth.token_ids, truth.text, truth.logprobs)
    assert (seen.finishes, seen.usages, seen.roles) == (truth.finishes, truth.usages, truth.roles)


def adds(host: RouterHost) -> int:
    """How many requests the engines were ever given."""
    return sum(line.startswith("add") for line in host.told())


def held(host: RouterHost, worker: FakeWorker, *streams: Stream) -> None:
    """All of these wait at the engine with tokens on their way or delivered."""
    eventually(lambda: worker.running() == len(streams), what="all are at the engine")
    eventually(lambda: any(one.seen.token_ids for one in streams), what="the engine has begun")


def two_fronts(host: RouterHost, but: int = 0) -> list[int]:
    """Pids, once two serve and none of them is ``but``."""

    def probe() -> list[int] | None:
        found = fronts.serving(host.url)
        return found if len(found) == 2 and but not in found else None

    found = eventually(probe, within=300, what="two fronts serve", every=0.1)
    assert found is not None
    return found


def front_of(host: RouterHost, pid: int) -> RouterFront:
    """As the router's status has it."""
    return next(row for row in host.status().fronts if row.pid == pid)


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    eventually(lambda: procs.is_dead(pidfd), what=f"death of {pid}")
    os.close(pidfd)


def test_a_worker_dies_under_streams_of_both_fronts(host: RouterHost, truth: Seen) -> None:
    first = host.worker("s0", *HELD)
    served = fronts.one_on_each(host.url, lambda: stream(host))
    assert all(fronts.is_front(one.pid, host.process.pid) for one in served)
    host.unregister(first)
    first.kill()
    host.worker("s0")
    for one in served:
        same(ended(one.stream), truth)
    assert host.metric("belayer_requests_resumed_total") >= 2


@pytest.mark.parametrize("fault", ["unreadable", "lost"])
def test_the_link_to_a_worker_is_torn_under_streams_of_both_fronts(host: RouterHost, truth: Seen, fault: str) -> None:
    """A message of it that nobody can read; one to it that never arrives: a new link, and each token once at each."""
    torn = host.metric("belayer_torn_links_total")
    worker = host.worker("s0", *HELD, *(["--lose-add"] if fault == "lost" else []))
    served = fronts.one_on_each(host.url, lambda: stream(host))
    held(host, worker, *(one.stream for one in served))
    if fault == "unreadable":
        worker.babble()
    eventually(lambda: host.metric("belayer_torn_links_total") > torn, what="the link is torn")
    assert fault != "lost" or "lost" in host.told()
    eventually(lambda: worker.running() == len(served), what="all are at the engine again")
    worker.release()
    for one in served:
        same(ended(one.stream), truth)


def test_an_id_is_known_at_every_front(host: RouterHost, truth: Seen) -> None:
    worker = host.worker("s0", *HELD)
    body = {**completion(TOKENS, logprobs=1), "stream": False}
    del body["stream_options"]
    with on_each(host) as clients:
        before = adds(host)
        running = stream(host, "mine")
        running.start()
        held(host, worker, running)
        mine = {"x-request-id": "mine"}
        for client in clients.values():
            again = client.post("/v1/completions", json=body, headers=mine)
            assert (again.status_code, again.json()["error"]["type"]) == (409, "refused")
            other = client.post(
                "/v1/completions", json=body | {"prompt": "another"}, headers=mine | {"x-belayer-position": "0"}
            )
            assert (other.status_code, other.json()["error"]["type"]) == (409, "refused")
            behind = client.post("/v1/completions", json=body, headers=mine | {"x-belayer-position": "29"})
            assert (behind.status_code, behind.json()["error"]["type"]) == (404, "request_unknown")
        beside = fronts.one_on_each(host.url, lambda: stream(host, "mine", 4))
        worker.release()
        same(ended(running), truth)
        assert all(truth.token_ids[4:] == ended(one.stream).token_ids for one in beside), "both fronts have told it"
        for client in clients.values():
            whole = client.post("/v1/completions", json=body, headers=mine | {"x-belayer-position": "0"}).json()
            assert whole["choices"][0]["token_ids"] == truth.token_ids
    assert adds(host) == before + 1, "one request, however often it was asked for"


def test_limits_count_over_all_fronts(host: RouterHost) -> None:
    worker = host.worker("s0", *HELD)
    with on_each(host) as clients:
        served = fronts.one_on_each(host.url, lambda: stream(host))
        while host.status().running < LIVE:
            served.append(fronts.begin(host.url, lambda: stream(host)))
        declined = host.metric('belayer_requests_declined_total{reason="too_many_requests"}')
        for client in clients.values():
            answer = client.post("/v1/completions", json={"model": "smollm2", "prompt": "x"})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        for client in clients.values():
            found = re.search(r'declined_total\{reason="too_many_requests"\} (\S+)', client.get("/metrics").text)
            assert found is not None
            assert float(found[1]) == declined + 2
        worker.release()
        for one in served:
            ended(one.stream)


def test_a_dead_front_takes_only_its_own_streams(host: RouterHost, truth: Seen) -> None:
    """Its unnamed request is ended in the engine; its named one goes on and is read again through another front."""
    worker = host.worker("s0", *HELD)
    served = [fronts.begin(host.url, lambda: stream(host, "named-0"))]
    victim = served[0].pid
    served += fronts.one_on_each(host.url, lambda: stream(host))
    held(host, worker, *(one.stream for one in served))
    hurt = [one for one in served[1:] if one.pid == victim]
    others = [one for one in served if one.pid != victim]
    eventually(lambda: len(served[0].stream.seen.token_ids) == CUT, what="its client has what was made")
    dropped = len([line for line in host.told() if line.startswith("abort")])
    seen = front_of(host, victim)
    assert (seen.state, seen.streams, seen.restarts, seen.deaths) == ("serving", 1 + len(hurt), 0, ())
    assert host.metric(f'belayer_front_streams{{front="{seen.front}",pid="{victim}"}}') == 1 + len(hurt)
    assert host.metric(f'belayer_front_start_time_seconds{{front="{seen.front}",pid="{victim}"}}') == seen.since
    kill(victim)
    assert all(one.stream.result().error is not None for one in (served[0], *hurt)), "its connections break"
    eventually(
        lambda: len([line for line in host.told() if line.startswith("abort")]) == dropped + len(hurt),
        what="what nobody can ask for is ended in the engine at once",
    )
    assert worker.running() == 1 + len(others)
    assert all(one.stream.is_alive() for one in others)
    now = two_fronts(host, but=victim)
    assert (
        host.metric('belayer_front_deaths_total{front="0"}') + host.metric('belayer_front_deaths_total{front="1"}') == 1
    )
    after = host.status().fronts[seen.front]
    (death,) = after.deaths
    assert (after.state, after.pid in now, after.streams, after.restarts) == ("serving", True, 0, 1)
    assert after.since > seen.since
    assert (death.pid, death.cause, death.requests, death.ended) == (victim, "death", 1 + len(hurt), len(hurt))
    assert ("SIGKILL" in death.why, death.injected) == (True, False)
    assert 0 <= death.let_go_ms <= death.forked_ms <= death.served_ms
    worker.release()
    for one in others:
        same(ended(one.stream), truth)
    rest = fronts.begin(host.url, lambda: stream(host, "named-0", CUT))
    assert rest.pid in now
    last, begun = ended(rest.stream), served[0].stream.seen
    assert begun.token_ids + last.token_ids == truth.token_ids
    assert begun.text + last.text == truth.text
    assert last.usages == truth.usages


def test_any_front_tells_the_metrics_of_all_once(host: RouterHost) -> None:
    host.worker("s0")
    with on_each(host) as clients:
        row = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="smollm2"}'
        before = host.metric(row)
        for client in clients.values():
            client.post("/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 2})
        eventually(lambda: host.metric(row) == before + 2, what="vLLM has counted both, a moment after their answers")
        for client in clients.values():
            text = client.get("/metrics").text
            kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
            assert len(kinds) == len(set(kinds))
            samples = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
            assert [one for one, count in Counter(samples).items() if count > 1] == []
            assert {"belayer_requests_total", "belayer_slot_up", "belayer_front_up", "vllm:num_requests_running"} <= {
                *kinds,
                *(kind + "_total" for kind in kinds),
            }
            assert f"{row} {before + 2}" in text


def test_admin_calls_and_health_are_the_same_at_every_front(host: RouterHost) -> None:
    host.worker("s0")
    with on_each(host) as clients:
        first, second = clients.values()
        own = f"http://127.0.0.1:{next(iter(host.status().slots)).url.rpartition(':')[2]}"
        for one, other in ((first, second), (second, first)):
            assert one.post("/pause").status_code == 200
            assert other.get("/is_paused").json() == {"is_paused": True}
            assert httpx.get(f"{own}/is_paused", timeout=300).json() == {"is_paused": True}
            assert other.post("/resume").status_code == 200
            assert one.get("/is_paused").json() == {"is_paused": False}
            assert one.post("/reset_prefix_cache").status_code == 200
            said = one.post("/collective_rpc", json={"method": "where"}).json()
            assert said["results"] == other.post("/collective_rpc", json={"method": "where"}).json()["results"]
            assert one.get("/load").json() == other.get("/load").json()
        first.post("/pause")
        worker = host.fakes[-1]
        host.unregister(worker)
        worker.kill()
        assert [client.get("/health").status_code for client in clients.values()] == [503, 503]
        host.worker("s0")
        assert [client.get("/health").status_code for client in clients.values()] == [200, 200]
        assert second.get("/is_paused").json() == {"is_paused": True}, "one that joins during a pause is paused"
        second.post("/resume")
        assert first.get("/is_paused").json() == {"is_paused": False}


def test_abort_of_all_requests_reaches_all_fronts(host: RouterHost) -> None:
    worker = host.worker("s0", *HELD)
    served = fronts.one_on_each(host.url, lambda: stream(host))
    held(host, worker, *(one.stream for one in served))
    said = httpx.post(f"{host.url}/abort_requests", json={}, timeout=300).json()
    assert said == {"status": "aborted", "aborted": len(served)}
    for one in served:
        seen = one.stream.result()
        assert (seen.error, seen.errors, seen.done) == (None, [], 1)
        assert seen.finishes == (["abort"] if seen.token_ids else []), "vLLM tells nothing of one without a token"
    eventually(lambda: worker.running() == 0, what="the engine is free")


def test_a_client_that_leaves_any_front_frees_the_engine(host: RouterHost) -> None:
    worker = host.worker("s0", "--step-ms", "1000")  # it would run for half a minute
    before = len([line for line in host.told() if line.startswith("abort")])

    def leaver() -> Stream:
        return Stream(host.url, "/v1/completions", completion(TOKENS), until=1)

    served = fronts.one_on_each(host.url, leaver)
    for one in served:
        assert one.stream.result().finishes == []
    eventually(lambda: worker.running() == 0, what="the engine is free")
    assert len([line for line in host.told() if line.startswith("abort")]) == before + len(served)


def test_a_front_that_stands_still_holds_nobody_and_is_ended_by_name(host: RouterHost, truth: Seen) -> None:
    worker = host.worker("s0", *HELD)
    served = fronts.one_on_each(host.url, lambda: stream(host))
    still = served[0].pid
    number, before = front_of(host, still).front, len(host.status().fronts[front_of(host, still).front].deaths)
    proof = host.rpc.call(InjectFrontFault(front=number, kind="stop"), FaultProof)
    assert (proof.pid, proof.seen) == (still, f"pid {still}: state T in /proc")
    assert front_of(host, still).state == "stopped"
    worker.release()
    for one in served:
        if one.pid != still:
            same(ended(one.stream), truth)
    assert procs.state(still) == "T", "nothing has ended it yet: the others did not wait for it"
    more = stream(host)
    more.start()
    same(ended(more), truth)
    two_fronts(host, but=still)
    assert served[0].stream.result().error is not None
    said = (host.root / "router.log").read_text()
    assert re.search(rf"front_given_up .*pid={still} why=\"it did not answer for {SILENCE_S:g} s\"", said)
    death = host.status().fronts[number].deaths[-1]
    assert (len(host.status().fronts[number].deaths), death.pid) == (before + 1, still)
    assert (death.cause, death.injected) == ("given up", True)
    assert death.why == f"killed by the router: it did not answer for {SILENCE_S:g} s"
    assert host.metric(f'belayer_front_given_up_total{{front="{number}"}}') == 1


def test_what_cannot_be_broken_on_purpose_is_refused_by_name(host: RouterHost) -> None:
    for front, kind, said in ((2, "kill", "no front 2"), (0, "explode", "no fault 'explode'")):
        with pytest.raises(Refused, match=said):
            host.rpc.call(InjectFrontFault(front=front, kind=kind), FaultProof)
    assert all(row.state == "serving" for row in host.status().fronts)


def test_fronts_die_with_a_killed_router_and_the_next_one_takes_over(host: RouterHost, truth: Seen) -> None:
    worker = host.worker("s0", *HELD)
    named = fronts.begin(host.url, lambda: stream(host, "over"))
    held(host, worker, named.stream)
    eventually(lambda: len(named.stream.seen.token_ids) == CUT, what="its client has what was made")
    pids = [os.pidfd_open(pid) for pid in fronts.serving(host.url)]
    host.kill_and_return()
    eventually(lambda: all(procs.is_dead(pidfd) for pidfd in pids), what="its fronts are dead")
    for pidfd in pids:
        os.close(pidfd)
    assert named.stream.result().error is not None
    worker.release()
    rest = stream(host, "over", CUT)
    rest.start()
    assert named.stream.seen.token_ids + ended(rest).token_ids == truth.token_ids


def test_the_zygote_s_death_ends_the_router_which_comes_back(host: RouterHost) -> None:
    (zygote,) = procs.children(host.process.pid)
    pids = [os.pidfd_open(pid) for pid in fronts.serving(host.url)]
    kill(zygote)
    assert host.process.wait(300) == 1
    eventually(lambda: all(procs.is_dead(pidfd) for pidfd in pids), what="its fronts are dead")
    for pidfd in pids:
        os.close(pidfd)
    host.come_back()
    host.worker("s0")
    two_fronts(host)


def test_sigterm_ends_streams_of_all_fronts_with_an_error(host: RouterHost) -> None:
    """Last: the router is gone after it."""
    worker = host.worker("s0", *HELD)
    served = fronts.one_on_each(host.url, lambda: stream(host))
    held(host, worker, *(one.stream for one in served))
    pids = [os.pidfd_open(pid) for pid in {one.pid for one in served}]
    host.process.send_signal(signal.SIGTERM)
    for one in served:
        seen = one.stream.result()
        assert [error["message"].split(":")[0] for error in seen.errors] == ["refused"]
        assert seen.done == 1
    assert host.process.wait(300) == 0
    eventually(lambda: all(procs.is_dead(pidfd) for pidfd in pids), what="its fronts are dead")
    for pidfd in pids:
        os.close(pidfd)
    eventually(lambda: is_free(host.port), what="the zygote, which dies with the router, holds the port no more")
    host.come_back()


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections linger; a listener would refuse
        try:
            sock.bind(("127.0.0.1", port))
        except OSError as why:
            if why.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    """In a front, before it ever served: the router says it and ends with 2."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        root = Path(folder)
        model = root / "model"
        model.mkdir()
        for path in MODEL.iterdir():
            if not path.name.startswith("tokenizer") and path.is_file():
                (model / path.name).symlink_to(path)
        text = config_text(free_port(), ["s0"], "fronts = 2").replace(str(MODEL), str(model))
        Paths(root).config.write_text(text)
        process, log = spawn_router(root)
        try:
            assert process.wait(240) == 2
        finally:
            process.kill()
            log.close()
        said = (root / "router.log").read_text()
        assert "Traceback" not in said
        assert str(model) in next(line for line in said.splitlines() if line.startswith("router: "))
