"""The worker's data-plane wire, as the router relies on it: the real worker and the recorded engine of the tests both
pass this, so that what is tested with the one is true of the other."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from belayer.messages import worker as w
from belayer.messages.common import Done
from belayer.messages.worker import Stamp
from tests.support.router_host import TREE, write_record
from tests.support.worker_client import ControlClient, FrontClient, Stream, engine_request
from tests.support.worker_stack import WorkerStack

PROMPT = [6403, 3980, 253, 655, 28]
READY = {"max_model_len", "num_gpu_blocks", "block_size", "dtype", "max_num_seqs", "instance_id", "world_size"}


@dataclass
class Peer:
    """A worker that is main of generation 1, whatever it is made of."""

    path: Path
    slot: str
    worker_id: str
    control: ControlClient
    refused_as_standby: Stream

    def front(self, index: int = 0) -> FrontClient:
        return FrontClient(self.path, index)

    def running(self) -> int:
        return self.control.call(w.WorkerStatus(), w.WorkerStatusReply).running


def ask_standby(path: Path) -> Stream:
    """Before it is main it greets, and answers an add with an error."""
    front = FrontClient(path, 9)
    front.hello()
    stream = front.generate(engine_request("too-early", PROMPT, max_tokens=4))
    front.close()
    return stream


def recorded() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        root = Path(folder)
        write_record(root / "record.json")
        path = root / "w.sock"
        command = [sys.executable, "-m", "tests.support.fake_worker", "--endpoint", f"ipc://{path}", "--standby"]
        command += ["--slot", "slot0", "--generation", "0", "--worker-id", "slot0-fake"]
        # As slow as an engine: what is asked about a request of 400 tokens is asked while it runs.
        command += ["--record", str(root / "record.json"), "--step-ms", "25"]
        with subprocess.Popen(command, cwd=TREE) as process:
            control = ControlClient(path)
            early = ask_standby(path)
            control.call(w.BecomeMain(generation=1), Done)
            yield Peer(path, "slot0", "slot0-fake", control, early)
            control.close()
            process.kill()


def real() -> Iterator[Peer]:
    stack = WorkerStack("max_model_len = 512")
    try:
        stack.start()
        worker = stack.spawn()
        early = ask_standby(worker.path)
        worker.become_main(stack.arena().epoch, 1)
        yield Peer(worker.path, "slot0", worker.worker_id, worker.control, early)
    finally:
        stack.stop()


@pytest.fixture(scope="module", params=["recorded", pytest.param("real", marks=pytest.mark.engine)])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    yield from (recorded() if request.param == "recorded" else real())


@pytest.fixture
def front(peer: Peer) -> Iterator[FrontClient]:
    client = peer.front()
    yield client
    client.close()


def test_a_hello_is_answered_with_the_ready_info(front: FrontClient) -> None:
    assert set(front.hello()) >= READY


def test_a_standby_refuses_with_an_error_and_no_token(peer: Peer) -> None:
    assert (peer.refused_as_standby.finish, peer.refused_as_standby.tokens) == ("error", [])


def test_outputs_are_stamped_and_counted_without_a_gap(peer: Peer, front: FrontClient) -> None:
    stream = front.generate(engine_request("stamped", PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True))
    assert (len(stream.tokens), stream.finish) == (8, "length")
    assert {(s.slot, s.generation, s.worker_id) for s in stream.stamps} == {(peer.slot, 1, peer.worker_id)}
    assert all(isinstance(stamp, Stamp) for stamp in stream.stamps)
    front.utility(3, "reset_prefix_cache")
    front.until(lambda: any(one.call_id == 3 for one in front.utilities))
    assert front.seqs == list(range(front.seqs[0], front.seqs[0] + len(front.seqs)))


@pytest.mark.parametrize("cut", [1, 4, 7, 8])
def test_a_request_with_its_output_goes_on_where_it_was(front: FrontClient, cut: int) -> None:
    ask = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    whole = front.generate(engine_request(f"whole-{cut}", PROMPT, **ask))
    rest = front.generate(engine_request(f"rest-{cut}", PROMPT, **ask), prefix=whole.tokens[:cut])
    assert whole.tokens[:cut] + rest.tokens == whole.tokens
    assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
    assert (rest.finish, rest.stop_reason) == (whole.finish, whole.stop_reason)
    assert all(one.prefill_stats is None and one.events is None for one in rest.outputs)


def test_a_stop_token_ends_it_also_inside_the_prefix(front: FrontClient) -> None:
    ask = {"max_tokens": 8, "temperature": 0.0}
    free = front.generate(engine_request("free", PROMPT, **ask, ignore_eos=True))
    stop = free.tokens[4]
    length = free.tokens.index(stop) + 1
    whole = front.generate(engine_request("stopped", PROMPT, **ask, stop_token_ids=[stop]))
    assert (len(whole.tokens), whole.finish, whole.stop_reason) == (length, "stop", stop)
    again = front.generate(engine_request("again", PROMPT, **ask, stop_token_ids=[stop]), prefix=whole.tokens)
    assert (again.tokens, again.finish, again.stop_reason) == ([], "stop", stop)


def test_an_abort_frees_the_engine_without_an_output(peer: Peer, front: FrontClient) -> None:
    stream = front.add(engine_request("left", PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True))
    front.until(lambda: stream.tokens)
    front.abort(["left", "never-was"])
    front.until(lambda: peer.running() == 0)
    assert stream.finish is None


def test_a_hello_with_a_new_token_drops_what_ran_for_the_old_one(peer: Peer, front: FrontClient) -> None:
    """And ``ready`` is the border: nothing of the old link comes after it, the next number is the one that it named."""
    front.greet(b"one")
    old = front.add(engine_request("dropped", PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True))
    front.until(lambda: old.tokens)
    again = front.greet(b"one", told=2)
    assert (again["got"], again["told"]) == (1, 2), "of two messages one is missing: the worker's count shows it"
    assert peer.running() == 1, "the same link again: only a question"
    standing = front.greet(b"two")
    assert peer.running() == 0
    assert standing["weight_version"] == "1"
    assert standing["seq"] == front.seqs[-1] + 1
    had = list(old.tokens)
    rest = front.generate(
        engine_request("dropped", PROMPT, max_tokens=len(had) + 4, temperature=0.0, ignore_eos=True), had
    )
    assert (len(rest.tokens), rest.finish) == (4, "length")


def test_a_request_that_cannot_be_read_is_answered_with_an_error(front: FrontClient) -> None:
    """Silence would leave its client waiting for ever. A damaged one whose id can be read, then a good one."""
    stream = front.add_raw("unreadable", [b"add", b"", msgspec.msgpack.encode(["unreadable", "no token ids", 5, 5])])
    front.finish(stream)
    assert (stream.finish, stream.tokens) == ("error", [])
    bad_prefix = front.add_raw("bad-prefix", [b"add", b"\xc1", *front.encode(engine_request("bad-prefix", PROMPT))])
    front.finish(bad_prefix)
    assert bad_prefix.finish == "error"
    assert front.generate(engine_request("good", PROMPT, max_tokens=2, temperature=0.0)).finish == "length"


def test_utilities_are_answered_by_call_id(front: FrontClient) -> None:
    front.utility(11, "reset_prefix_cache")
    front.utility(12, "no_such_method")
    front.until(lambda: len(front.utilities) == 2)
    answers = {one.call_id: one for one in front.utilities}
    assert answers[11].failure_message is None
    assert answers[11].result.result is True
    assert answers[12].failure_message


def test_each_front_hears_only_its_own(peer: Peer, front: FrontClient) -> None:
    other = peer.front(1)
    mine = front.add(engine_request("mine", PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True))
    theirs = other.add(engine_request("theirs", PROMPT, max_tokens=6, temperature=0.0, ignore_eos=True))
    front.finish(mine)
    other.finish(theirs)
    assert mine.tokens == theirs.tokens
    assert other.seqs == list(range(other.seqs[0], other.seqs[0] + len(other.seqs)))
    other.close()
