"""Which mounts of a container are the runtime's own and not part of what a checkpoint carries. Pure, but for a read.

Both ends must agree on the keys: runc's restore names a bind mount by its destination, a control group by its mount
point and a masked file by "/dev/null".
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

_OWN = frozenset({"overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue"})  # CRIU mounts these again by itself
_CGROUP = frozenset({"cgroup", "cgroup2"})


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of proc(5) mountinfo."""

    root: str
    point: str
    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class Split:
    """``foreign``: mounts that nobody would bring back; a checkpoint with one is refused by its name."""

    external: tuple[str, ...]
    masked: tuple[str, ...]
    foreign: tuple[Mount, ...]


def parse(text: str) -> list[Mount]:
    """Mounts in the order of the file. Octal escapes of blanks are undone."""
    out = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        out.append(Mount(_plain(fields[3]), _plain(fields[4]), tail[0], _plain(tail[1])))
    return out


def split(mounts: list[Mount], bound: frozenset[str]) -> Split:
    """``bound``: destinations that the runtime binds (ours and Docker's three files)."""
    external, masked, foreign = [], [], []
    for mount in mounts:
        if mount.point in bound or mount.kind in _CGROUP:
            external.append(mount.point)
        elif mount.root == "/null" and mount.point.startswith(("/proc/", "/sys/")):
            masked.append(mount.point)
        elif mount.kind not in _OWN or (mount.kind == "overlay" and mount.point != "/"):
            foreign.append(mount)
    return Split(tuple(external), tuple(masked), tuple(foreign))


def of_process(pid: int) -> list[Mount]:
    """Raises FileNotFoundError or ProcessLookupError when the process has ended."""
    try:
        text = Path(f"/proc/{pid}/mountinfo").read_text()
    except OSError as why:
        if why.errno == errno.EINVAL:  # a zombie: it has left its mount namespace
            raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended") from why
        raise
    return parse(text)


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
