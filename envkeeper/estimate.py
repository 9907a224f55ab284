"""What the checkpoint policy needs to know, estimated from this run's own figures (paper, Algorithm 1). Pure.

All times in seconds, all sizes in bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field, replace


def failure_probability(rate: float, duration: float) -> float:
    """p_t = 1 - exp(-rate * duration): constant hazard. ``rate`` in failures per second."""
    if rate < 0 or duration < 0:
        raise ValueError(f"rate {rate} and duration {duration} must not be negative")
    return -math.expm1(-rate * duration)


@dataclass(slots=True)
class ResponseTimes:
    """The last ``window`` LLM response times. The model is their own distribution: no shape is assumed."""

    window: int = 512
    _order: deque[float] = field(default_factory=deque)
    _sorted: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a response time of {seconds} s")
        self._order.append(seconds)
        insort(self._sorted, seconds)
        if len(self._order) > self.window:
            oldest = self._order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def __len__(self) -> int:
        return len(self._sorted)

    def survival(self, x: float) -> float:
        """Share of responses that took longer than ``x``."""
        if not self._sorted:
            return 0.0
        return 1.0 - bisect_right(self._sorted, x) / len(self._sorted)

    def hides(self, waited: float, cost: float) -> float:
        """q(x; c) = P(T >= x + c | T > x): the chance that a checkpoint of ``cost`` seconds, begun when the response
        has lasted ``waited``, ends before the response does. 0 when nothing is known or nothing lasted that long:
        then the checkpoint is taken to be visible."""
        longer = len(self._sorted) - bisect_right(self._sorted, waited)
        if longer == 0:
            return 0.0
        # Responses of exactly ``waited`` are over: they count on neither side.
        enough = min(longer, len(self._sorted) - bisect_left(self._sorted, waited + cost))
        return enough / longer


@dataclass(frozen=True, slots=True)
class CostModel:
    """c_t from what can be read before deciding: memory and dirty upper layer. ``load`` follows how much slower than
    the model the machine is now. Defaults: this project's trial on ext4, two cores."""

    base: float = 0.045
    memory_rate: float = 2.4e9
    layer_rate: float = 1.0e9
    load: float = 1.0
    weight: float = 0.3  # of the newest measurement in ``load``

    def predict(self, rss: int, layer: int) -> float:
        """Seconds that the checkpoint will take under the load seen last."""
        return self._raw(rss, layer) * self.load

    def measured(self, rss: int, layer: int, seconds: float) -> CostModel:
        """The model after a checkpoint of this size took ``seconds``."""
        seen = seconds / self._raw(rss, layer)
        return replace(self, load=(1 - self.weight) * self.load + self.weight * seen)

    def _raw(self, rss: int, layer: int) -> float:
        return self.base + rss / self.memory_rate + layer / self.layer_rate
