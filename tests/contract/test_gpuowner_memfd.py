"""What a memory backend promises, on memfd: sealed reads, private views, promotion in place, survival."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable

import pytest

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
