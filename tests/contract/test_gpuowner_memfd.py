"""What a memory backend promises, on memfd: sealed reads, private views, promotion in place, survival."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer.errors import HostUnfit
from gpuowner import hugepages, vmem
from gpuowner.backends import memfd
from gpuowner.backends.memfd import Memfd
from gpuowner.digest import chunk_digests, first_difference
from gpuowner.vmem import MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, Mapping

SIZE = 1 << 20
RW = PROT_READ | PROT_WRITE


@pytest.fixture
def memory() -> Memfd:
    return Memfd("test", SIZE)


def in_child(act: Callable[[], None]) -> int:
    """Status of a forked child after ``act``: 0, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        try:
            act()
            os._exit(0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_stray_write_kills_the_writer_and_changes_nothing(memory: Memfd) -> None:
    mine = memory.map_writable()
    mine.buffer()[7] = 42
    before = tuple(chunk_digests(mine.buffer()))
    reader = Mapping(memory.reader_fd(), SIZE, PROT_READ, MAP_SHARED)

    def stray() -> None:
        reader.buffer()[7] = 1

    assert in_child(stray) == -signal.SIGSEGV
    assert reader.buffer()[7] == 42
    assert first_difference(mine.buffer(), before) is None


def test_a_reader_cannot_make_its_mapping_writable(memory: Memfd) -> None:
    fd = memory.reader_fd()
    with pytest.raises(PermissionError):
        Mapping(fd, SIZE, RW, MAP_SHARED)
    with pytest.raises(PermissionError):
        Mapping(fd, SIZE, PROT_READ, MAP_SHARED).protect(RW)
    assert not os.get_inheritable(fd)
    assert not os.get_inheritable(memory.fd)


def test_sealed_weights_take_no_new_writer_but_the_owner_keeps_its_door(memory: Memfd) -> None:
    mine = memory.map_writable()
    memory.seal_writes()
    assert memory.seals() & memfd.F_SEAL_FUTURE_WRITE
    with pytest.raises(PermissionError):
        memory.map_writable()
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 0)
    mine.protect(PROT_READ)
    assert in_child(lambda: mine.buffer().__setitem__(0, 1)) == -signal.SIGSEGV
    mine.protect(RW)
    mine.buffer()[0] = 5
    assert Mapping(memory.reader_fd(), SIZE, PROT_READ, MAP_SHARED).buffer()[0] == 5


def test_the_size_is_fixed(memory: Memfd) -> None:
    for size in (0, SIZE // 2, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(ValueError, match="0 bytes"):
        Memfd("empty", 0)


def test_a_private_view_sees_the_arena_and_never_dirties_it(memory: Memfd) -> None:
    live = memory.map_writable()
    live.buffer()[0] = 1
    private = Mapping(memory.reader_fd(), SIZE, RW, MAP_PRIVATE)
    assert private.buffer()[0] == 1
    before = tuple(chunk_digests(live.buffer()))
    for offset in range(0, SIZE, 4096):
        private.buffer()[offset] = 99
    assert first_difference(live.buffer(), before) is None
    assert live.buffer()[0] == 1


def test_promotion_shares_the_arena_at_the_same_address(memory: Memfd) -> None:
    live = memory.map_writable()
    private = Mapping(memory.reader_fd(), SIZE, RW, MAP_PRIVATE)
    address, held = private.address, private.buffer()  # what a tensor holds: the bare address
    held[3] = 99
    live.buffer()[3] = 7
    private.replace(memory.fd, RW, MAP_SHARED)
    assert private.address == address
    assert held[3] == 7, "the private page is gone, the arena's is there"
    held[4] = 8
    assert live.buffer()[4] == 8


def test_pages_outlive_their_maker() -> None:
    """The descriptor alone keeps the pages when the process that made and wrote them is killed."""
    ours, theirs = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            made = Memfd("child", SIZE)
            made.map_writable().buffer()[9] = 77
            os.write(ours[1], str(made.fd).encode())
            os.read(theirs[0], 1)  # until it is killed
        finally:
            os._exit(0)
    number = int(os.read(ours[0], 16))
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert Mapping(fd, SIZE, PROT_READ, MAP_SHARED).buffer()[9] == 77


def test_a_parked_range_keeps_its_address_and_nothing_else(memory: Memfd) -> None:
    live = memory.map_writable()
    live.buffer()[5] = 6
    view = Mapping(memory.reader_fd(), SIZE, PROT_READ, MAP_SHARED)
    address, held = view.address, view.buffer()
    vmem.reserve_at(address, SIZE)
    assert in_child(lambda: bytes(held[5:6])) == -signal.SIGSEGV, "a parked range can not even be read"
    live.buffer()[5] = 7
    view.replace(memory.reader_fd(), PROT_READ, MAP_SHARED)
    assert (view.address, held[5]) == (address, 7)


def test_a_version_sealed_for_ever_takes_no_write_and_no_writer(memory: Memfd) -> None:
    mine = memory.map_writable()
    with pytest.raises(OSError, match="busy"):
        memory.seal_for_ever()
    mine.close()
    memory.seal_for_ever()
    for attempt in (memory.map_writable, lambda: os.pwrite(memory.fd, b"x", 0)):
        with pytest.raises(PermissionError):
            attempt()
    with pytest.raises(PermissionError):
        Mapping(memory.fd, SIZE, PROT_READ, MAP_SHARED).protect(RW)
    again = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)  # root may open it so; the seal is of the memory itself
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    os.close(again)


