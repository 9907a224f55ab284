"""The end of an engine's work that does not come to its own end: runc and CRIU know no deadline, and while they hang,
Docker holds the container's lock, so that nobody can even look at it or remove it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from belayer.procs import wait_dead

_ENDS_S = 5.0  # for a runc whose CRIU is dead


def end_dump(container_id: str) -> list[int]:
    """SIGKILL to the runc that dumps ``container_id`` and to what it started; their pids."""
    tree, roots = _found(container_id, b"checkpoint")
    _kill((*tree, *roots))  # CRIU first: an orphan would go on
    return [*tree, *roots]


def end_restore(container_id: str) -> list[int]:
    """SIGKILL to the CRIU that restores ``container_id``, to the half-made sandbox, and to their runc where it does not
    end of that; their pids. Blocking. It is let be for a moment because it takes away what it has mounted: killed, it
    would leave that to nobody."""
    tree, roots = _found(container_id, b"restore")
    held: list[int] = []
    with contextlib.suppress(ProcessLookupError):
        held += [os.pidfd_open(pid) for pid in roots]
    try:
        _kill(tree)
        wait_dead(held, _ENDS_S)
        _kill(roots)
    finally:
        for pidfd in held:
            os.close(pidfd)
    return [*tree, *roots]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _found(container_id: str, verb: bytes) -> tuple[list[int], list[int]]:
    """What the runcs that do ``verb`` to it have started, and these runcs."""
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
    return _below(roots, parents), roots


def _below(roots: list[int], parents: dict[int, int]) -> list[int]:
    """All descendants, children before grandchildren."""
    found: list[int] = []
    level = set(roots)
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found += sorted(level)
    return found
