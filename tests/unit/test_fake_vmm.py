"""The fake driver is as strict as cuda.h, and counts references as the kernel does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from gpuowner.backends.driver import DriverError, Kernel
from gpuowner.backends.fake_vmm import GRANULARITY, FakeDriver, used_bytes
from gpuowner.backends.port import Access

G = GRANULARITY


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name[-20:]}.{os.getpid()}"


@pytest.fixture
def driver(name: str) -> FakeDriver:
    made = FakeDriver(name, 16 * G)
    made.init()
    made.enter(0)
    return made


def says(act: Callable[[], object]) -> str:
    with pytest.raises(DriverError) as why:
        act()
    return why.value.name


def test_nothing_works_before_init_nor_without_a_context(name: str) -> None:
    driver = FakeDriver(name, 16 * G)
    for act in (driver.count, lambda: driver.create(0, G), lambda: driver.reserve(G, 0), lambda: driver.enter(0)):
        assert says(act) == "CUDA_ERROR_NOT_INITIALIZED"
    driver.init()
    assert not driver.has_context(0), "cuInit makes no context"
    handle, va = driver.create(0, G), driver.reserve(G, 0)
    os.close(driver.export_fd(handle))
    assert not driver.has_context(0), "nor do create, export and reserve"
    for act in (lambda: driver.map(va, G, 0, handle), lambda: driver.fill(va, 0, 1), driver.synchronize):
        assert says(act) == "CUDA_ERROR_INVALID_CONTEXT"
    driver.enter(0)
    driver.map(va, G, 0, handle)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(says(lambda: driver.fill(va, 0, 1))))
    thread.start()
    thread.join()
    assert found == ["CUDA_ERROR_INVALID_CONTEXT"], "a context is current per thread"


def test_every_misuse_has_its_error(driver: FakeDriver) -> None:
    handle, va = driver.create(0, 2 * G), driver.reserve(4 * G, 0)
    driver.map(va, 2 * G, 0, handle)
    misuse: dict[str, Callable[[], object]] = {
        "half a granule": lambda: driver.create(0, G // 2),
        "nothing": lambda: driver.create(0, 0),
        "odd reservation": lambda: driver.reserve(G + 1, 0),
        "offset": lambda: driver.map(va + 2 * G, G, G, handle),
        "not reserved": lambda: driver.map(va + 4 * G, G, 0, handle),
        "across the end": lambda: driver.map(va + 3 * G, 2 * G, 0, handle),
        "mapped twice": lambda: driver.map(va + G, G, 0, handle),
        "more than there is": lambda: driver.map(va + 2 * G, 3 * G, 0, handle),
        "unaligned": lambda: driver.map(va + 2 * G + 4096, G, 0, handle),
        "part of a mapping": lambda: driver.unmap(va, G),
        "inside of a mapping": lambda: driver.unmap(va + G, G),
        "two at once": lambda: driver.unmap(va, 4 * G),
        "access of a part": lambda: driver.set_access(va, G, 0, Access.READ),
        "free while mapped": lambda: driver.free_va(va, 4 * G),
        "free of a part": lambda: driver.free_va(va, 2 * G),
        "unknown handle": lambda: driver.release(1),
        "no descriptor": lambda: driver.import_fd(987),
        "too many threads": lambda: driver.launch(Kernel.POKE, 1, 2048, va, 0),
    }
    assert {what: says(act) for what, act in misuse.items()} == dict.fromkeys(misuse, "CUDA_ERROR_INVALID_VALUE")
    assert says(lambda: driver.create(1, G)) == "CUDA_ERROR_INVALID_DEVICE"
    driver.release(handle)
    assert says(lambda: driver.release(handle)) == "CUDA_ERROR_INVALID_VALUE", "released twice"
    driver.unmap(va, 2 * G)
    assert says(lambda: driver.unmap(va, 2 * G)) == "CUDA_ERROR_INVALID_VALUE"
    driver.free_va(va, 4 * G)


def test_another_devices_descriptor_is_refused(driver: FakeDriver) -> None:
    other = FakeDriver("other", G)
    other.init()
    fd = other.export_fd(other.create(0, G))
    assert says(lambda: driver.import_fd(fd)) == "CUDA_ERROR_INVALID_VALUE"
    os.close(fd)


def test_memory_lives_while_a_handle_a_mapping_or_a_descriptor_does(driver: FakeDriver, name: str) -> None:
    handle, va = driver.create(0, 2 * G), driver.reserve(2 * G, 0)
    fd = driver.export_fd(handle)
    assert used_bytes(name) == 2 * G
    driver.release(handle)
    assert used_bytes(name) == 2 * G, "the descriptor holds it"
    again = driver.import_fd(fd)
    driver.map(va, 2 * G, 0, again)
    driver.set_access(va, 2 * G, 0, Access.READ_WRITE)
    driver.fill(va, 7, 2 * G)
    driver.release(again)
    os.close(fd)
    assert used_bytes(name) == 2 * G, "the mapping holds it"
    driver.unmap(va, 2 * G)
    assert used_bytes(name) == 0


def test_a_full_device_says_so_and_has_room_again(driver: FakeDriver, name: str) -> None:
    handle = driver.create(0, 12 * G)
    assert says(lambda: driver.create(0, 5 * G)) == "CUDA_ERROR_OUT_OF_MEMORY"
    other = FakeDriver(name, 16 * G)
    other.init()
    assert says(lambda: other.create(0, 5 * G)) == "CUDA_ERROR_OUT_OF_MEMORY", "the device is one, whoever asks"
    driver.release(handle)
    other.release(other.create(0, 16 * G))
