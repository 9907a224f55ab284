"""Routers of two hosts in networks of their own: what one forwards to the other, and what becomes of it when the other
is killed, cut off, late, heard in one direction only, or back as it was before. Each token once, in order."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq

from belayer import fleet_keys
from belayer.paths import Paths
from tests.support.fleet_hosts import FLEET_PORT, HTTP_PORT, FleetHost, prepare, write_keys
from tests.support.netlab import Net
from tests.support.raw_http import expected
from tests.support.router_host import FakeWorker
from tests.support.streams import Stream, tokens_in
from tests.support.wait import eventually

PATH = "/inference/v1/generate"
TOKENS, CUT = 40, 12
BODY = tokens_in(TOKENS, ignore_eos=True)
REMOTE = "host-b/s0"


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    made = Net()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def pair(net: Net) -> Iterator[tuple[FleetHost, FleetHost]]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        roots = {host: Path(folder) / host[-1] for host in ("host-a", "host-b")}
        write_keys(roots)
        for name in ("a", "b"):
            net.add(name)
        hosts = [
            prepare(net, name, f"host-{name}", roots[f"host-{name}"], {f"host-{other}": net.hosts[other]})
            for name, other in (("a", "b"), ("b", "a"))
        ]
        try:
            for host in hosts:
                eventually(host.answers, within=240, what=f"router answers; see {host.root}/router.log", every=0.1)
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:
                host.stop()


@pytest.fixture
def hosts(pair: tuple[FleetHost, FleetHost]) -> Iterator[tuple[FleetHost, FleetHost]]:
    for host in pair:
        host.sees("host-b" if host.host == "host-a" else "host-a", "up")
    yield pair
    for host in pair:
        host.clear()


def forwarded(a: FleetHost, b: FleetHost) -> tuple[Stream, FakeWorker]:
    """A request to a host without a worker, that has had ``CUT`` tokens of the other host's."""
    worker = b.worker("s0", "--hold-at", str(CUT))
    a.may_use(REMOTE)
    before = a.slot(REMOTE).tokens_total
    stream = Stream(a.url, PATH, BODY)
    stream.start()
    eventually(lambda: a.slot(REMOTE).tokens_total == before + CUT, within=60, what=f"{CUT} tokens of {REMOTE}")
    assert b.fleet().serving == {"host-a": 1}
    return stream, worker


def whole(host: FleetHost, stream: Stream, makers: list[tuple[str, int]]) -> None:
    """The stream ended once, with every token once, made by these."""
    seen = stream.result(within=120)
    prompt = len(BODY["token_ids"])
    assert seen.errors == []
    assert seen.token_ids == expected(host.record, prompt, TOKENS)
    assert (len(seen.finishes), seen.done) == (1, 1)
    assert list(dict.fromkeys((row["belayer"]["slot"], row["belayer"]["generation"]) for row in seen.chunks)) == makers


def goes_on_here(a: FleetHost, stream: Stream) -> None:
    """A worker of this host takes the request with the tokens that came from the other."""
    worker = a.worker("s0")
    whole(a, stream, [(REMOTE, 1 if a.lives.get("seen", 0) == 0 else a.lives["seen"]), ("s0", worker.generation)])
    adds = [line.split() for line in a.told() if line.startswith("add ")]
    assert int(adds[-1][2]) == CUT


def test_shadow_of_other_host_takes_over_and_origin_sees_a_pause(hosts: tuple[FleetHost, FleetHost]) -> None:
    a, b = hosts
    stream, worker = forwarded(a, b)
    worker.kill()
    b.unregister(worker)
    shadow = b.worker("s0")
    whole(a, stream, [(REMOTE, worker.generation), (REMOTE, shadow.generation)])
    assert a.metric("belayer_torn_links_total") == 0
    assert a.metric("belayer_requests_forwarded_total") == 1
    eventually(lambda: b.fleet().serving == {}, what="nothing of the other host is left")


def test_client_that_leaves_frees_the_engine_of_the_other_host(hosts: tuple[FleetHost, FleetHost]) -> None:
    a, b = hosts
    worker = b.worker("s0", "--hold-at", str(CUT))
    a.may_use(REMOTE)
    with httpx.stream("POST", f"{a.url}{PATH}", json=BODY, timeout=30) as answer:
        assert next(answer.iter_lines())
        assert worker.running() == 1
    eventually(lambda: worker.running() == 0, what="the engine was freed")
    assert b.fleet().serving == {}
