"""Routers of two hosts in networks of their own: what one forwards to the other, and what becomes of it when the other
is killed, cut off, late, heard in one direction only, or back as it was before. Each token once, in order."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from belayer import fleet_keys
from belayer.messages.fleet import Greeting, HandedBack, Life, Wish
from belayer.paths import Paths
from tests.support.fleet_hosts import FLEET_PORT, HTTP_PORT, LOST_S, FleetHost, prepare, write_keys
from tests.support.netlab import Net
from tests.support.raw_http import expected
from tests.support.router_host import TREE, FakeWorker
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
            prepare(
                net,
                name,
                f"host-{name}",
                roots[f"host-{name}"],
                {f"host-{other}": net.hosts[other]},
                "max_num_seqs = 2",
            )
            for name, other in (("a", "b"), ("b", "a"))
        ]
        try:
            for host in hosts:
                eventually(host.answers, within=900, what=f"router answers; see {host.root}/router.log", every=0.1)
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


def forwarded(a: FleetHost, b: FleetHost, *more: str) -> tuple[Stream, FakeWorker]:
    """A request to a host without a worker, with ``CUT`` tokens of the other host's. ``more``: of its worker."""
    worker = b.worker("s0", "--hold-at", str(CUT), *more)
    a.may_use(REMOTE)
    before = a.slot(REMOTE).tokens_total
    stream = Stream(a.url, PATH, BODY)
    stream.start()
    eventually(lambda: a.slot(REMOTE).tokens_total == before + CUT, what=f"{CUT} tokens of {REMOTE}")
    eventually(lambda: b.fleet().serving == {"host-a": 1}, what="it is known as a guest there")
    return stream, worker


def whole(host: FleetHost, stream: Stream, makers: list[tuple[str, int]]) -> None:
    """The stream ended once, with every token once, made by these."""
    seen = stream.result()
    prompt = len(BODY["token_ids"])
    assert seen.errors == []
    assert seen.token_ids == expected(host.record, prompt, TOKENS)
    assert (len(seen.finishes), seen.done) == (1, 1)
    assert list(dict.fromkeys((row["belayer"]["slot"], row["belayer"]["generation"]) for row in seen.chunks)) == makers


def goes_on_here(a: FleetHost, stream: Stream, remote: FakeWorker) -> None:
    """A worker of this host takes the request, with the tokens that came from the other."""
    worker = a.worker("s0")
    whole(a, stream, [(REMOTE, remote.generation), ("s0", worker.generation)])
    adds = [line.split() for line in a.told() if line.startswith("add ")]
    assert int(adds[-1][2]) == CUT


def frees(b: FleetHost, worker: FakeWorker) -> None:
    """The host that was left gives its engine free, within its own bound."""
    eventually(lambda: worker.running() == 0, what="the engine was freed")
    eventually(lambda: b.fleet().serving == {}, what="it is no guest there any more")


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
    with httpx.stream("POST", f"{a.url}{PATH}", json=BODY, timeout=300) as answer:
        lines = answer.iter_lines()  # held: a generator that is let go closes the answer
        assert next(lines)
        assert worker.running() == 1
    frees(b, worker)


def test_full_host_uses_a_free_one(hosts: tuple[FleetHost, FleetHost]) -> None:
    """Two at once fit in each engine here."""
    a, b = hosts
    own, other = a.worker("s0", "--hold-at", "1"), b.worker("s0", "--hold-at", "1")
    a.may_use(REMOTE)
    streams = [Stream(a.url, PATH, BODY) for _ in range(4)]
    for stream in streams:
        stream.start()
    eventually(lambda: (own.running(), other.running()) == (2, 2), what="two here, two there")
    own.release()
    other.release()
    for stream in streams:
        assert stream.result().token_ids == expected(a.record, len(BODY["token_ids"]), TOKENS)


