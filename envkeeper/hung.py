"""The end of an engine's work that does not come to its own end: runc and CRIU know no deadline, and while they hang,
Docker holds the container's lock, so that nobody can even look at it or remove it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def end_dump(container_id: str) -> list[int]:
    """SIGKILL to the runc that dumps ``container_id`` and to what it started; their pids."""
    return _end(container_id, b"checkpoint")


def end_restore(container_id: str) -> list[int]:
    """SIGKILL to the runc that restores ``container_id``, to its CRIU and to the half-made sandbox; their pids."""
    return _end(container_id, b"restore")


def _end(container_id: str, verb: bytes) -> list[int]:
    parents: dict[int, int] = {}
    roots = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if verb in words and container_id.encode() in words and words[0].endswith(b"runc"):
                roots.append(int(folder.name))
    tree = _below(roots, parents)
    for pid in (*tree, *roots):  # CRIU first: an orphan would go on
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [*tree, *roots]


def _below(roots: list[int], parents: dict[int, int]) -> list[int]:
    """All descendants, children before grandchildren."""
    found: list[int] = []
    level = set(roots)
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += sorted(level)
    return found
