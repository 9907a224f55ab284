"""Which paths the programs of a sandbox watch with inotify.

The kernel names a watched file by a handle, which overlay cannot open again, so CRIU must be told where to look for
the inode ("irmap"). We look before the freeze, and tell it the very paths. A path that changes in between is not found
there, and then the dump is refused. Queued events are not carried: a declared difference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

_WATCH = re.compile(r"^inotify wd:\S+ ino:([0-9a-f]+)", re.MULTILINE)
_PRUNED = frozenset({"proc", "sys", "dev"})
LIMIT = 200_000  # names looked at; a tree beyond it is too large to search at each checkpoint


def paths(pids: Iterable[int], root: Path) -> tuple[str, ...]:
    """Watched paths as the sandbox sees them, sorted; empty when nothing is watched. ``root``: the merged root as it
    is mounted for the sandbox (/proc/PID/root). Blocking; a walk only when something is watched."""
    wanted = {inode for pid in pids for inode in _inodes(pid)}
    return tuple(sorted(_find(wanted, root))) if wanted else ()


def _inodes(pid: int) -> set[int]:
    base = Path(f"/proc/{pid}")
    out: set[int] = set()
    try:
        for name in os.listdir(base / "fd"):
            if os.readlink(base / "fd" / name) == "anon_inode:inotify":
                out |= {int(found, 16) for found in _WATCH.findall((base / "fdinfo" / name).read_text())}
    except OSError:  # it ended in this moment
        return set()
    return out


def _find(wanted: set[int], root: Path) -> set[str]:
    """A walk in the order of depth, so that the names nearest to the root are found soonest."""
    found: set[str] = set()
    left, looked, level = set(wanted), 0, [""]
    if os.lstat(root).st_ino in left:
        found.add("/")
        left.discard(os.lstat(root).st_ino)
    while level and left and looked < LIMIT:
        deeper: list[str] = []
        for folder in level:
            try:
                entries = list(os.scandir(f"{root}{folder}/"))
            except OSError:  # removed in this moment
                continue
            looked += len(entries)
            for entry in entries:
                path = f"{folder}/{entry.name}"
                try:
                    inode = entry.stat(follow_symlinks=False).st_ino
                except OSError:
                    continue
                if inode in left:
                    found.add(path)
                    left.discard(inode)
                if entry.is_dir(follow_symlinks=False) and not (not folder and entry.name in _PRUNED):
                    deeper.append(path)
        level = deeper
    return found
