"""What every memory backend promises (gpuowner.backends.port), over memfd, over cuda_vmm on the fake driver, and over
cuda_vmm on the real driver where there is one."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from belayer.errors import BelayerError, HostUnfit
from gpuowner.backends.cuda_driver import load_bindings
from gpuowner.backends.memfd_backend import MemfdBackend
from gpuowner.backends.port import Access, Allocation, Backend
from gpuowner.backends.sums import CHUNK, ChunkSum, chunk_sums, first_difference
from tests.support import memory as support

SIZE = 4 << 20
GRAIN = 2 << 20
FAKE = f"fake:contract{os.getpid()}:{1 << 30}"


def no_gpu() -> str:
    """Why the real driver cannot be tested here, or ""."""
    try:
        load_bindings()
    except HostUnfit as why:
        return why.message
    return ""


@pytest.fixture(scope="module", params=["memfd", "cuda_vmm_over_fake", "cuda_vmm_over_cuda"])
def name(request: pytest.FixtureRequest) -> str:
    which = str(request.param)
    if which == "cuda_vmm_over_cuda":
        reason = no_gpu()
        if reason:
            pytest.skip(f"no GPU here: {reason}")
        return "cuda"
    return FAKE if which.endswith("fake") else "memfd"


@pytest.fixture(scope="module")
def memory(name: str) -> Backend:
    return support.backend(name)


@pytest.fixture(scope="module")
def allocation(memory: Backend) -> Allocation:
    return memory.create("test", SIZE)


Mapped = Callable[..., int]


@pytest.fixture
def mapped(memory: Backend, allocation: Allocation) -> Any:
    """``mapped(access, of=allocation)`` -> address; everything is unmapped and freed after the test."""
    made: list[int] = []

    def make(access: Access, of: Allocation = allocation) -> int:
        va = memory.reserve(of.nbytes)
        memory.map(va, of.fd, of.nbytes, access)
        made.append(va)
        return va

    yield make
    for va in made:
        memory.unmap(va)
        memory.free_va(va)


def test_sizes_are_whole_granules_and_descriptors_close_on_exec(memory: Backend, name: str) -> None:
    odd = memory.create("odd", SIZE + 1)
    grain = memory.info().granularity
    assert odd.nbytes == -(-(SIZE + 1) // grain) * grain
    fd = memory.dup_fd(odd, Access.READ)
    assert not os.get_inheritable(odd.fd)
    assert not os.get_inheritable(fd)
    os.close(fd)
    odd.close()
    with pytest.raises(ValueError, match="0 bytes"):
        memory.create("empty", 0)


def test_the_owners_half_loads_no_driver(name: str) -> None:
    assert support.deed(name, "vault", -1, SIZE) == 0


def test_two_mappings_are_one_memory(memory: Backend, mapped: Mapped) -> None:
    one, two = mapped(Access.READ_WRITE), mapped(Access.READ)
    support.put(memory, one + 100, b"seen by both")
    assert support.get(memory, two + 100, 12) == b"seen by both"


def test_a_stray_write_ends_the_writer_and_changes_nothing(
    memory: Backend, name: str, allocation: Allocation, mapped: Mapped
) -> None:
    va = mapped(Access.READ_WRITE)
    support.put(memory, va, b"sealed weights" * 1000)
    before = memory.digest(va, SIZE)
    for access in (Access.READ, Access.NONE):
        ended = support.deed(name, f"poke-{access.value}", allocation.fd, SIZE)
        assert ended in (-signal.SIGSEGV, support.FAULTED), f"a store through a {access} mapping went on: {ended}"
    assert support.deed(name, "poke-read_write", allocation.fd, SIZE) == 0, "the same deed, where it is allowed"
    after = memory.digest(va, SIZE)
    assert after != before
    support.put(memory, va + 64, (b"sealed weights" * 1000)[64:72])
    assert memory.digest(va, SIZE) == before, "only the allowed store had changed a byte"


def test_access_can_be_opened_for_an_update_and_shut_again(memory: Backend, mapped: Mapped) -> None:
    va, reader = mapped(Access.READ), mapped(Access.READ)
    memory.protect(va, Access.READ_WRITE)
    support.put(memory, va + 8, b"version 2")
    memory.protect(va, Access.READ)
    assert support.get(memory, reader + 8, 9) == b"version 2"


def test_another_memory_at_the_same_address(memory: Backend, mapped: Mapped, allocation: Allocation) -> None:
    other = memory.create("other", SIZE)
    va = memory.reserve(SIZE)
    memory.map(va, other.fd, SIZE, Access.READ_WRITE)
    support.put(memory, va, b"other")
    memory.unmap(va)
    memory.map(va, allocation.fd, SIZE, Access.READ_WRITE)
    support.put(memory, va, b"first")
    memory.unmap(va)
    memory.map(va, other.fd, SIZE, Access.READ)
    assert support.get(memory, va, 5) == b"other", "content belongs to the allocation, not to the address"
    memory.unmap(va)
    memory.free_va(va)
    other.close()
    assert support.get(memory, mapped(Access.READ), 5) == b"first"


def test_a_large_range_costs_one_scratch_chunk(memory: Backend, allocation: Allocation) -> None:
    """The warm-up of a standby: its KV addresses lead to scratch, later to the arena, and graphs never notice."""
    scratch, wide = memory.create("scratch", GRAIN), 4 * GRAIN
    arena = memory.create("arena", wide)
    va = memory.reserve(wide)
    memory.alias(va, wide, scratch.fd, GRAIN, Access.READ_WRITE)
    support.put(memory, va + 3 * GRAIN + 5, b"warm")
    assert support.get(memory, va + 5, 4) == b"warm"
    memory.unmap(va)
    memory.map(va, arena.fd, wide, Access.READ_WRITE)
    memory.zero(va, wide)
    assert support.get(memory, va + 3 * GRAIN + 5, 4) == bytes(4)
    memory.unmap(va)
    memory.free_va(va)
    scratch.close()
    arena.close()


def refused(act: Callable[[], None]) -> bool:
    try:
        act()
    except BelayerError:
        return True
    return False


def test_what_does_not_fit_is_refused_and_changes_nothing(
    memory: Backend, allocation: Allocation, mapped: Mapped
) -> None:
    taken, free = mapped(Access.READ_WRITE), memory.reserve(2 * SIZE)
    support.put(memory, taken, b"still here")
    wrong: dict[str, Callable[[], None]] = {
        "not reserved": lambda: memory.map(0x1000 * GRAIN, allocation.fd, SIZE, Access.READ),
        "past the reservation": lambda: memory.map(free + SIZE + GRAIN, allocation.fd, SIZE, Access.READ),
        "over a mapping": lambda: memory.map(taken, allocation.fd, SIZE, Access.READ),
        "offset": lambda: memory.map(free, allocation.fd, GRAIN, Access.READ, offset=GRAIN),
        "longer than the allocation": lambda: memory.map(free, allocation.fd, 2 * SIZE, Access.READ),
        "half a granule": lambda: memory.map(free, allocation.fd, memory.info().granularity // 2, Access.READ),
        "part of a mapping": lambda: memory.unmap(taken + GRAIN),
        "never mapped": lambda: memory.unmap(free),
        "access of nothing": lambda: memory.protect(free, Access.READ),
        "access of a part": lambda: memory.protect(taken + GRAIN, Access.READ),
        "free while mapped": lambda: memory.free_va(taken),
        "free of nothing": lambda: memory.free_va(free + GRAIN),
        "chunks that do not tile": lambda: memory.alias(free, 3 * GRAIN, allocation.fd, 2 * GRAIN, Access.READ),
    }
    for what, act in wrong.items():
        assert refused(act), f"{what} was allowed"
    assert support.get(memory, taken, 10) == b"still here"
    memory.map(free, allocation.fd, SIZE, Access.READ)
    memory.unmap(free)
    with pytest.raises(BelayerError):
        memory.unmap(free)
    memory.free_va(free)


def test_a_foreign_descriptor_is_refused(memory: Backend) -> None:
    va = memory.reserve(SIZE)
    with open(os.devnull, "rb") as other, pytest.raises(BelayerError):
        memory.map(va, other.fileno(), SIZE, Access.READ)
    memory.free_va(va)


def test_bytes_outlive_a_killed_writer(memory: Backend, name: str, allocation: Allocation, mapped: Mapped) -> None:
    writer = support.child(name, "write-and-wait", allocation.fd, SIZE)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"written\n"
    writer.kill()
    writer.communicate()
    assert writer.returncode == -signal.SIGKILL
    assert support.get(memory, mapped(Access.READ), 18) == b"written by a child"


def test_sums_are_those_of_the_twin_and_name_the_chunk(memory: Backend, mapped: Mapped) -> None:
    large = memory.create("large", CHUNK + SIZE)
    va = mapped(Access.READ_WRITE, large)
    data = np.random.default_rng(1).integers(0, 256, large.nbytes, dtype=np.uint8).tobytes()
    support.put(memory, va, data)
    sealed = memory.digest(va, large.nbytes)
    assert sealed == chunk_sums(data)
    assert len(sealed) == 2
    at = CHUNK + 4096
    support.put(memory, va + at, bytes([data[at] ^ 1]))
    assert first_difference(memory.digest(va, large.nbytes), sealed) == 1, "one bit"
    support.put(memory, va + at, data[at : at + 1])
    assert memory.digest(va, large.nbytes) == sealed
    support.put(memory, va, data[8:16] + data[:8])
    assert first_difference(memory.digest(va, large.nbytes), sealed) == 0, "two words that changed places"
    large.close()


def test_zero_is_zero(memory: Backend, mapped: Mapped) -> None:
    va = mapped(Access.READ_WRITE)
    support.put(memory, va, b"\xff" * SIZE)
    memory.zero(va, SIZE)
    assert memory.digest(va, SIZE) == (ChunkSum(0, 0),)


def test_nothing_leaks(memory: Backend, name: str) -> None:
    def once() -> None:
        made = memory.create("leak", SIZE)
        for access in (Access.READ, Access.READ_WRITE):
            fd = memory.dup_fd(made, access)
            va = memory.reserve(SIZE)
            memory.map(va, fd, SIZE, access)
            memory.unmap(va)
            memory.free_va(va)
            os.close(fd)
        made.close()

    def held() -> tuple[int, int]:
        maps = [row for row in Path("/proc/self/maps").read_text().splitlines() if "memfd:belayer" in row]
        return len(os.listdir("/proc/self/fd")), len(maps)

    once()
    gc.collect()  # what earlier tests have left to it is not closed between two counts
    before = held()
    for _ in range(5):
        once()
    assert held() == before


def test_a_buffer_copies_nothing(memory: Backend, mapped: Mapped) -> None:
    va = mapped(Access.READ_WRITE)
    buffer = memory.as_buffer(va, SIZE)
    if isinstance(memory, MemfdBackend):
        buffer[3] = 42
        assert support.get(memory, va + 3, 1) == b"\x2a"
        return
    said = buffer.__cuda_array_interface__
    # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3
    assert (said["shape"], said["typestr"], said["strides"], said["version"]) == ((SIZE,), "|u1", None, 3)
    assert said["data"] == (va, False), "torch refuses a tensor with the read-only flag"
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        torch.as_tensor(buffer, device="cuda")[3] = 42
        torch.cuda.synchronize()
        assert support.get(memory, va + 3, 1) == b"\x2a"


def test_what_it_says_of_itself(memory: Backend) -> None:
    caps = memory.caps()
    assert caps.ro_map
    assert caps.same_va
    assert caps.survives_owner
    assert caps.survives_exporter
    assert caps.ro_fd is isinstance(memory, MemfdBackend), "a CUDA descriptor carries no mode; a memfd re-open does"
    info = memory.info()
    assert info.backend == memory.name
    assert info.device == "cpu" if isinstance(memory, MemfdBackend) else info.device.startswith("GPU-")
