"""A memory control group so small that the kernel's OOM killer ends who enters it; version 1, or 2 where it may be.

The groups of one run of pytest have a name of its own, which its processes find in their environment: another run on
the same host, the other half of the suite, must not sweep them."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.wait import remove_group

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_RUN = os.environ.setdefault("BELAYER_TEST_OOM", str(os.getpid()))
_NAME = f"belayer-test-oom-{_RUN}-"


def _base() -> Path | None:
    if os.geteuid() != 0:
        return None
    if (_V1 / "memory.limit_in_bytes").exists():
        return _V1
    control = _V2 / "cgroup.subtree_control"
    return _V2 if control.exists() and "memory" in control.read_text().split() else None


def available() -> bool:
    return _base() is not None


def run_out_of_memory(limit: int = 32 << 20) -> None:
    """Ends this process."""
    base = _base()
    assert base is not None
    group = base / f"{_NAME}{os.getpid()}"
    group.mkdir()
    if base == _V1:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        swap = group / "memory.memsw.limit_in_bytes"
    else:
        (group / "memory.max").write_text(str(limit))
        swap = group / "memory.swap.max"
    if swap.exists():
        swap.write_text(str(limit) if base == _V1 else "0")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = bytearray(8 * limit)
    for at in range(0, len(held), 4096):
        held[at] = 1


def sweep() -> int:
    """Remove the groups of those who have ended; how many there were."""
    base = _base()
    found = [] if base is None else list(base.glob(f"{_NAME}*"))
    for group in found:
        remove_group(group)
    return len(found)
