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
    args = args_for(model, slot, router)
    if slot.device == "cpu":
        view, arena, verified = rank.attach(paths, worker_id, slot, 0)
        return Placed(CpuDevice(), view, arena, verified, args)
    from belayerd.worker.adapter import gpu_attach

    device = gpu_attach.enter(slot)
    seated = gpu_attach.attach(paths, worker_id, slot, device)
    return Placed(device, seated.weights, seated.arena, lambda: None, args)


def args_for(model: Model, slot: Slot, router: Router) -> EngineArgs:
    """What vLLM is told of the slot's engine."""
    if slot.device == "cpu":
        return engine_args(model, slot, router)
    # What concerns a GPU is imported where one is computed on, and nowhere else.
    from belayerd.worker.adapter.gpu_engine import gpu_engine_args

    return gpu_engine_args(model, slot, router)