def test_nothing_has_a_name_in_dev_shm(memory: Memfd) -> None:
    before = set(os.listdir("/dev/shm"))
    mine = memory.map_writable()
    mine.buffer()[0] = 1
    reader = Mapping(memory.reader_fd(), SIZE, PROT_READ, MAP_SHARED)
    assert reader.buffer()[0] == 1
    assert {name for name in os.listdir("/dev/shm") if "belayer" in name} <= before
    assert os.readlink(f"/proc/self/fd/{memory.fd}") == "/memfd:belayer-test (deleted)"
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert not any("/dev/shm" in line for line in lines if line.startswith(f"{mine.address:x}-"))


@pytest.mark.parametrize("mode", [mode for mode in hugepages.MODES if mode != "off"])
def test_huge_pages_are_there_or_refused_by_name(mode: str) -> None:
    size = 4 * hugepages.SIZE
    if hugepages.missing(size, mode):
        with pytest.raises(HostUnfit, match=f"huge pages .{mode}. are not there: .+"):
            Memfd("huge", size, mode)
        return
    memory = Memfd("huge", size, mode)
    mapping = memory.map_writable()
    mapping.buffer()[:size] = b"\1" * size
    hugepages.proven(mapping.address, mode)
    assert hugepages.mapped(mapping.address) > 0
    reader = Mapping(memory.reader_fd(), size, PROT_READ, MAP_SHARED)
    assert in_child(lambda: reader.buffer().__setitem__(0, 2)) == -signal.SIGSEGV
    staged = Memfd("staged", size, mode)
    staged.prefault()
    if mode == "thp":
        os.pwrite(staged.fd, b"\1" * size, 0)  # as the writer of an update does
        assert hugepages.mapped(staged.map_writable().address) == 0, "nothing is mapped before it is touched"
        again = staged.map_writable()
        assert bytes(again.buffer()[::4096]) == b"\1" * (size // 4096)
        assert hugepages.mapped(again.address) == size
    adopted = Memfd.adopt(os.dup(memory.fd), size)
    assert adopted.huge_pages == (mode if mode == "hugetlb" else "off")


def test_small_pages_never_pass_for_huge_ones(memory: Memfd) -> None:
    mapping = memory.map_writable()
    mapping.buffer()[0] = 1
    assert hugepages.mapped(mapping.address) == 0
    with pytest.raises(HostUnfit, match="the kernel gave none"):
        hugepages.proven(mapping.address, "thp")
    with pytest.raises(HostUnfit, match="none of off, thp, hugetlb"):
        Memfd("x", SIZE, "large")


def test_adoption_takes_only_that_memory(memory: Memfd) -> None:
    with pytest.raises(OSError, match="not the sealed memory"):
        Memfd.adopt(os.dup(memory.fd), SIZE // 2)
    plain = os.memfd_create("plain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, SIZE)
    with pytest.raises(OSError, match="not the sealed memory"):
        Memfd.adopt(plain, SIZE)
    adopted = Memfd.adopt(os.dup(memory.fd), SIZE)
    assert fcntl.fcntl(adopted.fd, memfd.F_GET_SEALS) == memory.seals()
