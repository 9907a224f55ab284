"""vLLM's GPU worker over the owners' memory. Has never run on a GPU (docs/h200.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from belayer.errors import BelayerError, HostUnfit
from belayerd.worker.adapter import gpu_loader, gpu_sleep
from belayerd.worker.adapter.gpu_kv import AnswerKv
from belayerd.worker.adapter.gpu_resume import GpuResumingRunner
from belayerd.worker.adapter.gpu_seat import gpu_seat
from belayerd.worker.adapter.weights import Moved

# NCCL keeps addresses of captured graphs that are stale once their memory was parked, and hangs (conformance row 54).
ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_environment(environment: Mapping[str, str]) -> None:
    """Raise HostUnfit when a setting would make parking unsafe. Settings are read at import, so they must be there
    before it."""
    for name, value in ENVIRONMENT.items():
        if environment.get(name) != value:
            raise HostUnfit(
                f"{name} is {environment.get(name)!r}, a GPU worker that parks its graphs needs {value!r}",
                kept="nothing was started",
                remedy=f"set {name}={value}",
            )
    for name in _ALLOCATOR:
        if "expandable_segments:true" in environment.get(name, "").lower():
            raise HostUnfit(
                f"{name} switches expandable segments on, which torch's memory pools do not support",
                kept="nothing was started",
                remedy=f"take expandable_segments out of {name}",
            )


class BelayerGpuWorker(Worker):
    """Weights by the loader, KV in the arena, graphs and workspace in pools that park."""

    def init_device(self) -> None:
        check_environment(os.environ)
        gpu_sleep.register()
        self.vllm_config.model_config.sleep_mode_backend = gpu_sleep.NAME
        super().init_device()
        seat = gpu_seat()
        seat.device.must_be(seat.wanted)
        # Every capture that names no pool of its own takes this one.
        type(current_platform)._global_graph_pool = seat.device.pools.torch_pool("cudagraph").id

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner:
            raise BelayerError("model runner V2 is not supported: unset VLLM_USE_V2_MODEL_RUNNER")
        return GpuResumingRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        return AnswerKv() if tag == "kv_cache" else gpu_seat().device.pool(tag)

    def assert_arena(self) -> None:
        """Raise BelayerError when a layer's cache does not lie in the arena."""
        arena = gpu_seat().arena
        for name, layer in self.model_runner.compilation_config.static_forward_context.items():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and not arena.va <= cache.data_ptr() < arena.va + arena.nbytes:
                raise BelayerError(f"the KV cache of {name} is not in the arena")

    def follow_weights(self, threads: int) -> Moved:
        """Move the model to the owner's last weight version; ``threads`` is for the CPU, a GPU sums by itself."""
        seat = gpu_seat()
        return gpu_loader.follow(self.model_runner.model, seat.weights, seat.tensor_of)

    def park(self) -> str:
        self.synchronize_device()
        return gpu_seat().device.park()

    def unpark(self) -> str:
        return gpu_seat().device.unpark()
