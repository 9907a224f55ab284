"""Two whole hosts with real engines, as examples/ray_fleet starts them: a request of one runs on the other, whose main
is killed under it, and the client sees the tokens of the unfailed run."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belayer.localhost import LocalHost, free_port
from belayer.messages.control import WorkerView
from examples.ray_fleet.node import Node
from tests.support.router_host import MODEL
from tests.support.streams import Seen, Stream, chat
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

TOKENS = 80
BODY = chat(TOKENS, temperature=0.8, seed=11, presence_penalty=0.5, logprobs=True, ignore_eos=True)


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, Node]]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    where = {name: f"127.0.0.1:{free_port()}" for name in ("node0", "node1")}
    made = {name: Node(name, listen, root / name, MODEL, 1) for name, listen in where.items()}
    keys = {name: node.key() for name, node in made.items()}
    try:
        for name, node in made.items():
            # node0 has no worker: only its router runs, as on a host whose engines are down.
            node.start(keys, where, ("belayer-router",) if name == "node0" else None)
        made["node1"].host.until_protected()
        yield made
    finally:
        for node in made.values():
            node.stop()
        shutil.rmtree(root)


def ask(node: Node) -> Stream:
    stream = Stream(node.url, "/v1/chat/completions", BODY)
    stream.start()
    return stream


def facts(seen: Seen) -> Any:
    assert seen.errors == []
    return seen.token_ids, seen.text, seen.finishes, seen.usages, seen.roles, seen.done, len(seen.logprobs)


def main_of(host: LocalHost) -> WorkerView:
    return next(worker for slot in host.status().slots for worker in slot.workers if worker.role == "main")


def test_request_of_one_host_outlives_the_main_of_the_other(nodes: dict[str, Node]) -> None:
    origin, other = nodes["node0"], nodes["node1"]
    assert [peer["state"] for peer in origin.fleet()["peers"]] == ["up"]
    truth = facts(ask(other).result(120))
    assert len(truth[0]) == TOKENS
    assert facts(ask(origin).result(120)) == truth
    stream = ask(origin)
    eventually(lambda: len(stream.seen.token_ids) >= 8, within=60, what="tokens from the other host")
    before = main_of(other.host)
    os.kill(before.pid, signal.SIGKILL)
    seen = stream.result(120)
    assert facts(seen) == truth
    makers = {(chunk["belayer"]["slot"], chunk["belayer"]["generation"]) for chunk in seen.chunks if "belayer" in chunk}
    assert len(makers) == 2, "it was killed under the request"
    assert {slot for slot, _ in makers} == {"node1/slot0"}
