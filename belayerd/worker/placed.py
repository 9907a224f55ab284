"""Where a worker computes and from whose memory, decided by its slot's ``device``; the life after it is one code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm.engine.arg_utils import EngineArgs

from belayer.config import Model, Router, Slot
from belayer.paths import Paths
from belayerd.worker import rank
from belayerd.worker.adapter.core import engine_args
from belayerd.worker.adapter.device import CpuDevice, Device
from gpuowner.attach import ArenaView, WeightsView
from gpuowner.attach_gpu import GpuArena
from gpuowner.attach_gpu_weights import GpuWeightsView


class Placed(NamedTuple):
    """``verified`` waits until the weights are; nothing is computed before it."""

    device: Device
    weights: WeightsView | GpuWeightsView
    arena: ArenaView | GpuArena
    verified: Callable[[], object]
    args: EngineArgs


def place(paths: Paths, worker_id: str, slot: Slot, model: Model, router: Router) -> Placed:
    """Attach to the owners. Raises BelayerError; the process then ends."""
    if slot.device == "cpu":
        view, arena, verified = rank.attach(paths, worker_id, slot, 0)
        return Placed(CpuDevice(), view, arena, verified, engine_args(model, slot, router))
    # vLLM's classes for CUDA are imported where one computes on it, and nowhere else.
    from belayerd.worker.adapter import gpu_attach
    from belayerd.worker.adapter.gpu_engine import gpu_engine_args

    device = gpu_attach.enter(slot)
    seated = gpu_attach.attach(paths, worker_id, slot, device)
    return Placed(device, seated.weights, seated.arena, lambda: None, gpu_engine_args(model, slot, router))
