"""Huge pages for weights, where the host has them and the configuration asks for them.

"off": 4 KiB pages. "thp": transparent ones, which the kernel gives to a memfd only when ``shmem_enabled`` allows it
(Documentation/admin-guide/mm/transhuge.rst). "hugetlb": from the pool that the operator reserved (``nr_hugepages``).
Asked for and not there is refused by name: a silent 4 KiB page would be a promise not kept.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from belayer.errors import HostUnfit

MODES = ("off", "thp", "hugetlb")
SIZE = 2 << 20  # bytes, x86-64 and arm64 with 4 KiB pages
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def rounded(nbytes: int, mode: str) -> int:
    """``nbytes``, for "hugetlb" up to whole pages, because such a file has no other sizes."""
    return -(-nbytes // SIZE) * SIZE if mode == "hugetlb" else nbytes


def missing(nbytes: int, mode: str) -> str:
    """Why the host cannot give ``nbytes`` of huge pages; "" when it can."""
    if mode == "hugetlb":
        free = _meminfo("HugePages_Free")
        size = _meminfo("Hugepagesize") << 10
        if size != SIZE:
            return f"the host's huge pages have {size} bytes, not {SIZE}"
        if free * size < nbytes:
            return f"{nbytes >> 20} MiB of them are needed and {free * size >> 20} MiB are free in the pool"
    elif mode == "thp":
        allowed = _shmem_mode()
        if allowed in ("", "never", "deny"):
            return f"{SHMEM} is {allowed or 'missing'}"
    elif mode != "off":
        return f"{mode!r} is none of {', '.join(MODES)}"
    return ""


def there_or_refuse(nbytes: int, mode: str) -> None:
    """Raise HostUnfit unless the host can give what is asked for."""
    why = missing(nbytes, mode)
    if why:
        remedy = "reserve pages (sysctl vm.nr_hugepages)" if mode == "hugetlb" else f"write advise to {SHMEM}"
        raise HostUnfit(
            f"huge pages ({mode}) are not there: {why}",
            kept="nothing was allocated",
            remedy=f'{remedy}, or set huge_pages = "off" in [gpuowner]',
        )


def advise(address: int, nbytes: int) -> None:
    if _libc.madvise(address, nbytes, _MADV_HUGEPAGE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")


def mapped(address: int) -> int:
    """Bytes of the mapping at ``address`` of this process that huge pages of either kind hold (proc_pid_smaps(5))."""
    here, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            here = name.startswith(f"{address:x}-")
        elif here and name in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
            found += int(rest.split()[0]) << 10
    return found


def proven(address: int, mode: str) -> None:
    """Raise HostUnfit when huge pages were asked for and the written mapping has none."""
    if mode != "off" and mapped(address) == 0:
        raise HostUnfit(
            f"huge pages ({mode}) were asked for and the kernel gave none: memory is too fragmented, or too small",
            kept="nothing was sealed",
            remedy='set huge_pages = "off" in [gpuowner], or free memory',
        )


def _meminfo(name: str) -> int:
    rows = Path("/proc/meminfo").read_text().splitlines()
    return next((int(row.split()[1]) for row in rows if row.startswith(f"{name}:")), 0)


def _shmem_mode() -> str:
    try:
        text = SHMEM.read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]
