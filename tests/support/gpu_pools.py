"""Pools of parked memory on a simulated device: filled as torch does it, and looked at again."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from belayerd.worker.adapter.gpu_pools import PARKED, Pools
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.fake_vmm import FakeDriver
from tests.support import memory as support

GRAIN = 2 << 20
TOTAL = 256 * GRAIN


def fresh(name: str) -> tuple[str, CudaVmm]:
    """A fake device of its own, so that its bytes are this test's."""
    name = f"{name}{os.getpid()}"
    return name, CudaVmm(FakeDriver(name, TOTAL))


def allocate(pools: Pools, tag: str, nbytes: int) -> int:
    """As torch does it: through the C function."""
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return function(pools.tagged(tag).pointers()[0])(nbytes, 0, None) or 0


def release(pools: Pools, tag: str, address: int, nbytes: int) -> None:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    function(pools.tagged(tag).pointers()[1])(address, nbytes, 0, None)


def filled(memory: CudaVmm, pools: Pools) -> dict[int, bytes]:
    """Address -> random content, in every tag, of several sizes."""
    out = {}
    noise = np.random.default_rng(5)
    for tag in PARKED:
        for nbytes in (GRAIN, 3 * GRAIN):
            va = allocate(pools, tag, nbytes)
            out[va] = noise.integers(0, 256, nbytes, dtype=np.uint8).tobytes()
            support.put(memory, va, out[va])
    return out


def assert_content(memory: CudaVmm, content: dict[int, bytes]) -> None:
    for va, data in content.items():
        assert support.get(memory, va, len(data)) == data
