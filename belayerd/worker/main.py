"""The life of a worker in its forked process: attach, build, warm up, take the oracle, serve.

Order matters: the beat announces the start before anything slow; weights are verified before the engine
computes with them; the arena stays private until ``TakeArena``.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import cast

import torch

from belayer import lastwords, log, procs
from belayer.clock import Stopwatch
from belayer.config import Config
from belayer.heartbeat import Beat
from belayer.messages.worker import WorkerState
from belayer.paths import Paths
from belayerd.worker import rank, ranks
from belayerd.worker.adapter import seat, weights
from belayerd.worker.adapter.core import Core
from belayerd.worker.adapter.reuse import Reuse
from belayerd.worker.engine import Engine, Line, Outbox, Standing
from belayerd.worker.heart import Heart
from belayerd.worker.placed import place
from belayerd.worker.priority import step_aside, wait_aside
from belayerd.worker.standby import take_oracle, warm_up
from gpuowner.attach import ArenaView, WeightsView

__all__ = ["run", "weights"]  # ``weights`` is imported for its effect: it registers the load format


def run(worker_id: str, slot_name: str, config: Config, paths: Paths) -> None:
    """Build the engine and serve until retired. Raises BelayerError; the process then ends with status 1."""
    slot = config.slot_named(slot_name)
    model = config.model_named(slot.model)
    logger = log.setup("worker")
    meet = own_tmp(paths, worker_id) / "ranks"
    # Unseeded requests draw from the process's generator; two workers of a slot must not draw the same numbers.
    seed = int.from_bytes(os.urandom(4), "little")
    said = partial(lastwords.leave, paths.last_words(worker_id))
    others = ranks.fork(  # before the first thread, descriptor or lock that a rank would inherit
        slot.tensor_parallel,
        lambda at, leader: rank.run(at, leader, worker_id, slot, config, paths, meet, seed),
        said,
    )
    heart = Heart(Beat(paths.heartbeat(worker_id)), slot.hang_limit_s)
    heart.announce("loading", slot.start_deadline_s)
    step_aside()
    standing, watch = Standing(worker_id=worker_id, slot=slot_name), Stopwatch()

    def lap(name: str) -> None:
        standing.start_ms[name] = round(watch.lap(), 1)
        heart.announce(f"warm-up: {name} done", slot.start_deadline_s)

    if others.pids:
        others.watch(said)
    line = Line(paths.worker_sock(worker_id))
    device, view, arena, verified, args = place(paths, worker_id, slot, model, config.router)
    lap("attach")
    seat.take(
        seat.Seat(
            # A worker on a GPU finds its memory by its own seat (gpu_seat); of this one it takes the rest.
            weights=cast(WeightsView, view),
            arena=cast(ArenaView, arena),
            scheduled=heart.step_begins,
            stepped=heart.step_ends,
            ranks=others,
            meet=meet,
            packed=slot.packed_weights,
        )
    )
    torch.set_num_threads(slot.threads)
    args.seed = seed
    outbox = Outbox(line, standing, heart)
    core = Core(args, outbox.send)
    core.model_executor.collective_rpc("assert_arena")
    reuse = None
    if slot.kv_reuse and isinstance(arena, ArenaView):  # on a GPU the configuration refuses it
        reuse = Reuse(core, arena.mapping.buffer_from(slot.kv_bytes))
    core.after_step = reuse.after_step if reuse else core.after_step
    if others.pids:
        core.idle = core.model_executor.pulse
    core.set_weight_version(str(view.grant.version))
    lap("engine")
    verified()
    lap("verify")
    vocab = core.vllm_config.model_config.get_vocab_size()
    warm_up(core, slot.max_model_len, slot.max_num_batched_tokens, vocab, lap)
    standing.oracle, _ = take_oracle(core, vocab, view.grant.version)
    core.reset_prefix_cache()
    lap("oracle")
    logger.info("parked", said=device.park())
    standing.state = WorkerState.STANDBY
    wait_aside()
    # Beside the CPU that it took: what is missing in between is the share that others had of the cores.
    cpu_ms = round(procs.cpu_s(os.getpid()) * 1e3)
    logger.info("standby", worker=worker_id, cpu_ms=cpu_ms, **standing.start_ms)
    Engine(line, outbox, core, heart, standing, view, arena, vocab, reuse, device, call_s=slot.start_deadline_s).run()
    line.close()


def own_tmp(paths: Paths, worker_id: str) -> Path:
    """vLLM leaves rendezvous files in TMPDIR when it is killed; in a folder of its own they go with the worker."""
    folder = paths.worker_tmp(worker_id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder
