"""A real vLLM engine from zygote and owners: promotion, SIGKILL in mid generation, and exact resume."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from belayer import procs
from belayer.clock import monotonic
from belayer.errors import Fenced, LeaseRefused, Refused
from belayer.heartbeat import Watch
from belayer.messages import owner as o
from belayer.messages import worker as w
from belayer.messages.common import Done
from gpuowner.attach import ArenaView, OwnerClient
from tests.support.wait import eventually
from tests.support.worker_client import FrontClient, Stream, engine_request
from tests.support.worker_stack import Worker, WorkerStack

pytestmark = pytest.mark.engine

# "Once upon a time" is in every model's reach; ids of SmolLM2's vocabulary.
PROMPT = [6403, 3980, 253, 655, 28, 281, 253, 1165, 4612, 28, 665, 436, 253]
COUNT = 12
# Prefill and decode use different kernels (matrix by matrix, matrix by vector): float32 logprobs differ in the last
# bits.
SAME = 1e-4

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.9},
    "seeded_penalised": {"temperature": 1.0, "seed": 11, "min_p": 0.02, "top_k": 40, "repetition_penalty": 1.2},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.5},
    "min_tokens": {"temperature": 0.0, "min_tokens": 10, "ignore_eos": False},
    "logit_bias": {"temperature": 0.0, "logit_bias": {28: 4.0}},
}


@pytest.fixture(scope="module")
def stack() -> Iterator[WorkerStack]:
    # A small batch makes every prompt over 64 tokens a chunked prefill: stock vLLM dies of it with a seed on the CPU.
    made = WorkerStack("max_num_batched_tokens = 64\nmax_model_len = 512\nhang_limit_s = 5.0")
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def main(stack: WorkerStack) -> Worker:
    worker = stack.spawn()
    assert worker.status.state is w.WorkerState.STANDBY
    worker.become_main(stack.arena().epoch, 1)
    return worker


@pytest.fixture
def front(main: Worker) -> Iterator[FrontClient]:
    client = main.front()
    yield client
    client.close()


def request(name: str, **params: Any) -> Any:
    return engine_request(name, PROMPT, **{"max_tokens": COUNT, "logprobs": 1, "ignore_eos": True, **params})


def assert_same(got: Stream, whole: Stream, cut: int) -> None:
    assert whole.tokens[:cut] + got.tokens == whole.tokens
    assert got.logprobs == pytest.approx(whole.logprobs[cut:], abs=SAME)
    assert (got.finish, got.stop_reason) == (whole.finish, whole.stop_reason)


def test_a_standby_refuses_requests_and_becomes_main(stack: WorkerStack, main: Worker, front: FrontClient) -> None:
    assert front.hello()["max_model_len"] == 512
    stream = front.generate(request("hello", temperature=0.0))
    assert len(stream.tokens) == COUNT
    assert stream.finish == "length"
    assert {(s.slot, s.generation, s.worker_id) for s in stream.stamps} == {("slot0", 1, main.worker_id)}
    assert front.seqs == list(range(front.seqs[0], front.seqs[0] + len(front.seqs)))
    assert stack.arena().state == "leased"
    with pytest.raises(Fenced):
        main.control.call(w.BecomeMain(generation=1), Done)
    with pytest.raises(Refused, match="already holds"):
        main.control.call(w.TakeArena(epoch=9), Done)


def test_an_idle_worker_has_one_thread_that_polls(main: Worker) -> None:
    """R8: torch would make one for each of vLLM's 13 process groups, each waking a hundred times a second."""
    names = []
    for task in Path(f"/proc/{main.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    assert names.count("gloo_tcp_loop") == 1, sorted(names)


@pytest.mark.parametrize("feature", list(FEATURES))
def test_resume_is_exact_at_every_cut(front: FrontClient, feature: str) -> None:
    params = FEATURES[feature]
    whole = front.generate(request(f"{feature}-whole", **params))
    assert len(whole.tokens) == COUNT
    for cut in (1, COUNT // 2, COUNT - 1, COUNT):
        got = front.generate(request(f"{feature}-{cut}", **params), prefix=whole.tokens[:cut])
        assert_same(got, whole, cut)
        assert all(out.prefill_stats is None and out.events is None for out in got.outputs)


def test_resume_keeps_stop_tokens_and_their_reason(front: FrontClient) -> None:
    free = front.generate(request("free", temperature=0.0))
    stop = free.tokens[7]
    first = free.tokens.index(stop)
    whole = front.generate(request("stop-whole", temperature=0.0, stop_token_ids=[stop]))
    assert (whole.finish, whole.stop_reason, len(whole.tokens)) == ("stop", stop, first + 1)
    for cut in {1, first, first + 1}:
        got = front.generate(request(f"stop-{cut}", temperature=0.0, stop_token_ids=[stop]), prefix=whole.tokens[:cut])
        assert_same(got, whole, cut)


def test_a_grammar_continues_where_it_was(front: FrontClient) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    def shaped(name: str) -> Any:
        choice = StructuredOutputsParams(regex=r"\d{3}-\d{3}-[a-z]{4}")
        choice._backend = "xgrammar"
        return request(name, temperature=0.0, structured_outputs=choice, stop_token_ids=[2], max_tokens=30)

    whole = front.generate(shaped("grammar-whole"))
    assert whole.finish == "stop"
    for cut in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        assert_same(front.generate(shaped(f"grammar-{cut}"), prefix=whole.tokens[:cut]), whole, cut)


def test_a_seeded_request_survives_a_chunked_prefill(front: FrontClient) -> None:
    prompt = [PROMPT[i % len(PROMPT)] for i in range(150)]
    params = {"temperature": 0.9, "seed": 3, "max_tokens": 8, "logprobs": 1, "ignore_eos": True}
    front.utility(1, "reset_prefix_cache")
    whole = front.generate(engine_request("chunked", prompt, **params))
    cached = front.generate(engine_request("cached", prompt, **params))  # its prefill is one short chunk
    assert cached.tokens == whole.tokens
    front.utility(2, "reset_prefix_cache")
    got = front.generate(engine_request("chunked-cut", prompt, **params), prefix=whole.tokens[:5])
    assert_same(got, whole, 5)


def test_requests_that_cannot_run_are_answered_and_hurt_nobody(main: Worker, front: FrontClient) -> None:
    poison = front.generate(engine_request("poison", [5, 10**6], max_tokens=4))
    negative = front.generate(engine_request("negative", [5, 6], max_tokens=4), prefix=[-1])
    assert (poison.finish, negative.finish) == ("error", "error")
    running = front.add(request("twice", temperature=0.0))
    twice = front.generate(request("twice", temperature=0.0))
    assert twice.finish == "error" or running.finish
    for garbage in ([b"add"], [b"add", b"\xc1", b"\xc1"], [b"abort", b"\xff"], [b"util", b""], [b"?"], [b"ctl", b"x"]):
        front.socket.send_multipart(garbage)
    assert front.generate(request("after", temperature=0.0)).finish == "length"
    assert not procs.is_dead(main.pidfd)


def test_aborts_and_utilities_are_served(main: Worker, front: FrontClient) -> None:
    stream = front.add(request("long", temperature=0.0, max_tokens=400))
    front.until(lambda: stream.tokens)
    front.abort(["long"])
    front.utility(7, "get_supported_tasks")
    front.until(lambda: any(out.call_id == 7 for out in front.utilities))
    front.until(lambda: main.control.call(w.WorkerStatus(), w.WorkerStatusReply).running == 0)
    assert next(out for out in front.utilities if out.call_id == 7).failure_message is None


def test_the_beat_goes_on_when_idle(stack: WorkerStack, main: Worker) -> None:
    watch = Watch(stack.paths.heartbeat(main.worker_id), monotonic())

    def pulse() -> Any:
        return watch.observe(monotonic()).pulse

    eventually(pulse, what="a first beat")
    stamps = set()

    def beats() -> bool:
        stamps.add(stack.paths.heartbeat(main.worker_id).stat().st_mtime_ns)
        return len(stamps) >= 10

    eventually(beats, what="ten beats of an idle worker")
    assert pulse().phase == "idle"
    assert pulse().running == pulse().waiting == 0


def arena_hash(stack: WorkerStack) -> str:
    client = OwnerClient(stack.paths.owner_sock("kv"), o.Role.WORKER, "test")
    view = ArenaView(client, "slot0", stack.arena().nbytes)
    digest = hashlib.sha256(memoryview(view.mapping.buffer())).hexdigest()
    view.mapping.close()
    client.close()
    return digest


def test_sigkill_in_mid_generation_loses_no_token(stack: WorkerStack, main: Worker) -> None:
    front = main.front()
    features = ("greedy", "seeded", "seeded_penalised", "presence")
    whole = {name: front.generate(request(f"{name}-unfailed", max_tokens=40, **FEATURES[name])) for name in features}
    before = arena_hash(stack)
    shadow = stack.spawn()
    assert arena_hash(stack) == before, "the shadow's warm-up touched the live arena"
    with pytest.raises(LeaseRefused):
        shadow.control.call(w.TakeArena(epoch=stack.arena().epoch), Done)

    streams = {name: front.add(request(name, max_tokens=40, **FEATURES[name])) for name in features}
    front.until(lambda: all(len(stream.tokens) >= 15 for stream in streams.values()))
    main.kill()
    killed_at = monotonic()
    fenced = eventually(lambda: (info := stack.arena()).state == "fencing" and info, what="FENCING")
    assert not fenced.holder_alive
    with pytest.raises(LeaseRefused):
        shadow.control.call(w.TakeArena(epoch=fenced.epoch), Done)
    free = stack.end_fence()
    assert (free.state, free.epoch) == ("free", fenced.epoch + 1)
    with pytest.raises(Fenced):
        shadow.control.call(w.TakeArena(epoch=fenced.epoch), Done)
    took = shadow.become_main(free.epoch, 2)

    again = shadow.front()
    resumed = {
        name: again.add(request(name, max_tokens=40, **FEATURES[name]), prefix=streams[name].tokens)
        for name in features
    }
    again.finish(*resumed.values())
    for name in features:
        cut = len(streams[name].tokens)
        assert 15 <= cut < 40
        assert_same(resumed[name], whole[name], cut)
        assert {stamp.generation for stamp in resumed[name].stamps} == {2}
    first = min(stream.first_at for stream in resumed.values()) - killed_at
    print(f"seen dead to first resumed token: {first * 1e3:.0f} ms, {took}")
    again.close()
    front.close()


def test_retire_ends_the_process_and_frees_nothing_by_itself(stack: WorkerStack) -> None:
    worker = stack.spawn()
    assert any(stack.paths.worker_tmp(worker.worker_id).glob("vllm_dist_*"))
    assert worker.control.call(w.Retire(generation=0), Done)
    eventually(lambda: procs.is_dead(worker.pidfd), what="the retired worker's end")
