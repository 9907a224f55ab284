"""``python -m benchmarks.h200.vllm_process``: one standby of Belayer's GPU worker, from attach to serving.

Its owners are gpuowner's own daemons below BELAYER_ROOT, and its way to their memory is a worker's
(adapter/gpu_attach); only belayerd and the zygote's fork are not here. Written without a GPU and never run on one: an
error here is a finding, not a surprise.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from belayerd.worker.zygote import ENVIRONMENT, GPU_ENVIRONMENT

os.environ.update({**ENVIRONMENT, **GPU_ENVIRONMENT})  # read at import, which comes next

from belayer.clock import Stopwatch
from belayer.config import load
from belayer.messages.owner import Role
from belayer.paths import Paths
from belayerd.worker.adapter import checks, gpu_attach, gpu_checks, gpu_loader, seat
from belayerd.worker.adapter.core import Core
from belayerd.worker.adapter.gpu_engine import gpu_engine_args
from belayerd.worker.adapter.gpu_standby import stand_by
from belayerd.worker.standby import same_oracle, take_oracle, warm_up
from benchmarks.h200.gauge import used
from gpuowner.attach import OwnerClient
from gpuowner.backends.driver import REAL
from gpuowner.update import begin_update

PARKS = 20
__all__ = ["gpu_loader"]  # imported for its effect: it registers the load format


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


class Standby:
    def __init__(self) -> None:
        self.paths = Paths()
        config = load(self.paths.config)
        self.model, self.slot, self.router = config.model[0], config.slot[0], config.router

    def attach(self) -> None:
        self.device = gpu_attach.enter(self.slot)
        self.weights, self.arena = gpu_attach.attach(self.paths, "standby", self.slot, self.device)

    def scratch(self) -> None:
        """The arena's addresses lead to scratch since it was attached; vLLM's classes find the rest by this seat."""
        given = seat.Seat(cast(Any, self.weights), cast(Any, self.arena), lambda tokens: None, lambda: None)
        seat.take(given)

    def capture(self) -> None:
        self.core = Core(gpu_engine_args(self.model, self.slot, self.router), lambda client, outputs: None)
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
        self.arena.promote(self.arena.grant.epoch)
        promoted = self.arena.promoted
        assert promoted is not None
        say(figure=["promote: map", "ms", promoted.map])
        say(figure=["promote: zero", "ms", promoted.zero])
        self.core.reset_prefix_cache()
        self.core.model_executor.collective_rpc("unpark")
        self._oracle("on the leased arena the oracle is the same")
        say(figure=["probe", "ms", self.device.probe(2.0)])
        self.weights.verify()
        say(check=["the owner's weights are as they were sealed", True, ""])
        self._follow()

    def _follow(self) -> None:
        """The same files as the next version: other memory at the same addresses, below captured graphs."""
        client = OwnerClient(self.paths.owner_sock("weights"), Role.LOADER, "publisher", 600.0)
        watch = Stopwatch()
        with begin_update(client, self.model.name, mode="swap", whole=True) as update:
            update.write_folder(Path(self.model.path))
            update.commit()
        say(figure=["publish: begin to sealed", "ms", watch.ms()])
        watch = Stopwatch()
        moved = self.core.model_executor.collective_rpc("follow_weights", args=(1,))[0]
        say(figure=["follow", "ms", watch.ms()])
        say(check=["the engine follows a swap", (moved.was, moved.now, moved.remapped) == (1, 2, True), str(moved)])
        self._oracle("on the next version of the same bytes the oracle is the same")

    def _oracle(self, what: str) -> None:
        again, _ = take_oracle(self.core, self.vocab, 1)
        self.core.reset_prefix_cache()
        say(check=[what, same_oracle(again, self.first), [again.token, self.first.token]])


def main() -> None:
    checks.self_check()
    gpu_checks.self_check()
    standby = Standby()
    standby.stand()
    standby.serve()
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads and torch's pools are not unwound: the end of a worker is its death


if __name__ == "__main__":
    main()
