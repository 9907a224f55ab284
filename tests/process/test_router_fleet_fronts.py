"""Two hosts whose routers have two fronts each: requests of both fronts of one run on the other, while its worker, its
fronts and its router are killed, a front of theirs is, the wire is lossy, and is cut. Each token once, in order."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import procs
from tests.process.test_router_fleet import BODY, CUT, PATH, REMOTE, TOKENS
from tests.process.test_router_fronts import kill, two_fronts
from tests.support import fronts
from tests.support.fleet_hosts import FleetHost, prepare, write_keys
from tests.support.netlab import Net
from tests.support.raw_http import expected
from tests.support.router_host import FakeWorker
from tests.support.streams import Seen, Stream
from tests.support.wait import eventually

Hosts = tuple[FleetHost, FleetHost]


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    made = Net()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def pair(net: Net) -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        roots = {host: Path(folder) / host[-1] for host in ("host-a", "host-b")}
        write_keys(roots)
        for name in ("a", "b"):
            net.add(name)
        made: list[FleetHost] = []
        try:
            for name, other in (("a", "b"), ("b", "a")):
                host, peers = f"host-{name}", {f"host-{other}": net.hosts[other]}
                made.append(prepare(net, name, host, roots[host], peers, "max_num_seqs = 32", "fronts = 2"))
            for one in made:
                eventually(one.answers, within=900, what=f"router answers; see {one.root}/router.log", every=0.1)
            yield made[0], made[1]
        finally:
            for one in made:
                one.stop()


@pytest.fixture
def hosts(pair: Hosts) -> Iterator[Hosts]:
    for one, other in (pair, pair[::-1]):
        two_fronts(one)
        one.sees(other.host, "up")
    yield pair
    for host in pair:
        host.clear()


def stream(host: FleetHost, name: str = "", position: int | None = None) -> Stream:
    headers = {"x-request-id": name} if name else {}
    if position is not None:
        headers["x-belayer-position"] = str(position)
    return Stream(host.url, PATH, BODY, headers)


def forwarded(a: FleetHost, b: FleetHost, name: str = "") -> tuple[list[fronts.Served], FakeWorker]:
    """Requests of a host without a worker, all at the worker of the other one, which has given the first of them
    ``CUT`` tokens and is held there. The first has the ``name``; of the others each front has at least one."""
    worker = b.worker("s0", "--hold-at", str(CUT), "--step-ms", "20")
    a.may_use(REMOTE)
    served = [fronts.begin(a.url, lambda: stream(a, name)), *fronts.one_on_each(a.url, lambda: stream(a))]
    assert all(fronts.is_front(one.pid, a.process.pid) for one in served)
    eventually(lambda: len(served[0].stream.seen.token_ids) == CUT, what="tokens of the other host")
    eventually(lambda: worker.running() == len(served), what="all run on the other host")
    return served, worker


def whole(host: FleetHost, one: Stream, last: str, *before: Seen) -> None:
    """It ended once, with every token once, the last of them made by slot ``last``."""
    seen = one.result()
    assert (seen.error, seen.errors, seen.done, len(seen.finishes)) == (None, [], 1, 1)
    tokens = [token for part in (*before, seen) for token in part.token_ids]
    assert tokens == expected(host.record, len(BODY["token_ids"]), TOKENS)
    assert seen.chunks[-1]["belayer"]["slot"] == last


def test_worker_and_fronts_of_the_other_host_die(hosts: Hosts) -> None:
    """Its fronts have no part in what it does for us: they are all killed, and nothing of it is lost."""
    a, b = hosts
    served, worker = forwarded(a, b)
    before = fronts.serving(b.url)
    for pid in before:
        kill(pid)
    assert worker.running() == len(served)
    worker.kill()
    b.unregister(worker)
    b.worker("s0")
    for one in served:
        whole(a, one.stream, REMOTE)
    eventually(lambda: not set(before) & {row.pid for row in b.status().fronts}, what="its status knows of it")
    eventually(lambda: b.fleet().serving == {}, what="nothing of the other host is left")


def test_a_front_dies_whose_requests_run_on_the_other_host(hosts: Hosts) -> None:
    """Unnamed ones end there; a named one goes on there, and is heard again through another front."""
    a, b = hosts
    served, worker = forwarded(a, b, "over-there")
    named, *others = served
    left = [one for one in others if one.pid != named.pid]
    kill(named.pid)
    for one in served:
        if one not in left:
            assert one.stream.result().error is not None
    eventually(lambda: worker.running() == 1 + len(left), what="unnamed ones ended on the other host")
    worker.release()
    for one in left:
        whole(a, one.stream, REMOTE)
    two_fronts(a, but=named.pid)
    rest = stream(a, "over-there", named.stream.seen.position)
    rest.start()
    whole(a, rest, REMOTE, named.stream.seen)


def test_both_fronts_speak_over_a_wire_that_loses_and_then_is_cut(hosts: Hosts, net: Net) -> None:
    a, b = hosts
    with net.late("b") as wire:
        wire.behave(to_host={"delay_ms": 20, "jitter_ms": 30, "loss": 0.08}, to_net={"jitter_ms": 15, "loss": 0.12})
        served, worker = forwarded(a, b)
        worker.release()
        for one in served:
            whole(a, one.stream, REMOTE)
        eventually(lambda: min(wire.lost("to_host"), wire.lost("to_net")) > 0, what="frames are lost both ways")
        b.unregister(worker, gone=True, reason="planned: for one that is held")
        worker.kill()
    a.sees("host-b", "up")
    served, worker = forwarded(a, b)
    net.unplug("b")
    a.sees("host-b", "silent")
    a.worker("s0")
    for one in served:
        whole(a, one.stream, "s0")
    eventually(lambda: worker.running() == 0, what="it freed its engine by its own clock")
    net.plug("b")
    for one, other in ((a, "host-b"), (b, "host-a")):
        one.sees(other, "up")


def test_the_other_router_dies_with_its_fronts_and_serves_again(hosts: Hosts) -> None:
    a, b = hosts
    served, worker = forwarded(a, b)
    pids = [os.pidfd_open(pid) for pid in fronts.serving(b.url)]
    worker.kill()
    b.process.kill()
    assert b.process.wait(300) == -signal.SIGKILL
    eventually(lambda: all(procs.is_dead(pidfd) for pidfd in pids), what="its fronts are dead")
    for pidfd in pids:
        os.close(pidfd)
    a.sees("host-b", "silent")
    own = a.worker("s0")
    for one in served:
        whole(a, one.stream, "s0")
    a.unregister(own, gone=True, reason="planned: the other host is to be used")
    own.kill()
    b.come_back()
    a.sees("host-b", "up")
    two_fronts(b)
    again, worker = forwarded(a, b)
    worker.release()
    for one in again:
        whole(a, one.stream, REMOTE)
