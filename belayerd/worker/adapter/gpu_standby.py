"""The order in which a worker on a GPU becomes a standby, and what a failure in it means.

KV leads to scratch before anything runs, so that capture and warm-up cannot touch the live arena; graphs are captured
before the warm-up, which must not resize what they point at; the oracle is taken from the graphs that will serve; what
is parked last has been used once, so its content is known to be good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, WorkerFailed

ORDER = ("attach", "scratch", "capture", "warm-up", "oracle", "park")

Step = Callable[[], object]


def stand_by(steps: Mapping[str, Step], lap: Callable[[str, float], None]) -> None:
    """All of ORDER; ``lap`` gets each name and its milliseconds. Raises WorkerFailed naming the step, after which the
    worker is not offered; ValueError when ``steps`` are not exactly those."""
    if set(steps) != set(ORDER):
        raise ValueError(f"steps {sorted(steps)} are not {sorted(ORDER)}")
    for name in ORDER:
        watch = Stopwatch()
        try:
            steps[name]()
        except BelayerError as why:
            raise WorkerFailed(
                f"standby: {name}: {why.message}", kept="the main and the arena as they are", remedy="end this worker"
            ) from why
        lap(name, watch.ms())
