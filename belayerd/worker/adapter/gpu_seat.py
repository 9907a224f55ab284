"""What a GPU worker's process has been given, for vLLM's classes that are built by name (see ``seat``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from belayer.errors import BelayerError
from belayerd.worker.adapter.device import GpuDevice
from gpuowner.attach_gpu import GpuArena
from gpuowner.attach_gpu_weights import GpuWeights
from gpuowner.backends.cuda_vmm import DeviceBytes

TensorOf = Callable[[DeviceBytes], torch.Tensor]  # a uint8 view, no copy


def on_cuda(buffer: DeviceBytes) -> torch.Tensor:
    return torch.as_tensor(buffer, device="cuda")


@dataclass
class GpuSeat:
    """``wanted``: the slot's ``device`` as configured."""

    device: GpuDevice
    weights: GpuWeights
    arena: GpuArena
    wanted: str
    tensor_of: TensorOf = on_cuda


_seat: list[GpuSeat] = []


def take(seat: GpuSeat) -> None:
    if _seat:
        raise BelayerError("this process already has a GPU engine's seat")
    _seat.append(seat)


def gpu_seat() -> GpuSeat:
    if not _seat:
        raise BelayerError("no GPU seat was taken: engines are built by belayerd.worker only")
    return _seat[0]
