"""When to checkpoint: the paper's Algorithm 1, decided after each environment step. Pure; ``now`` is an argument.

Launch when p_t * C_t > (1 - q(x; c)) * c_t + overhead: the work that a failure would cost, weighted by its chance,
against the part of the checkpoint that the current LLM response does not hide, plus what it costs the host anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Why(StrEnum):
    WORTH_IT = "worth_it"
    NOT_WORTH_IT = "not_worth_it"
    NOTHING_NEW = "nothing_new"
    COOLING_DOWN = "cooling_down"


@dataclass(frozen=True, slots=True)
class Exposure:
    """What a failure of one sandbox would cost now. ``work``: C_t, seconds of LLM and environment work since the last
    READY checkpoint. ``quiet_until``: end of the cooldown after a checkpoint that timed out."""

    work: float = 0.0
    steps: int = 0
    quiet_until: float = 0.0

    def stepped(self, llm: float, environment: float) -> Exposure:
        """After one more response of ``llm`` and action of ``environment`` seconds."""
        return replace(self, work=self.work + llm + environment, steps=self.steps + 1)

    def ready(self, work_since: float = 0.0, steps_since: int = 0) -> Exposure:
        """A checkpoint became READY; ``work_since`` was done while it was being published."""
        return replace(self, work=work_since, steps=steps_since)

    def timed_out(self, now: float, cooldown: float = 20.0) -> Exposure:
        """Under heavy load another attempt would only add to it."""
        return replace(self, quiet_until=now + cooldown)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``benefit`` and ``cost`` in expected seconds, for the record."""

    launch: bool
    why: Why
    benefit: float
    cost: float


def decide(exposure: Exposure, *, now: float, p: float, q: float, cost: float, overhead: float = 0.0) -> Verdict:
    """``p``: chance of losing the sandbox in the next step. ``q``: chance that the response hides the checkpoint.
    ``cost``: c_t in seconds. ``overhead``: seconds that a checkpoint costs the host even when it is hidden."""
    for name, value in (("p", p), ("q", q)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}, not a probability")
    benefit, visible = p * exposure.work, (1.0 - q) * cost + overhead
    if exposure.steps == 0:
        return Verdict(False, Why.NOTHING_NEW, benefit, visible)
    if now < exposure.quiet_until:
        return Verdict(False, Why.COOLING_DOWN, benefit, visible)
    worth = benefit > visible
    return Verdict(worth, Why.WORTH_IT if worth else Why.NOT_WORTH_IT, benefit, visible)
