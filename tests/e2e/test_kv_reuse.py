"""KV that a killed main had finished is used by the next one, and never a block that it had not finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belayer import procs
from benchmarks import tiny
from tests.support.kv_fuzz import BLOCK, SAME, Fuzz, slot
from tests.support.owner_stack import MODEL, REPO
from tests.support.wait import eventually
from tests.support.worker_client import Stream, engine_request
from tests.support.worker_stack import Worker, WorkerStack

pytestmark = pytest.mark.engine

TOKEN_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, KV heads, head size, float32: the tiny model
LONG = [100 + (7 * n) % 800 for n in range(300)]
DYING = ("tests.support.dying",)


def model() -> Path:
    return tiny.make(REPO / ".cache/models/belayer-tiny", MODEL)


@contextmanager
def running(text: str, *zygote: str) -> Iterator[WorkerStack]:
    stack = WorkerStack(text, model(), zygote or ("belayerd.worker.zygote",))
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


def serve(stack: WorkerStack, worker: Worker, generation: int) -> int:
    return int(worker.become_main(stack.arena().epoch, generation)["adopted"])


def ask(worker: Worker, name: str, prefix: list[int] | None = None, count: int = 8) -> Stream:
    front = worker.front()
    request = engine_request(name, LONG, max_tokens=count, temperature=0.0, logprobs=1, ignore_eos=True)
    stream = front.generate(request, prefix)
    front.close()
    return stream


def flush(worker: Worker) -> None:
    front = worker.front()
    front.utility(1, "reset_prefix_cache")
    front.until(lambda: bool(front.utilities))
    front.close()


def cached(stream: Stream) -> int:
    stats = [output.prefill_stats for output in stream.outputs if output.prefill_stats is not None]
    return int(stats[0].num_cached_tokens) if stats else 0


def apart(one: Stream, other: Stream) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


@pytest.fixture(scope="module")
def stack() -> Iterator[WorkerStack]:
    with running(slot(TOKEN_BYTES)) as made:
        yield made


def test_what_was_finished_is_not_computed_again(stack: WorkerStack) -> None:
    first, second = stack.spawn(), stack.spawn()
    assert serve(stack, first, 1) == 0
    whole = ask(first, "whole", count=40)
    first.kill()
    stack.end_fence()
    blocks = (len(LONG) + 39) // BLOCK
    assert serve(stack, second, 2) == blocks, "every full block of prompt and output, the last token has no KV yet"
    again = ask(second, "again", count=40)
    assert cached(again) == len(LONG) // BLOCK * BLOCK
    assert again.tokens == whole.tokens
    assert apart(again, whole) < SAME
    second.kill()
    stack.end_fence()


def test_random_kills_with_a_small_arena(stack: WorkerStack) -> None:
    """The fuzz in small; ``python -m benchmarks.kv_fuzz`` runs it 200 times and more."""
    fuzz = Fuzz(stack)
    out = fuzz.round(kills=6)
    assert out.kills == 6
    assert out.adopted > 0, "no main found a block of its predecessor: nothing was tested"
    assert out.resumed > 0
    assert out.bad == ()
    # A flush of a serving main empties the log too: what it held is not found by the next one.
    shadow = stack.spawn()
    flush(fuzz.main)
    assert fuzz.replace(shadow) == 0


def test_killed_before_the_forward_pass_the_block_is_not_used() -> None:
    """The very moment: vLLM has entered the block in its cache, the model has not run."""
    with running(slot(TOKEN_BYTES), *DYING) as stack:
        adopted, found, computed = killed_while_scheduling(stack)
        assert adopted == 0
        assert found.tokens == computed.tokens
        assert apart(found, computed) < SAME


def test_control_published_while_scheduling_the_same_kill_is_seen() -> None:
    """A log that believes vLLM's own cache at once hands over a block without content, and the comparison finds it."""
    with running(slot(TOKEN_BYTES), *DYING, "--early") as stack:
        adopted, found, computed = killed_while_scheduling(stack)
        assert adopted == 1
        assert found.tokens != computed.tokens or apart(found, computed) > SAME


def killed_while_scheduling(stack: WorkerStack) -> tuple[int, Stream, Stream]:
    """Blocks that the second main adopted, its answer with them, and its answer without any cache."""
    first, second = stack.spawn(), stack.spawn()
    serve(stack, first, 1)
    front = first.front()
    (stack.paths.run / "die").touch()
    front.add(engine_request("cut", LONG, max_tokens=2, temperature=0.0))
    eventually(lambda: procs.is_dead(first.pidfd), what="the main dies while it schedules")
    assert not (stack.paths.run / "die").exists(), "it died of the cause that was meant"
    front.close()
    stack.end_fence()
    adopted = serve(stack, second, 2)
    found = ask(second, "found")
    flush(second)
    return adopted, found, ask(second, "computed")
