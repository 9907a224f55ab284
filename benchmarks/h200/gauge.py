"""How much device memory is in use, whoever uses it. Imports no torch."""

from __future__ import annotations

from gpuowner.backends.driver import REAL
from gpuowner.backends.fake_vmm import used_bytes


def used(spec: str) -> int:
    """Bytes in use on the device, whoever uses them: NVML's figure, or the fake driver's."""
    if spec != REAL:
        return used_bytes(spec.split(":")[1])
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
