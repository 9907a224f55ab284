"""Tensors as an update's writer has them, as flat arrays of bits: numpy, torch on the CPU, or bytes with a dtype.

torch is not imported here: its tensors are read by address, which is public (``Tensor.data_ptr``).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from belayer.errors import WeightsBroken
from gpuowner.copying import typed
from gpuowner.safetensors_file import ITEM_BYTES, elements

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class HostTensor:
    """``flat``: the bits of all items in C order. ``held`` keeps alive whatever they belong to."""

    dtype: str
    shape: tuple[int, ...]
    flat: NDArray[Any]
    held: Any = None


@dataclass(frozen=True)
class Sparse:
    """New values for some items of a tensor: ``indices`` count items in C order, ``values`` is flat, of any kind that
    ``host_tensor`` takes. They replace what is there."""

    indices: Any
    values: Any


def raw_tensor(dtype: str, shape: tuple[int, ...], data: Any) -> HostTensor:
    """From bytes, with a safetensors dtype. Raises WeightsBroken when they do not fit."""
    nbytes = memoryview(data).nbytes
    if dtype not in ITEM_BYTES or nbytes != elements(shape) * ITEM_BYTES[dtype]:
        raise WeightsBroken(f"{nbytes} bytes are no tensor of shape {list(shape)} and dtype {dtype}")
    return HostTensor(dtype, shape, typed(data, dtype), data)


def host_tensor(name: str, value: Any) -> HostTensor:
    """``value`` as it lies in memory. Raises WeightsBroken for what is no tensor on the CPU with a known dtype."""
    if isinstance(value, HostTensor):
        return value
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        return HostTensor(_dtype(name, flat.dtype.name), value.shape, flat.view(f"u{flat.itemsize}"), value)
    if hasattr(value, "data_ptr") and hasattr(value, "detach"):
        return _from_torch(name, value)
    raise WeightsBroken(
        f"{name} is a {type(value).__name__}, not a tensor", remedy="give numpy arrays or torch tensors"
    )


def _from_torch(name: str, value: Any) -> HostTensor:
    if str(value.device) != "cpu":
        raise WeightsBroken(f"{name} lies on {value.device}", remedy="move it to the CPU first: tensor.cpu()")
    whole = value.detach().contiguous()
    dtype = _dtype(name, str(whole.dtype).removeprefix("torch."))
    nbytes = whole.numel() * whole.element_size()
    data = (ctypes.c_ubyte * nbytes).from_address(whole.data_ptr()) if nbytes else b""
    return HostTensor(dtype, tuple(whole.shape), typed(data, dtype), whole)


def _dtype(name: str, said: str) -> str:
    if said not in _DTYPES:
        raise WeightsBroken(f"{name} has the dtype {said}, which no layout has")
    return _DTYPES[said]
