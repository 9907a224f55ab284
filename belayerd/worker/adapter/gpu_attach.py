"""A worker on a GPU comes to its memory: sealed weights mapped for reading, its arena's addresses leading to scratch.

Nothing is verified beside the engine's start here, as it is on a CPU: the sums of all weights are taken on the device
at the speed of its memory before the first parameter points at them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import structlog

from belayer.config import Slot
from belayer.messages.owner import Role
from belayer.paths import Paths
from belayerd.worker.adapter import gpu_seat
from belayerd.worker.adapter.device import GpuDevice
from gpuowner.attach import OwnerClient
from gpuowner.attach_gpu import GpuArena
from gpuowner.attach_gpu_weights import GpuWeightsView
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import REAL, driver_for

logger = structlog.get_logger(daemon="worker")


class Seated(NamedTuple):
    weights: GpuWeightsView
    arena: GpuArena


def enter(slot: Slot) -> GpuDevice:
    """The device of this process. Raises WorkerFailed when it is not the slot's, HostUnfit without a driver."""
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")  # torch's primary context, before any mapping of ours
    device = GpuDevice(CudaVmm(driver_for(REAL)))
    device.must_be(slot.device)
    return device


def attach(
    paths: Paths, worker_id: str, slot: Slot, device: GpuDevice, tensor_of: gpu_seat.TensorOf = gpu_seat.on_cuda
) -> Seated:
    """Both owners' memory, and the seat that vLLM's classes find it by. Raises WeightsTorn, WeightsBroken, Refused."""

    def told(said: Any) -> None:
        logger.warning("owner_back", said=said)

    weights, kv = (OwnerClient(paths.owner_sock(kind), Role.WORKER, worker_id) for kind in ("weights", "kv"))
    for owner in (weights, kv):  # an owner that was killed comes back, and is told what is mapped here
        owner.keep(told)
    view = GpuWeightsView(weights, device.memory, slot.model)
    arena = GpuArena(kv, device.memory, slot.name, slot.kv_bytes)
    gpu_seat.take(gpu_seat.GpuSeat(device, view, arena, slot.device, tensor_of))
    return Seated(view, arena)
