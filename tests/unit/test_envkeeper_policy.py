"""Algorithm 1: the estimates and the decision."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkeeper.estimate import CostModel, ResponseTimes, failure_probability
from envkeeper.policy import Exposure, Why, decide

probability = st.floats(0, 1)
seconds = st.floats(0, 1e4)


def test_failure_probability_is_the_exponential_lifetime() -> None:
    assert failure_probability(0.01, 100) == pytest.approx(1 - math.exp(-1))
    assert failure_probability(0.0, 100) == 0.0
    with pytest.raises(ValueError, match="negative"):
        failure_probability(-1, 1)


def test_the_chance_to_hide_is_conditional_on_the_wait() -> None:
    times = ResponseTimes()
    for value in (1.0, 2.0, 3.0, 4.0):
        times.add(value)
    assert times.hides(0.0, 1.0) == 1.0
    assert times.hides(0.0, 2.5) == 0.5
    assert times.hides(2.0, 1.0) == 1.0  # of those beyond 2 s, all last until 3 s
    assert times.hides(3.0, 1.5) == 0.0
    assert times.hides(9.0, 0.1) == 0.0
    assert ResponseTimes().hides(0.0, 0.0) == 0.0


def test_only_the_last_responses_count() -> None:
    times = ResponseTimes(window=3)
    for value in (100.0, 1.0, 2.0, 3.0):
        times.add(value)
    assert len(times) == 3
    assert times.survival(50.0) == 0.0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=60), seconds, seconds, seconds)
def test_hiding_is_a_probability_and_falls_with_the_cost(
    values: list[float], waited: float, cost: float, more: float
) -> None:
    times = ResponseTimes()
    for value in values:
        times.add(value)
    short, long = times.hides(waited, cost), times.hides(waited, cost + more)
    assert 0.0 <= long <= short <= 1.0


def test_the_cost_model_follows_the_load() -> None:
    model = CostModel()
    small, large = model.predict(0, 0), model.predict(1 << 30, 1 << 30)
    assert small < large
    for _ in range(30):
        model = model.measured(0, 0, 10 * small)
    assert model.predict(0, 0) == pytest.approx(10 * small, rel=0.01)


@given(p=probability, q=probability, work=seconds, cost=seconds, overhead=seconds)
def test_launch_is_the_inequality_of_the_paper(p: float, q: float, work: float, cost: float, overhead: float) -> None:
    verdict = decide(Exposure(work=work, steps=1), now=0.0, p=p, q=q, cost=cost, overhead=overhead)
    assert verdict.launch == (p * work > (1 - q) * cost + overhead)


@given(p=probability, q=probability, work=seconds, cost=seconds, more=seconds)
def test_more_at_stake_never_unmakes_a_launch(p: float, q: float, work: float, cost: float, more: float) -> None:
    less = decide(Exposure(work=work, steps=1), now=0.0, p=p, q=q, cost=cost)
    greater = decide(Exposure(work=work + more, steps=1), now=0.0, p=p, q=q, cost=cost)
    assert greater.launch or not less.launch


def test_nothing_new_is_never_checkpointed() -> None:
    verdict = decide(Exposure(work=1e9).ready(), now=0.0, p=1.0, q=1.0, cost=0.0)
    assert (verdict.launch, verdict.why) == (False, Why.NOTHING_NEW)


def test_a_timeout_switches_checkpointing_off_for_the_cooldown() -> None:
    exposure = Exposure().stepped(100.0, 100.0).timed_out(now=50.0)
    for now, launch in ((50.0, False), (69.9, False), (70.0, True)):
        assert decide(exposure, now=now, p=1.0, q=1.0, cost=1.0).launch is launch
    assert decide(exposure, now=51.0, p=1.0, q=1.0, cost=1.0).why is Why.COOLING_DOWN


def test_work_counts_from_the_last_ready_checkpoint() -> None:
    exposure = Exposure().stepped(3.0, 1.0).stepped(2.0, 2.0)
    assert exposure.work == 8.0
    assert exposure.ready(work_since=1.5, steps_since=1) == Exposure(work=1.5, steps=1)


@pytest.mark.parametrize(("p", "q"), [(1.1, 0.0), (0.0, -0.1), (float("nan"), 0.0)])
def test_what_is_no_probability_is_refused(p: float, q: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        decide(Exposure(work=1.0, steps=1), now=0.0, p=p, q=q, cost=1.0)
