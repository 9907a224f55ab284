"""The life of rank 1 and up of a worker, in its forked process: its own part of the weights, its own arena, and the
calls of its leader. It has no socket, no heartbeat and no loop of its own: what it does, the leader does too."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
import torch

from belayer.config import Config, Slot
from belayer.messages.owner import Role
from belayer.paths import Paths
from belayerd.worker import blocklog
from belayerd.worker.adapter import seat
from belayerd.worker.adapter.core import engine_args
from belayerd.worker.adapter.gloo import Group
from belayerd.worker.adapter.group import serve
from belayerd.worker.priority import step_aside
from belayerd.worker.ranks import Line
from gpuowner.attach import ArenaView, OwnerClient, WeightsView

logger = structlog.get_logger(daemon="worker")


def run(rank: int, line: Line, worker_id: str, slot: Slot, config: Config, paths: Paths, meet: Path, seed: int) -> None:
    """Until the leader ends. ``meet``: file in which this worker's ranks meet. Whatever raises here ends the worker."""
    step_aside()
    view, arena, verified = attach(paths, worker_id, slot, rank)
    verified()
    seat.take(
        seat.Seat(
            weights=view, arena=arena, scheduled=lambda tokens: None, stepped=lambda: None, packed=slot.packed_weights
        )
    )
    torch.set_num_threads(slot.threads)
    args = engine_args(config.model_named(slot.model), slot, config.router)
    args.seed = seed
    serve(args, Group(rank, slot.tensor_parallel, meet), line)


def attach(paths: Paths, worker_id: str, slot: Slot, rank: int) -> tuple[WeightsView, ArenaView, Callable[[], object]]:
    """This rank's part of the weights, a private view of its arena, and what waits until the former is verified.

    Hashing takes a core as long as building the engine does, so it goes on beside that, in a thread that holds no
    interpreter lock. The third value must be called before the engine computes anything; it raises WeightsBroken."""

    def told(said: Any) -> None:
        logger.warning("owner_back", said=said, rank=rank)

    clients = [OwnerClient(paths.owner_sock(kind), Role.WORKER, worker_id) for kind in ("weights", "kv")]
    for owner in clients:  # an owner that was killed comes back, and is told what is mapped here
        owner.keep(told)
    view = WeightsView(clients[0], slot.model, rank)
    pool = ThreadPoolExecutor(1, "verify")
    verified = pool.submit(view.verify)
    pool.shutdown(wait=False)
    arena = ArenaView(clients[1], slot.name, slot.kv_bytes + blocklog.room(slot.kv_bytes), rank)
    return view, arena, verified.result