def test_host_that_is_cut_off(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    a, b = hosts
    stream, worker = forwarded(a, b)
    net.unplug("b")
    lost = a.sees("host-b", "silent")
    assert lost.heard_s >= LOST_S
    goes_on_here(a, stream, worker)
    frees(b, worker)  # it cannot hear us: its own clock tells it
    worker.release()
    net.plug("b")
    a.sees("host-b", "up")
    eventually(lambda: a.peer("host-b").forwarded == 0, what="nothing is with it any more")


def test_request_waits_through_a_short_cut(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    """Nobody here can take it: it goes on where it was, with its tokens, once that host is heard again."""
    a, b = hosts
    stream, worker = forwarded(a, b)
    net.unplug("b")
    a.sees("host-b", "silent")
    worker.release()
    net.plug("b")
    whole(a, stream, [(REMOTE, worker.generation)])


def test_host_that_stood_still_itself_blames_nobody(hosts: tuple[FleetHost, FleetHost]) -> None:
    """For longer than a peer may be silent. When it wakes, its peer's answers wait unread."""
    a, b = hosts
    stream, worker = forwarded(a, b)
    link = a.slot(REMOTE).generation
    a.process.send_signal(signal.SIGSTOP)
    try:
        b.sees("host-a", "silent")
    finally:
        a.process.send_signal(signal.SIGCONT)
    b.sees("host-a", "up")
    worker.release()
    whole(a, stream, [(REMOTE, worker.generation)])
    assert a.slot(REMOTE).generation == link, "it was never called lost"
    assert "stood_still" in (a.root / "router.log").read_text()


@pytest.mark.parametrize(("deaf", "mute"), [("a", "b"), ("b", "a")], ids=["answers_lost", "questions_lost"])
def test_only_one_direction_is_lost(hosts: tuple[FleetHost, FleetHost], net: Net, deaf: str, mute: str) -> None:
    a, b = hosts
    stream, worker = forwarded(a, b)
    net.drop(mute, deaf)
    a.sees("host-b", "silent")
    assert net.dropped(mute) > 0
    goes_on_here(a, stream, worker)
    frees(b, worker)
    net.heal(mute)
    a.sees("host-b", "up")


def test_host_that_answers_late(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    """What it sends comes seconds late: no new request goes there, and what comes after the bound is not believed."""
    a, b = hosts
    stream, worker = forwarded(a, b)
    net.throttle("b", "10kbit")
    eventually(lambda: a.peer("host-b").state in ("slow", "silent"), what="it is seen late")
    goes_on_here(a, stream, worker)
    net.free("b")
    worker.release()
    a.sees("host-b", "up")


def test_host_that_is_killed_and_returns(hosts: tuple[FleetHost, FleetHost]) -> None:
    a, b = hosts
    stream, worker = forwarded(a, b)
    life = a.peer("host-b").life
    worker.kill()
    b.process.kill()
    assert b.process.wait(300) == -signal.SIGKILL
    a.sees("host-b", "silent")
    goes_on_here(a, stream, worker)
    b.come_back()
    a.sees("host-b", "up")
    assert a.peer("host-b").life > life
    again, _ = forwarded_after(a, b)
    whole(a, again, [(REMOTE, b.lives["s0"])])


def forwarded_after(a: FleetHost, b: FleetHost) -> tuple[Stream, FakeWorker]:
    """Once more, with no worker here."""
    for fake in a.fakes:
        fake.kill()
        a.unregister(fake, gone=True)
    stream, worker = forwarded(a, b)
    worker.release()
    return stream, worker


def test_garbage_and_wrong_keys_are_counted_and_harm_nothing(
    hosts: tuple[FleetHost, FleetHost], net: Net, tmp_path: Path
) -> None:
    a, b = hosts
    before = b.fleet().dropped
    stream, worker = forwarded(a, b)
    where = (net.hosts["b"], FLEET_PORT)
    for bytes_ in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53)):
        with socket.create_connection(where, timeout=300) as sock:
            sock.sendall(bytes_)
    knock(where, tmp_path, b, listed=False)
    knock(where, tmp_path, b, listed=True)
    eventually(lambda: sum(b.fleet().dropped.values()) - sum(before.values()) >= 4, what="each of them is counted")
    assert b.fleet().dropped.get("unknown_key", 0) > before.get("unknown_key", 0)
    assert b.metric('belayer_fleet_dropped_total{reason="unknown_key"}') > 0
    worker.release()
    whole(a, stream, [(REMOTE, worker.generation)])
    a.sees("host-b", "up")


def knock(where: tuple[str, int], folder: Path, b: FleetHost, *, listed: bool) -> None:
    """With a key that nobody listed: it never gets in. With host-a's own: it gets in, and says what cannot be read."""
    if listed:
        mine = fleet_keys.load(b.root.parent / "a" / "keys", "host-a")
    else:
        fleet_keys.make(folder / "other", "host-a")
        mine = fleet_keys.load(folder / "other", "host-a")
    reason = "bad_message" if listed else "unknown_key"
    before = b.fleet().dropped.get(reason, 0)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.CURVE_PUBLICKEY, mine.public)
        sock.set(zmq.CURVE_SECRETKEY, mine.secret)
        sock.set(zmq.CURVE_SERVERKEY, fleet_keys.key_of(b.root / "keys", "host-b"))
        sock.connect(f"tcp://{where[0]}:{where[1]}")
        for message in ([b"beat", b"\xc1"], [b"hello"], [b"add", b"", b"x"], [b"what"], [b"hello", b"t", b"1", b"2"]):
            sock.send_multipart(message)
        eventually(lambda: b.fleet().dropped.get(reason, 0) > before, what=f"{reason} is counted")
    context.term()


