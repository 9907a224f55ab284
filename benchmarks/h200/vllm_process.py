"""``python -m benchmarks.h200.vllm_process MODEL``: one standby of Belayer's GPU worker, from attach to serving.

It stands for a worker whose owners are in the same process (the daemons and their sockets are tested without a GPU).
Written without a GPU and never run on one: an error here is a finding, not a surprise.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from belayerd.worker.zygote import ENVIRONMENT

os.environ.update({**ENVIRONMENT, "NCCL_GRAPH_REGISTER": "0"})  # read at import, which comes next

import torch

from belayer.clock import Stopwatch
from belayer.config import Model, Slot
from belayer.messages import owner as o
from belayerd.worker.adapter import checks, gpu_checks, gpu_loader, gpu_seat, seat
from belayerd.worker.adapter.core import Core
from belayerd.worker.adapter.device import GpuDevice
from belayerd.worker.adapter.gpu_engine import gpu_engine_args
from belayerd.worker.adapter.gpu_standby import stand_by
from belayerd.worker.standby import same_oracle, take_oracle, warm_up
from benchmarks.h200.gauge import used
from gpuowner import loader
from gpuowner.attach_gpu import SCRATCH, GpuArena
from gpuowner.attach_gpu_weights import GpuWeights
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import REAL, driver_for
from gpuowner.backends.upload import upload

PARKS = 20
KV_BYTES = 64 * SCRATCH
__all__ = ["gpu_loader"]  # imported for its effect: it registers the load format


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


class Owner:
    """What GpuArena asks of gpuowner@kv."""

    def __init__(self, memory: CudaVmm) -> None:
        self.arena = memory.create("kv", KV_BYTES)
        self.welcome = o.Welcome(owner_generation=1, kind="kv", pid=os.getpid())

    def call(self, message: Any, reply: Any) -> tuple[Any, tuple[int, ...]]:
        if isinstance(message, o.OpenArena):
            return None, (os.dup(self.arena.fd),)
        return o.LeaseGrant(slot="slot0", epoch=message.epoch), (os.dup(self.arena.fd),)

    def must_live(self) -> None:
        """It lives as long as we do."""

    def on_return(self, rejoin: Any) -> None:
        """It does not return."""


class Standby:
    def __init__(self, folder: Path) -> None:
        self.model = Model(name="model", path=str(folder), dtype="bfloat16")
        self.slot = Slot(name="slot0", model="model", device="gpu", kv_bytes=KV_BYTES, block_size=16, max_num_seqs=8)

    def attach(self) -> None:
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")  # torch's primary context, before any mapping
        self.memory = CudaVmm(driver_for(REAL))
        self.device = GpuDevice(self.memory)
        loaded = loader.load("model", Path(self.model.path), "bfloat16", lambda *_: None)
        made = upload(REAL, 0, loaded.memory.fd, loaded.memory.nbytes)
        self.sums = made.sums
        tensors = {spec.name: spec for spec in loaded.layout}
        self.weights = GpuWeights(self.memory, made.memory.fd, made.memory.nbytes, made.sums, tensors)

    def scratch(self) -> None:
        self.arena = GpuArena(cast(Any, Owner(self.memory)), self.memory, "slot0", KV_BYTES)
        gpu_seat.take(gpu_seat.GpuSeat(self.device, self.weights, self.arena, "gpu"))
        given = seat.Seat(cast(Any, self.weights), cast(Any, self.arena), lambda tokens: None, lambda: None)
        seat.take(given)

    def capture(self) -> None:
        self.core = Core(gpu_engine_args(self.model, self.slot), lambda client, outputs: None)
        self.core.model_executor.collective_rpc("assert_arena")
        self.core.set_weight_version("1")
        self.vocab = self.core.vllm_config.model_config.get_vocab_size()

    def warm(self) -> None:
        warm_up(self.core, self.slot.max_model_len, self.slot.max_num_batched_tokens, self.vocab, lambda name: None)

    def oracle(self) -> None:
        self.first, _ = take_oracle(self.core, self.vocab, 1)
        self.core.reset_prefix_cache()

    def park(self) -> None:
        self.before = used(REAL)
        self.core.model_executor.collective_rpc("park")

    def stand(self) -> None:
        steps = {
            "attach": self.attach, "scratch": self.scratch, "capture": self.capture, "warm-up": self.warm,
            "oracle": self.oracle, "park": self.park,
        }  # fmt: skip
        stand_by(steps, lambda name, ms: say(figure=[f"standby: {name}", "ms", ms]))

    def serve(self) -> None:
        """Parked -> promoted, with what must hold."""
        pools = self.device.pools
        dropped = self.before - used(REAL)
        say(figure=["graph memory", "MB", pools.nbytes() / 1e6])
        say(check=["graph memory lies in our pools", pools.nbytes() > 0, pools.nbytes()])
        say(check=["parking gives the bytes back to the device", dropped >= pools.nbytes() * 0.9, dropped])
        for _ in range(PARKS):
            watch = Stopwatch()
            self.core.model_executor.collective_rpc("unpark")
            say(figure=["unpark", "ms", watch.ms()])
            self._oracle("after an unpark the oracle is the same")
            watch = Stopwatch()
            self.core.model_executor.collective_rpc("park")
            say(figure=["park", "ms", watch.ms()])
        promoted = self.arena.promote(epoch=1)
        say(figure=["promote: map", "ms", promoted.map])
        say(figure=["promote: zero", "ms", promoted.zero])
        self.core.reset_prefix_cache()
        self.core.model_executor.collective_rpc("unpark")
        self._oracle("on the leased arena the oracle is the same")
        say(figure=["probe", "ms", self.device.probe(2.0)])
        self.weights.verify(self.sums)
        say(check=["the owner's weights are as they were uploaded", True, ""])

    def _oracle(self, what: str) -> None:
        again, _ = take_oracle(self.core, self.vocab, 1)
        self.core.reset_prefix_cache()
        say(check=[what, same_oracle(again, self.first), [again.token, self.first.token]])


def main() -> None:
    checks.self_check()
    gpu_checks.self_check()
    standby = Standby(Path(sys.argv[1]))
    standby.stand()
    standby.serve()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads and torch's pools are not unwound: the end of a worker is its death


if __name__ == "__main__":
    main()
