"""The CUDA driver calls that the cuda_vmm backend makes, as a port: the same code runs over the real driver
(``cuda_driver``) and over a fake one (``fake_vmm``).

Only the driver API, and only integers. Every method raises DriverError with the name that cuda.h gives the failure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from belayer.errors import BelayerError, HostUnfit
from gpuowner.backends.port import Access

# Of the PROBE kernel (kernels.cu).
PROBE_ROUNDS, PROBE_FACTOR, PROBE_TERM = 64, 6364136223846793005, 1442695040888963407
_MASK = (1 << 64) - 1


class Kernel(StrEnum):
    """Kernels of kernels.cu. Every argument of each is an unsigned 64-bit integer."""

    DIGEST = "belayer_digest"
    PROBE = "belayer_probe"
    POKE = "belayer_poke"
    SPIN = "belayer_spin"


def probe_word(seed: int, index: int) -> int:
    """What PROBE computes for one word."""
    x = (seed + index) & _MASK
    for _ in range(PROBE_ROUNDS):
        x = (x * PROBE_FACTOR + PROBE_TERM) & _MASK
    return x


class DriverError(BelayerError):
    """``call`` failed with ``name`` (cuda.h: CUresult). After an asynchronous fault (700, 710, ...) the process must
    end."""

    def __init__(self, call: str, name: str, number: int, why: str = "") -> None:
        super().__init__(f"{call}: {name} ({number}){': ' + why if why else ''}")
        self.call, self.name, self.number = call, name, number


class Driver(Protocol):
    """``spec``: what ``driver_for`` makes this driver from in another process. Sizes and addresses are bytes."""

    spec: str

    def init(self) -> None:
        """cuInit; makes no context."""

    def count(self) -> int: ...

    def uuid(self, device: int) -> str:
        """ "GPU-" and the UUID, as NVML writes it."""

    def granularity(self, device: int) -> int: ...

    def create(self, device: int, nbytes: int) -> int:
        """A handle of physical memory that can be exported."""

    def release(self, handle: int) -> None: ...

    def export_fd(self, handle: int) -> int:
        """A close-on-exec descriptor that keeps the memory."""

    def import_fd(self, fd: int) -> int:
        """A handle of this process; ``fd`` stays the caller's."""

    def reserve(self, nbytes: int, alignment: int) -> int: ...

    def free_va(self, va: int, nbytes: int) -> None: ...

    def map(self, va: int, nbytes: int, offset: int, handle: int) -> None:
        """Mapped without any access: ``set_access`` comes next."""

    def unmap(self, va: int, nbytes: int) -> None: ...

    def set_access(self, va: int, nbytes: int, device: int, access: Access) -> None: ...

    def enter(self, device: int) -> None:
        """Make the device's primary context (the one torch uses) current in this thread; made when missing."""

    def has_context(self, device: int) -> bool:
        """Whether this process has made the primary context."""

    def fill(self, va: int, value: int, nbytes: int) -> None: ...

    def copy_out(self, host: int, va: int, nbytes: int) -> None:
        """Device to the host address ``host``."""

    def copy_in(self, va: int, host: int, nbytes: int) -> None: ...

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Device to device, within this one."""

    def launch(self, kernel: Kernel, blocks: int, threads: int, *args: int) -> None: ...

    def synchronize(self) -> None: ...


REAL = "cuda"
FAKE = "fake"


def driver_for(spec: str) -> Driver:
    """``cuda``, or ``fake:NAME:BYTES``. Raises HostUnfit for another name; a driver that is missing on this host
    refuses when it is first used."""
    # Both are imported late: the bindings are not installed on a CPU host, and no daemon needs the fake.
    if spec == REAL:
        from gpuowner.backends.cuda_driver import CudaDriver

        return CudaDriver()
    kind, _, rest = spec.partition(":")
    name, _, total = rest.partition(":")
    if kind != FAKE or not name or not total.isdigit():
        raise HostUnfit(f"no driver is named {spec!r}", remedy=f"{REAL}, or {FAKE}:NAME:BYTES for tests")
    from gpuowner.backends.fake_vmm import FakeDriver

    return FakeDriver(name, int(total))
