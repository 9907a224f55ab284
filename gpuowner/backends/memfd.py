"""Memory of the CPU backend: one memfd per allocation.

The pages live as long as any descriptor or mapping of them does, so a worker's kill loses nothing.
Readers get an O_RDONLY re-open: a shared mapping of it cannot be made writable, so a stray write is
SIGSEGV in the writer and never a changed weight. Nothing has a name in the file system, so nothing can be
left over there.
"""

from __future__ import annotations

import fcntl
import os

from gpuowner import hugepages
from gpuowner.digest import Told, default_threads, first_difference, nobody
from gpuowner.vmem import MAP_NORESERVE, MAP_SHARED, PROT_READ, PROT_WRITE, Mapping

F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # fcntl.h; in Python's fcntl only where the libc headers had them
F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE, F_SEAL_FUTURE_WRITE = 0x2, 0x4, 0x8, 0x10


class Memfd:
    """``nbytes`` of zeroes that can neither shrink (a truncated mapping is SIGBUS) nor grow."""

    name = "memfd"

    def __init__(self, label: str, nbytes: int, huge_pages: str = "off") -> None:
        """``huge_pages``: as in ``gpuowner.hugepages``. Raises HostUnfit when the host has none to give."""
        if nbytes <= 0:
            raise ValueError(f"allocation {label!r} of {nbytes} bytes")
        hugepages.there_or_refuse(nbytes, huge_pages)
        self.nbytes, self.huge_pages = nbytes, huge_pages
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages == "hugetlb" else 0)
        self.fd = os.memfd_create(f"belayer-{label}"[:200], flags)
        os.ftruncate(self.fd, nbytes)
        # A re-open through /proc checks the inode's mode: without this, a reader under our uid could open
        # it writable.
        os.fchmod(self.fd, 0o400)
        fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)

    @classmethod
    def adopt(cls, fd: int, nbytes: int) -> Memfd:
        """Memory of an earlier life by its descriptor, which is ours from now on. Raises OSError when it cannot be
        that memory."""
        have = os.fstat(fd).st_size
        if have != nbytes or not fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK:
            raise OSError(f"a descriptor of {have} bytes is not the sealed memory of {nbytes} bytes")
        memory = cls.__new__(cls)
        memory.nbytes, memory.fd = nbytes, fd
        memory.huge_pages = "hugetlb" if os.fstat(fd).st_blksize >= hugepages.SIZE else "off"
        return memory

    def map_writable(self) -> Mapping:
        """The owner's own mapping; make it before ``seal_writes``, which forbids new ones."""
        mapping = Mapping(self.fd, self.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE)
        if self.huge_pages == "thp":
            hugepages.advise(mapping.address, self.nbytes)
        return mapping

    def prefault(self) -> None:
        """Take the huge pages now: a writer that uses write(2) would otherwise get small ones, without a word. Raises
        HostUnfit when the kernel gives none."""
        if self.huge_pages != "thp":
            return
        mapping = self.map_writable()
        view = memoryview(mapping.buffer()).cast("B")
        for at in range(0, self.nbytes, hugepages.SIZE):
            view[at] = 0
        try:
            hugepages.proven(mapping.address, self.huge_pages)
        finally:
            mapping.close()

    def seal_writes(self) -> None:
        """No write(2) and no new writable shared mapping from now on, by anyone; existing ones keep theirs
        (F_SEAL_FUTURE_WRITE, fcntl(2)). F_SEAL_WRITE would be refused with EBUSY while one exists."""
        fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)

    def seal_for_ever(self) -> None:
        """No write by anyone, through anything, ever. Raises OSError (EBUSY) while a writable mapping exists: that it
        succeeds is the proof that the writer has let go."""
        fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_WRITE)

    def sealed_for_ever(self) -> bool:
        return bool(self.seals() & F_SEAL_WRITE)

    def difference(self, chunks: tuple[bytes, ...], told: Told = nobody) -> int | None:
        """Hash everything; the first chunk that differs from its sha256, or None. Slow: for a thread."""
        fd = self.reader_fd()
        try:
            mapping = Mapping(fd, self.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
        finally:
            os.close(fd)
        try:
            return first_difference(mapping.buffer(), chunks, default_threads(), told)
        finally:
            mapping.close()

    def seals(self) -> int:
        return fcntl.fcntl(self.fd, F_GET_SEALS)

    def reader_fd(self) -> int:
        """A new read-only descriptor; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)
