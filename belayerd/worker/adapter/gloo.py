"""The process group of a worker's tensor-parallel ranks: its own, over gloo on the loopback, met in a file of its own.

Joined before vLLM would, which then takes it as it is. vLLM's CPU engine would exchange through shared memory instead,
where a rank spins for ever on a peer that is dead or stopped: it looks busy, and no error ever comes. Over gloo it
sleeps, which a watcher can tell from work, and a dead peer is an error at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Group:
    """``store``: where the ranks meet; a path is a file that no other group ever uses."""

    rank: int
    size: int
    store: Any

    def name(self) -> str:
        """vLLM takes the shared memory only where all ranks give one name for it: theirs differ."""
        return f"gloo-rank-{self.rank}"


def join(group: Group) -> None:
    """Blocks until all ranks are there."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["VLLM_DIST_IDENT"] = group.name()
    store = group.store
    if isinstance(store, Path):
        store = torch.distributed.FileStore(str(store), group.size)
    torch.distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
