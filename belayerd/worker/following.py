"""Pause, follow the weights, go on: a worker's part in an update (belayerd.updates).

Paused, the loop goes round and takes messages in, and takes no step. The heart says so, because a loop with requests
and without steps is otherwise a stuck one. Nothing here ends a pause by itself: bytes below the mapping may be
changing, and belayerd sees to it that no pause is forgotten.
"""

from __future__ import annotations

from functools import partial

from belayer.clock import Stopwatch
from belayer.errors import Fenced, Refused, WeightsBroken
from belayer.messages import worker as m
from belayer.messages.common import Done
from belayerd.worker.adapter.core import Core
from belayerd.worker.adapter.seat import seat
from belayerd.worker.adapter.weights import move_engine
from belayerd.worker.heart import Heart
from belayerd.worker.standby import take_oracle
from gpuowner.attach import WeightsView
from gpuowner.attach_gpu_weights import GpuWeightsView

_VERIFY_S = 600.0  # of silence that is legal while all weights are hashed


class Following:
    """``paused``: no step may be taken, but for the oracle's, in which requests on board may take part: they are of the
    new weights already."""

    def __init__(self, core: Core, heart: Heart, weights: WeightsView | GpuWeightsView, vocab: int) -> None:
        self._core, self._heart, self._weights, self._vocab = core, heart, weights, vocab
        self.paused = False

    def pause(self, mine: int, generation: int) -> Done:
        _same(mine, generation)
        self.paused = True
        running, waiting = self._core.counts()
        self._heart.hold(running, waiting)
        return Done(detail=f"no step is taken; {running} running and {waiting} waiting requests are kept")

    def proceed(self, mine: int, generation: int) -> Done:
        _same(mine, generation)
        self.paused = False
        return Done(detail=f"steps are taken again, weights v{self._weights.grant.version}")

    def follow(self, version: int, *, serving: bool) -> m.OracleReply:
        """Move to ``version`` and take its oracle. Raises Refused, Fenced (another version is sealed), WeightsTorn or
        WeightsBroken; after the last one this worker must not step again, and stays paused."""
        if serving and not self.paused:
            raise Refused("this main takes steps: pause it first", kept=f"weights v{self._weights.grant.version}")
        watch = Stopwatch()
        self._announce(version, 0, 0)
        seat().verified = partial(self._announce, version)
        paused, self.paused = self.paused, True
        moved = move_engine(self._core)
        if moved.now != version:
            raise WeightsBroken(f"v{moved.now} is sealed, not v{version}", remedy="ask for the sealed version")
        oracle, _ = take_oracle(self._core, self._vocab, moved.now)
        self.paused = paused and serving
        return m.OracleReply(oracle=oracle, equal=True, ms=watch.ms())

    def _announce(self, version: int, done: int, of: int) -> None:
        """A beat for every chunk that is verified: who waits counts how long they stood still."""
        how_far = f": {done / 1e9:.2f} of {of / 1e9:.2f} GB" if of else ""
        self._heart.announce(f"{m.FOLLOWS}{version}{how_far}", _VERIFY_S)


def _same(mine: int, generation: int) -> None:
    if generation != mine:
        raise Fenced(f"this worker is at generation {mine}, the message carries {generation}")
