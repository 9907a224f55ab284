"""Two whole hosts with real engines, as examples/ray_fleet starts them, each in a network of its own: a request of one
runs on the other, whose main is killed under it, which is cut off, and which dies as a whole; the client sees the
tokens of the unfailed run."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from belayer import procs
from belayer.localhost import OWNERS, ROLLOUT, LocalHost
from belayer.messages.control import WorkerView
from benchmarks import tiny
from examples.ray_fleet.node import Node
from tests.support.netlab import Net
from tests.support.owner_stack import REPO
from tests.support.patience import SLOT, patient
from tests.support.router_host import MODEL
from tests.support.streams import Seen, Stream, chat
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

TOKENS = 400
BODY = chat(TOKENS, temperature=0.8, seed=11, presence_penalty=0.5, logprobs=True, ignore_eos=True)
# A slot that is full gives its host's next request to the other: so the first host has room for one.
FILLER = chat(1900, temperature=0, ignore_eos=True)
SLOTS = {"node0": f"max_num_seqs = 1\n{SLOT}", "node1": SLOT}


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    made = Net()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def nodes(net: Net) -> Iterator[dict[str, Node]]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    model = tiny.make(REPO / ".cache/models/belayer-tiny", MODEL)
    where = {name: f"{net.add(name)}:7300" for name in SLOTS}
    made = {
        name: Node(name, listen, root / name, model, 1, net.hosts[name], SLOTS[name]) for name, listen in where.items()
    }
    keys = {name: node.key() for name, node in made.items()}
    try:
        for name, node in made.items():
            with net.entered(name):
                node.start(keys, where, OWNERS)  # which writes the configuration
                config = node.host.paths.config
                config.write_text(patient(f"{config.read_text()}\n[policy]\n"))
                node.host.start(tuple(daemon for daemon in ROLLOUT if daemon not in OWNERS))
        for node in made.values():
            node.host.until_protected()
        yield made
    finally:
        for node in made.values():
            node.stop()
        remove_tree(root)


def ask(node: Node, body: dict[str, Any] = BODY) -> Stream:
    stream = Stream(node.url, "/v1/chat/completions", body)
    stream.start()
    return stream


def facts(seen: Seen) -> Any:
    assert seen.errors == []
    return seen.token_ids, seen.text, seen.finishes, seen.usages, seen.roles, seen.done, len(seen.logprobs)


def makers(seen: Seen) -> list[tuple[str, int]]:
    rows = [(one["belayer"]["slot"], one["belayer"]["generation"]) for one in seen.chunks if "belayer" in one]
    return list(dict.fromkeys(rows))


def main_of(host: LocalHost) -> WorkerView:
    return next(worker for slot in host.status().slots for worker in slot.workers if worker.role == "main")


def forwarded(origin: Node) -> tuple[Stream, Stream]:
    """A stream of ``origin`` that has begun on the other host, because its own slot is full; and what fills that.
    Again, where the slot was free before the stream came."""
    for _ in range(5):
        eventually(lambda: all(peer["state"] == "up" for peer in origin.fleet()["peers"]), what="the other is there")
        filler = ask(origin, FILLER)
        eventually(lambda filler=filler: bool(filler.seen.token_ids), what="the first host is full")
        stream = ask(origin)
        eventually(lambda stream=stream: len(stream.seen.token_ids) >= 8, what="tokens")
        if makers(stream.seen)[0][0] == "node1/slot0" and stream.is_alive():
            return stream, filler
        filler.leave()
        assert stream.result().errors == []
    raise AssertionError("five streams did not run on the other host")


def test_request_of_one_host_outlives_the_main_of_the_other(nodes: dict[str, Node]) -> None:
    origin, other = nodes["node0"], nodes["node1"]

    def same_bytes() -> bool:
        seen = origin.fleet()
        (peer,) = seen["peers"]
        digests = {slot["weights_digest"] for slot in (*peer["slots"], *seen["own"])}
        return peer["state"] == "up" and len(digests) == 1 and "" not in digests and bool(peer["slots"] and seen["own"])

    eventually(same_bytes, what="the same files are known as the same bytes on both")
    truth = facts(ask(other).result(300))
    assert len(truth[0]) == TOKENS
    stream, filler = forwarded(origin)
    os.kill(main_of(other.host).pid, signal.SIGKILL)
    seen = stream.result(300)
    filler.leave()
    assert facts(seen) == truth
    assert [slot for slot, _ in makers(seen)] == ["node1/slot0"] * 2, "it was killed under the request"


def test_request_outlives_the_link_and_then_the_whole_other_host(nodes: dict[str, Node], net: Net) -> None:
    origin, other = nodes["node0"], nodes["node1"]
    other.host.until_protected()
    truth = facts(ask(other).result(300))
    for end in ("cut", "killed"):
        stream, filler = forwarded(origin)
        if end == "cut":
            net.unplug("node1")
        else:
            kill_all(other.host)
        filler.leave()
        seen = stream.result(300)
        assert facts(seen) == truth, end
        assert [slot for slot, _ in makers(seen)] == ["node1/slot0", "slot0"], end
        if end == "cut":
            net.plug("node1")


def kill_all(host: LocalHost) -> None:
    """As a host that loses power: no process of it says or does another thing."""
    while pids := host._sessions():
        fds = []
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                fds.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(fds[-1], signal.SIGKILL)
        assert procs.wait_dead(fds, 300.0) == []
        for fd in fds:
            os.close(fd)
