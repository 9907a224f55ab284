"""The bare engine loop: vLLM's EngineCore stepped by hand in one process, nothing around it. Baseline of ``overhead``.

``python -m benchmarks.bare MODEL`` reads lines ``CONCURRENCY TOKENS`` and answers each with tokens per second: that
many requests at once, each making that many tokens, timed from the first step to the last. None of our code is in it.

On some CPUs vLLM packs float32 matrices into private memory, which is faster from a few rows on, and which nobody else
can map. ``MODEL unpacked`` leaves that out: the same arithmetic as a worker's, on weights that can be shared.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from belayer.clock import monotonic, wall
from benchmarks.cold import environment

PROMPT = 32  # tokens; the same here and over the router


def prompt(number: int) -> list[int]:
    """Token ids of request ``number``; no two share a block."""
    return [1000 + (7919 * (number + 1) + 31 * i) % 20000 for i in range(PROMPT)]


class Rate(NamedTuple):
    """Tokens per second: from the first step to the last; and of its decode steps, where all requests run."""

    whole: float
    steady: float


class Bare:
    """The loop in a process of its own, ready when this returns; it takes no CPU between two calls."""

    def __init__(self, model: Path, *, packed: bool = True) -> None:
        self._tmp = tempfile.TemporaryDirectory(prefix="bare-")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare", str(model), *([] if packed else ["unpacked"])],
            env=environment(self._tmp.name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.steps_ms: list[float] = []  # of the last call: from one step's tokens to the next one's
        self.rate(1, 8)  # first use of every kernel

    @property
    def pid(self) -> int:
        return self._child.pid

    def rate(self, concurrency: int, tokens: int) -> Rate:
        """Raises RuntimeError when the child has ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{concurrency} {tokens}\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("rate "):
                _, rate, *steps = line.split()
                self.steps_ms = [float(step) for step in steps]
                return Rate(float(rate), concurrency * len(steps) / sum(self.steps_ms) * 1e3)
        raise RuntimeError(f"the bare engine ended with {self._child.wait()}")

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        self._child.kill()
        self._child.wait()
        self._tmp.cleanup()


def _leave_unpacked() -> None:
    """Where its callers look it up at each call: in the module that defines it."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = linear

    if not callable(utils.dispatch_cpu_unquantized_gemm):
        raise RuntimeError("vLLM packs elsewhere now: this baseline would be packed after all")
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _is_packed(core: Any) -> bool:
    """vLLM leaves an empty parameter behind where it has packed one."""
    model = core.model_executor.driver_worker.worker.model_runner.model
    return any(parameter.numel() == 0 for parameter in model.parameters())


def _child(model: str, packed: bool) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.request import Request

    if not packed:
        _leave_unpacked()
    args = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=256 << 20,
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    config = args.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    if not packed and _is_packed(core):
        raise RuntimeError("a matrix was packed after all: this is not what a worker computes with")
    turn = 0
    for line in sys.stdin:
        concurrency, tokens = map(int, line.split())
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for number in range(concurrency):
            turn += 1
            asked = EngineCoreRequest(
                request_id=f"r{turn}",
                prompt_token_ids=prompt(turn),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=wall(),
                lora_request=None,
                cache_salt=f"{turn}-{number}",
                data_parallel_rank=None,
            )
            core.add_request(Request.from_engine_core_request(asked, core.request_block_hasher))
        made, ends, began = 0, [], monotonic()
        while core.scheduler.has_unfinished_requests():
            outputs, _ = core.step()
            made += sum(len(out.new_token_ids) for each in outputs.values() for out in each.outputs)
            if made:
                ends.append(monotonic())
        seconds = monotonic() - began
        while core.scheduler.has_requests():
            core.step()
        if made != concurrency * tokens:
            raise RuntimeError(f"{made} tokens instead of {concurrency * tokens}")
        steps = [f"{(after - before) * 1e3:.4f}" for before, after in pairwise(ends)]
        print(f"rate {made / seconds:.3f}", *steps, flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], packed=sys.argv[2:] != ["unpacked"])
