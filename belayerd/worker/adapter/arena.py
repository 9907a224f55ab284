"""The engine's KV cache in the owner's arena, and the runner that can resume.

vLLM allocates the whole KV cache by one ``torch.zeros``. A function mode that is active only around that
allocation answers it with a view of the arena, so nothing is zeroed and nothing is patched. A standby's
arena is a private view: it may warm up as it likes, the live pages stay untouched (promise R8).
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.executor import uniproc_executor
from vllm.v1.worker import cpu_worker

from belayer.errors import BelayerError
from belayerd.worker.adapter import weights
from belayerd.worker.adapter.resume import ResumingRunner
from belayerd.worker.adapter.seat import seat
from gpuowner.vmem import Mapping

if not hasattr(uniproc_executor, "Lock"):
    raise BelayerError("vLLM's executor of one process no longer makes a Lock: see belayerd/worker/adapter/arena.py")
# vLLM makes a lock between processes, a name in /dev/shm: when somebody has filled that, no worker could start.
# This engine is one process.
uniproc_executor.Lock = threading.Lock
cpu_worker.CPUModelRunner = ResumingRunner  # or a whole runner is built and thrown away: a tenth of a second of CPU


class _AnswerZeros(TorchFunctionMode):
    """Answers exactly one ``torch.zeros(n, dtype=int8)`` with the first ``n`` bytes of the arena."""

    def __init__(self, arena: Mapping) -> None:
        super().__init__()
        self._arena, self._answered = arena, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8:
            return self._answer(int(args[0]))
        return func(*args, **kwargs)

    def _answer(self, nbytes: int) -> torch.Tensor:
        if self._answered or nbytes > self._arena.nbytes:
            raise BelayerError(f"vLLM asks for {nbytes} bytes of KV cache, the arena has {self._arena.nbytes}")
        self._answered = nbytes
        return torch.frombuffer(self._arena.buffer(), dtype=torch.int8)[:nbytes]

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and not self._answered:
            # Fail closed: an engine with a private cache would warm up fine and lose everything at a
            # handover.
            raise BelayerError("vLLM no longer allocates its KV cache by torch.zeros: the arena was not used")


class BelayerWorker(cpu_worker.CPUWorker):
    """vLLM's CPU worker over the owner's arena."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return _AnswerZeros(seat().arena.mapping) if tag == "kv_cache" else nullcontext()

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            raise BelayerError("model runner V2 on the CPU is not supported: unset VLLM_USE_V2_MODEL_RUNNER")
        if not isinstance(self.model_runner, ResumingRunner):
            raise BelayerError("vLLM's CPU worker finds its runner elsewhere now: requests could not be continued")

    def follow_weights(self, threads: int) -> weights.Moved:
        """Move the model to the owner's last weight version (``weights.follow``)."""
        held = seat()
        if held.bound is None:
            raise BelayerError("this engine's weights were not loaded from the owner")
        return weights.follow(self.model_runner.model, held.weights, held.bound, threads)

    def assert_arena(self) -> None:
        """Raise BelayerError when a layer's cache does not lie in the arena."""
        arena = seat().arena.mapping
        for name, layer in self.model_runner.compilation_config.static_forward_context.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and not arena.contains(cache.data_ptr(), 1):
                raise BelayerError(f"the KV cache of {name} is not in the arena")
