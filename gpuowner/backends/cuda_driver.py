"""The driver port on ``cuda.bindings.driver``, and on nothing else of CUDA.

Each call is checked; a host without the driver or the bindings is refused in one sentence before any call is made.
"""

from __future__ import annotations

import ctypes
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from belayer.errors import HostUnfit
from gpuowner.backends.driver import REAL, DriverError, Kernel
from gpuowner.backends.port import Access

LIBCUDA = "libcuda.so.1"
_PTX = Path(__file__).with_name("kernels.ptx")


def load_bindings() -> Any:
    """The module ``cuda.bindings.driver``. Raises HostUnfit when the driver library or the bindings are missing."""
    try:
        ctypes.CDLL(LIBCUDA)
    except OSError as why:
        raise HostUnfit(
            f"memory cuda_vmm needs the NVIDIA driver, and {LIBCUDA} cannot be loaded: {why}",
            kept="nothing was started",
            remedy='install the driver, or set memory = "memfd" in [gpuowner]',
        ) from why
    try:
        from cuda.bindings import driver
    except ImportError as why:
        raise HostUnfit(
            f"memory cuda_vmm needs the package cuda-bindings: {why}",
            kept="nothing was started",
            remedy="pip install 'belayer[gpu]'",
        ) from why
    return driver


class CudaDriver:
    """gpuowner.backends.driver on the real driver. One per process; contexts are current per thread.

    Making one loads nothing (an owner has one only to name it to its allocating child); the first call does, and raises
    HostUnfit where there is nothing to load."""

    spec = REAL

    def __init__(self) -> None:
        self._functions: dict[Kernel, Any] = {}
        self._retained: dict[int, Any] = {}

    @cached_property
    def _cuda(self) -> Any:
        return load_bindings()

    def _call(self, name: str, *args: Any) -> Any:
        """``name(*args)``; its result, or None when it has none. Raises DriverError."""
        code, *rest = getattr(self._cuda, name)(*args)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(name, code.name, int(code))
        return rest[0] if rest else None

    # --- device ---

    def init(self) -> None:
        try:
            self._call("cuInit", 0)
        except DriverError as why:
            raise HostUnfit(
                f"the NVIDIA driver is installed and does not start: {why.message}",
                kept="nothing was started",
                remedy="nvidia-smi shows whether this host (or container) has a device",
            ) from why

    def count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def uuid(self, device: int) -> str:
        raw = bytes(self._call("cuDeviceGetUuid", self._device(device)).bytes)[:16].hex()
        return f"GPU-{raw[:8]}-{raw[8:12]}-{raw[12:16]}-{raw[16:20]}-{raw[20:]}"

    def granularity(self, device: int) -> int:
        flag = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), flag))

    def enter(self, device: int) -> None:
        if device not in self._retained:
            self._retained[device] = self._call("cuDevicePrimaryCtxRetain", self._device(device))
        self._call("cuCtxSetCurrent", self._retained[device])

    def has_context(self, device: int) -> bool:
        code, _flags, active = self._cuda.cuDevicePrimaryCtxGetState(self._device(device))
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError("cuDevicePrimaryCtxGetState", code.name, int(code))
        return bool(active)

    # --- physical memory ---

    def create(self, device: int, nbytes: int) -> int:
        return int(self._call("cuMemCreate", nbytes, self._properties(device), 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        fd = int(self._call("cuMemExportToShareableHandle", handle, self._posix(), 0))
        os.set_inheritable(fd, False)  # one leaked into a child would keep the memory for the child's life
        return fd

    def import_fd(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._posix()))

    # --- address space ---

    def reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def free_va(self, va: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", va, nbytes)

    def map(self, va: int, nbytes: int, offset: int, handle: int) -> None:
        self._call("cuMemMap", va, nbytes, offset, handle, 0)

    def unmap(self, va: int, nbytes: int) -> None:
        self._call("cuMemUnmap", va, nbytes)

    def set_access(self, va: int, nbytes: int, device: int, access: Access) -> None:
        flags = self._cuda.CUmemAccess_flags
        desc = self._cuda.CUmemAccessDesc()
        desc.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        desc.location.id = device
        desc.flags = {
            Access.NONE: flags.CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Access.READ: flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
            Access.READ_WRITE: flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        }[access]
        self._call("cuMemSetAccess", va, nbytes, [desc], 1)

    # --- work ---

    def fill(self, va: int, value: int, nbytes: int) -> None:
        self._call("cuMemsetD8", va, value, nbytes)

    def copy_out(self, host: int, va: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoH", host, va, nbytes)

    def copy_in(self, va: int, host: int, nbytes: int) -> None:
        self._call("cuMemcpyHtoD", va, host, nbytes)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoD", to, source, nbytes)

    def launch(self, kernel: Kernel, blocks: int, threads: int, *args: int) -> None:
        values = tuple(args), (ctypes.c_uint64,) * len(args)
        function = self._function(kernel)
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, 0, values, 0)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    # --- values ---

    def _device(self, device: int) -> Any:
        return self._call("cuDeviceGet", device)

    def _posix(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, device: int) -> Any:
        made = self._cuda.CUmemAllocationProp()
        made.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        made.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        made.location.id = device
        made.requestedHandleTypes = self._posix()
        return made

    def _function(self, kernel: Kernel) -> Any:
        """Loaded into the current context once per process: primary contexts only, one per device."""
        if kernel not in self._functions:
            # The image is PTX text, which the driver reads up to its first zero byte.
            module = self._call("cuModuleLoadData", _PTX.read_bytes() + b"\0")
            for each in Kernel:
                self._functions[each] = self._call("cuModuleGetFunction", module, each.value.encode())
        return self._functions[kernel]
