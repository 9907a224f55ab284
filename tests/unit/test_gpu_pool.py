"""Graph memory is parked and comes back as it was; the probe tells a good device from a wrong or a silent one."""

from __future__ import annotations

import os
import threading

import pytest

from belayer.errors import BelayerError, GpuUnhealthy, Refused
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import DriverError, Kernel, driver_for
from gpuowner.backends.fake_vmm import FakeDriver, used_bytes
from gpuowner.backends.park import GraphPool
from gpuowner.backends.probe import WarmProbe
from tests.support import memory as support

GRAIN = 2 << 20
NAME = f"pool{os.getpid()}"
SPEC = os.environ.get("BELAYER_TEST_DRIVER", f"fake:{NAME}:{64 * GRAIN}")


def test_a_parked_pool_comes_back_with_its_content_at_its_addresses_over_cuda() -> None:
    memory = CudaVmm(driver_for(SPEC))
    pool = GraphPool(memory)
    small, large = pool.allocate(100), pool.allocate(3 * GRAIN)
    assert support.get(memory, small, 8) == bytes(8)
    support.put(memory, small, b"captured")
    support.put(memory, large + 2 * GRAIN, b"state")
    for _ in range(2):
        assert pool.park() == 4 * GRAIN
        with pytest.raises(Refused, match="parked"):
            pool.allocate(1)
        assert pool.unpark() == 4 * GRAIN
        assert support.get(memory, small, 8) == b"captured"
        assert support.get(memory, large + 2 * GRAIN, 5) == b"state"
    pool.free(small)
    pool.free(large)
    with pytest.raises(Refused, match="no block"):
        pool.free(large)


def test_parking_gives_the_memory_back_and_a_full_device_can_be_tried_again() -> None:
    name = f"room{os.getpid()}"
    memory = CudaVmm(FakeDriver(name, 4 * GRAIN))
    pool = GraphPool(memory)
    first, second = pool.allocate(GRAIN), pool.allocate(GRAIN)
    support.put(memory, first, b"kept")
    memory.digest(first, GRAIN)  # makes the small buffer that results go to, which stays
    scratch = used_bytes(name) - 2 * GRAIN
    pool.park()
    assert used_bytes(name) == scratch
    hog = memory.private(4 * GRAIN - scratch - GRAIN)
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        pool.unpark()
    assert pool.parked, "the first block, which had room, was given back"
    memory.release(hog)
    pool.unpark()
    assert support.get(memory, first, 4) == b"kept"
    assert support.get(memory, second, 4) == bytes(4)


class Corrupting(FakeDriver):
    """Writes back one wrong byte."""

    def copy_in(self, va: int, host: int, nbytes: int) -> None:
        super().copy_in(va, host, nbytes)
        self.fill(va + nbytes - 1, 0x55, 1)


def test_content_that_comes_back_different_is_said() -> None:
    memory = CudaVmm(Corrupting(NAME, 64 * GRAIN))
    pool = GraphPool(memory)
    pool.allocate(GRAIN)
    pool.park()
    with pytest.raises(BelayerError, match="chunk 0 came back different"):
        pool.unpark()


def test_the_probe_over_cuda() -> None:
    probe = WarmProbe(CudaVmm(driver_for(SPEC)))
    assert probe.probe() >= 0
    assert probe.probe() >= 0


class Sick(FakeDriver):
    """``mode``: what goes wrong with the next kernel."""

    mode = "well"

    def __init__(self) -> None:
        super().__init__(NAME, 64 * GRAIN)
        self.gate = threading.Event()

    def launch(self, kernel: Kernel, blocks: int, threads: int, *args: int) -> None:
        if self.mode == "hang":
            self.gate.wait()
        if self.mode == "error":
            raise DriverError("cuLaunchKernel", "CUDA_ERROR_ECC_UNCORRECTABLE", 214)
        if self.mode != "nothing":
            super().launch(kernel, blocks, threads, *args)
        if self.mode == "wrong":
            self.fill(args[0] + 31 * 8, 0, 1)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("wrong", r"wrong words at \[31\]"),
        ("nothing", "wrong words"),
        ("error", "ECC"),
        ("hang", "no answer in 0.05"),
    ],
)
def test_a_sick_device_fails_the_probe(mode: str, said: str) -> None:
    driver = Sick()
    probe = WarmProbe(CudaVmm(driver))
    driver.mode = mode
    with pytest.raises(GpuUnhealthy, match=said):
        probe.probe(deadline_s=0.05 if mode == "hang" else 60.0)
    driver.gate.set()
