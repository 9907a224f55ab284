"""vLLM's own replacements of Triton kernels on a CPU, put in once before the fork: it looks through every name of every
module for them, half a second of CPU that each worker would spend again while its slot is exposed."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform


def prepare() -> None:
    """After everything that defines or imports a kernel. What is imported later finds the replacement at its source."""
    if not current_platform.is_cpu() or vars(CpuPlatform).get("belayer_done"):
        return
    current_platform.register_triton_kernel_overrides()
    setattr(CpuPlatform, "register_triton_kernel_overrides", classmethod(lambda _: None))  # noqa: B010
    setattr(CpuPlatform, "belayer_done", True)  # noqa: B010