def test_who_gets_tokens_looks_at_their_model_and_their_bytes(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    """A peer whose own looking failed, or was a moment too early: refused by name, and handed back at once. What it
    says that is no request is counted, and the router lives."""
    a, b = hosts
    worker = b.worker("s0", "--digest", "aaaa")
    a.may_use(REMOTE)
    mark = b.fleet().own[0].fingerprint
    context = zmq.Context()
    with context.socket(zmq.DEALER) as sock:
        as_peer(sock, a, b, (net.hosts["b"], FLEET_PORT))

        def hello(token: bytes, fingerprint: str) -> list[bytes]:
            life = Life(number=a.fleet().life, nonce=a.status().instance)
            greeting = Greeting(
                slot="s0", life=life, front=9, stamp=REMOTE, worker_id="w", epoch=1, fingerprint=fingerprint
            )
            sock.send_multipart([b"hello", token, msgspec.msgpack.encode(0), msgspec.msgpack.encode(greeting)])
            return answer(sock)

        def add(request: Any, digest: str) -> None:
            wish = Wish(prefix_version="1", prefix_digest=digest)
            parts = [(7, 8), wish, request]
            sock.send_multipart([b"add", *map(msgspec.msgpack.encode, parts)])

        assert hello(b"t1", "of another model")[0] == b"refused"
        assert hello(b"t1", "")[0] == b"refused"
        assert hello(b"t2", mark)[0] == b"ready"
        dropped = b.fleet().dropped.get("bad_message", 0)
        for nonsense in (5, {}, None, []):
            add(nonsense, "aaaa")
        eventually(lambda: b.fleet().dropped.get("bad_message", 0) == dropped + 4, what="all of it is counted")
        for number, digest in enumerate(("bbbb", "")):
            add([f"r{number}", [1, 2], None, {"max_tokens": 5}], digest)
            kind, _, data = answer(sock)
            back = msgspec.msgpack.decode(data, type=HandedBack)
            assert (kind, back.request_id, back.code) == (b"back", f"r{number}", "refused")
            assert "cannot go on here: weights 1 of other bytes (digest aaaa" in back.message
        told = len(b.told())
        add(["r2", [1, 2], None, {"max_tokens": 5}], "aaaa")
        assert answer(sock)[0] == b"out"
        assert b.told()[told:] == ["add r2 2"]
        sock.send_multipart([b"bye", b"t2"])
        eventually(lambda: b.fleet().serving == {}, what="its link is gone")
    context.term()
    assert worker.process.poll() is None


def as_peer(sock: zmq.Socket[bytes], host: FleetHost, to: FleetHost, where: tuple[str, int]) -> None:
    """Connected with the key of ``host``."""
    mine = fleet_keys.load(host.root / "keys", host.host)
    sock.set(zmq.LINGER, 200)
    sock.set(zmq.CURVE_PUBLICKEY, mine.public)
    sock.set(zmq.CURVE_SECRETKEY, mine.secret)
    sock.set(zmq.CURVE_SERVERKEY, fleet_keys.key_of(to.root / "keys", to.host))
    sock.connect(f"tcp://{where[0]}:{where[1]}")


def answer(sock: zmq.Socket[bytes]) -> list[bytes]:
    assert sock.poll(300_000), "it answers"
    return sock.recv_multipart()


def test_link_that_is_late_loses_at_random_and_mixes_up(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    """Each direction in its own way; then answers alone come later than ``slow_s``."""
    a, b = hosts
    b.worker("s0", "--step-ms", "25")
    a.may_use(REMOTE)
    with net.late("b") as wire:
        wire.behave(
            to_host={"delay_ms": 30, "jitter_ms": 40, "loss": 0.08},
            to_net={"delay_ms": 5, "jitter_ms": 15, "loss": 0.15},
        )
        streams = [Stream(a.url, PATH, BODY) for _ in range(6)]
        for stream in streams:
            stream.start()
        for stream in streams:
            seen = stream.result()
            assert (seen.errors, seen.done, len(seen.finishes)) == ([], 1, 1)
            assert seen.token_ids == expected(a.record, len(BODY["token_ids"]), TOKENS)
        eventually(lambda: min(wire.lost("to_host"), wire.lost("to_net")) > 0, what="frames are lost both ways")
        wire.behave(to_host={"loss": 0}, to_net={"delay_ms": 2500, "jitter_ms": 0, "loss": 0})
        late = a.sees("host-b", "slow")
        assert "answer" in late.why
        wire.behave(to_net={"delay_ms": 0})
        a.sees("host-b", "up")
    a.sees("host-b", "up")


def test_the_same_version_with_other_bytes_is_not_used(hosts: tuple[FleetHost, FleetHost]) -> None:
    """The request waits for the bytes that made its tokens, and goes on with them."""
    a, b = hosts
    own = a.worker("s0", "--hold-at", str(CUT), "--digest", "aaaa")
    before = a.slot("s0").tokens_total
    stream = Stream(a.url, PATH, BODY)
    stream.start()
    eventually(lambda: a.slot("s0").tokens_total == before + CUT, what=f"{CUT} tokens here")
    other = b.worker("s0", "--digest", "bbbb")
    a.may_use(REMOTE)
    eventually(lambda: "other bytes" in a.peer("host-b").unused.get("s0", ""), what="they are seen as others")
    own.kill()
    a.unregister(own, gone=True)
    assert a.status().waiting == 1
    shown = belayerctl(a, "fleet")
    assert "host-b/s0 gets nothing new: weights 1 of other bytes (digest bbbb; s0: aaaa)" in shown.stdout
    b.unregister(other, gone=True)
    same = b.worker("s0", "--digest", "aaaa")
    whole(a, stream, [("s0", own.generation), (REMOTE, same.generation)])
    assert other.process.poll() is None
    assert [line.split()[2] for line in b.told() if line.startswith("add ")][-1] == str(CUT)


def belayerctl(host: FleetHost, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "BELAYER_ROOT": str(host.root), "COLUMNS": "200"}
    command = [sys.executable, "-m", "belayerctl", *words]
    return subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, check=False)


def test_what_is_wrong_with_a_peer_is_named_and_the_rest_serves(
    hosts: tuple[FleetHost, FleetHost], net: Net, tmp_path: Path
) -> None:
    """A name that leads nowhere, a server with another key than the listed one, a peer that does not know us: each
    shown as that; and a key that is listed later counts without a restart."""
    a, b = hosts
    root = b.root.parent / "d"  # short enough for a socket
    net.add("d")
    peers = {"host-a": net.hosts["a"], "host-b": net.hosts["b"], "host-x": "host-x.invalid"}
    mine, x = fleet_keys.make(root / "keys", "host-d"), fleet_keys.make(tmp_path / "x", "host-x")
    fleet_keys.add(root / "keys", "host-a", fleet_keys.load(a.root / "keys", "host-a").public.decode())
    fleet_keys.add(root / "keys", "host-x", x)
    unlisted = prepare(net, "d", "host-d", root, peers)
    try:
        assert unlisted.process.wait(300) == 2, "a key that is missing is a mistake of the operator"
        assert "no key of host-b" in (root / "router.log").read_text()
        checked = belayerctl(unlisted, "config", "check")
        assert (checked.returncode, "no key of host-b" in checked.stderr) == (2, True)
        fleet_keys.add(root / "keys", "host-b", fleet_keys.make(tmp_path / "y", "host-y"))
        assert belayerctl(unlisted, "config", "check").returncode == 0
        broken = b.fleet().dropped.get("not_our_protocol", 0)
        unlisted.come_back()
        for peer, why in (("host-a", "does not let this host in"), ("host-b", "does not prove to be host-b"),
                          ("host-x", "its name host-x.invalid does not resolve")):  # fmt: skip
            eventually(shows(unlisted, peer, why), what=f"{peer}: {why}")
            assert unlisted.peer(peer).state == "silent"
        eventually(lambda: b.fleet().dropped.get("not_our_protocol", 0) > broken, what="host-b has counted it")
        own = unlisted.worker("s0")
        stream = Stream(unlisted.url, PATH, BODY)
        stream.start()
        whole(unlisted, stream, [("s0", own.generation)])
        fleet_keys.add(a.root / "keys", "host-d", mine)
        unlisted.sees("host-a", "up")
    finally:
        (a.root / "keys" / "host-d.key").unlink(missing_ok=True)
        unlisted.stop()


def shows(host: FleetHost, peer: str, why: str) -> Callable[[], bool]:
    return lambda: why in host.peer(peer).why


def test_nothing_else_crosses_hosts(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    a, b = hosts
    for host in (a, b):
        address = net.hosts[host.name]
        assert net.listening(host.name) == {(address, HTTP_PORT), (address, FLEET_PORT)}


def test_earlier_life_of_a_host_is_fenced(hosts: tuple[FleetHost, FleetHost], net: Net) -> None:
    """The last test: a host stands still and a copy takes its place, as after a failover; then the first one wakes."""
    a, b = hosts
    same = ("--digest", "aaaa")  # as host-a last knew them, in an earlier test
    stream, worker = forwarded(a, b, *same)
    first = a.peer("host-b").life
    b.process.send_signal(signal.SIGSTOP)
    net.unplug("b")
    root = b.root.parent / "c"
    root.mkdir()
    shutil.copytree(b.root / "keys", root / "keys")
    Paths(root).make()
    shutil.copy(Paths(b.root).fleet_life, Paths(root).fleet_life)
    net.add("c", same_as="b")
    copy = prepare(net, "c", "host-b", root, {"host-a": net.hosts["a"]})
    try:
        eventually(copy.answers, within=900, what=f"the copy answers; see {root}/router.log", every=0.1)
        eventually(lambda: a.peer("host-b").life > first and a.peer("host-b").state == "up", what="the copy")
        copied = copy.worker("s0", *same)
        makers = [(REMOTE, worker.generation), (REMOTE, copied.generation)]
        whole(a, stream, list(dict.fromkeys(makers)))
        assert copied.running() == 0
    finally:
        copy.stop()
        net.unplug("c")
        net.plug("b")
        b.process.send_signal(signal.SIGCONT)
    a.sees("host-b", "fenced")
    assert "restart its router" in a.peer("host-b").why
    worker.release()
    goes_nowhere = Stream(a.url, PATH, BODY)
    goes_nowhere.start()
    own = a.worker("s0")
    whole(a, goes_nowhere, [("s0", own.generation)])
