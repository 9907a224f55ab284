"""The process group of a worker's tensor-parallel ranks: its own, over gloo on the loopback, met in a file of its own.

Joined before vLLM would, which then takes it as it is. vLLM's CPU engine would exchange through shared memory instead,
where a rank spins for ever on a peer that is dead or stopped: it looks busy, and no error ever comes. Over gloo it
sleeps, which a watcher can tell from work, and a dead peer is an error at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d, is_gloo_available
from vllm.distributed import parallel_state

from belayer.errors import BelayerError

if not is_gloo_available() or not isinstance(distributed_c10d.ProcessGroupGloo, type):
    raise BelayerError("torch no longer has ProcessGroupGloo where it was: see belayerd/worker/adapter/gloo.py")

_LOOPBACK = "lo"
_devices: list[Any] = []  # of this process, made with its first group


class OneDevice(distributed_c10d.ProcessGroupGloo):  # type: ignore[misc,unused-ignore]
    """A group on the one device that all groups of this process share.

    torch makes a device for each group, and each device has a thread that wakes a hundred times a second for as long
    as the process lives. vLLM makes 13 groups, also for a single rank: 1300 wakeups and 2 % of a core for a shadow that
    waits."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if not _devices:
            _devices.append(self.create_device(interface=_LOOPBACK))
        options = self._Options()
        options._devices, options._timeout = _devices, timeout
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = OneDevice  # where torch looks it up for each new group

_init_group = parallel_state.init_model_parallel_group


@wraps(_init_group)
def _without_queue(*args: Any, **kwargs: Any) -> Any:
    """vLLM gives its group a queue of 24 MiB in /dev/shm, for a broadcast that nothing here makes; a process that is
    killed would leave it there for ever."""
    return _init_group(*args, **kwargs | {"use_message_queue_broadcaster": False})


parallel_state.init_model_parallel_group = _without_queue


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
    os.environ["VLLM_DIST_IDENT"] = group.name()
    store = group.store
    if isinstance(store, Path):
        store = torch.distributed.FileStore(str(store), group.size)
    torch.distributed.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
