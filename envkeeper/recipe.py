"""What a sandbox was asked to be: everything that is needed to make the same container again."""

from __future__ import annotations

import msgspec


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded with every sandbox and every checkpoint. ``image_id`` pins the content; ``agent`` is the host's path of
    the very binary that runs as PID 1. A field that is added later needs a default: old checkpoints lack it."""

    image_id: str
    agent: str
    hostname: str
    memory_mb: int
    cpus: float
    pids: int
    env: dict[str, str]
    user: str = ""  # of its actions where they name none; PID 1 itself is root
    allow: tuple[str, ...] = ()  # egress, as envkeeper.network reads it; () is no network at all
    labels: tuple[tuple[str, str], ...] = ()
    image: str = ""  # the name that it was asked by; ``image_id`` is what counts
    disk_mb: int = 0  # what the upper layer may hold; 0: no limit
