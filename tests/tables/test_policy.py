"""Judgements of the supervisor: what is a hang, a repeat, a back-off."""

from __future__ import annotations

import msgspec
import pytest

from belayer.heartbeat import Observation, Pulse
from belayerd import policy
from belayerd.policy import Limits, Vital, backoff, gives_up, hang, is_repeat, stuck

LIMITS = Limits(hang_limit_s=2.0, start_deadline_s=60.0, restart_backoff_s=1.0, restart_budget=3, repeat_window_s=60.0)


def seen(age: float, deadline: float = 0.0, flat: float = 0.0) -> Observation:
    pulse = Pulse(phase="step", step=1, waiting=1, running=1, tokens=1, deadline_s=deadline)
    return Observation(age_s=age, pulse=pulse, steps_flat_s=flat)


@pytest.mark.parametrize(
    ("age", "deadline", "state", "cpu", "hung"),
    [
        (1.9, 0, "S", 0, False),
        (2.1, 0, "S", 0, True),  # a deadlock sleeps
        (2.1, 0, "T", 0, True),  # SIGSTOP
        (2.1, 0, "R", 2.1, True),  # an endless loop on a free core
        (2.1, 0, "R", 0.4, False),  # a step that gets a fifth of a core
        (19.0, 0, "R", 1.9, False),
        (20.1, 0, "R", 1.9, True),  # starved for ten limits: no use to anybody
        (2.1, 0, "D", 0.1, False),  # waits for a page
        (9.0, 10, "S", 0, False),  # a legal long phase, announced
        (10.1, 10, "S", 0, True),
    ],
)
def test_hang(age: float, deadline: float, state: str, cpu: float, hung: bool) -> None:
    assert bool(hang(seen(age, deadline), Vital(state, cpu), LIMITS)) is hung


def test_before_the_first_beat_the_start_deadline_rules() -> None:
    assert hang(Observation(age_s=59.0, pulse=None), Vital("S", 0), LIMITS) == ""
    assert "no first heartbeat" in hang(Observation(age_s=61.0, pulse=None), Vital("R", 0), LIMITS)


def test_a_loop_that_makes_no_step_is_stuck_outside_announced_phases() -> None:
    assert stuck(seen(0.0, flat=9.0), LIMITS) == ""
    assert "makes no step" in stuck(seen(0.0, flat=11.0), LIMITS)
    assert stuck(seen(0.0, deadline=30.0, flat=11.0), LIMITS) == ""


def test_a_gap_between_looks_is_far_below_a_hang() -> None:
    """So that no gap alone, however long, can be taken for one (tests/unit/test_worker_heart.py)."""
    assert 0 < policy.gap(LIMITS) < LIMITS.hang_limit_s / 2
    assert hang(seen(policy.gap(LIMITS)), Vital("S", 0), LIMITS) == ""


@pytest.mark.parametrize(("hang_s", "every_s"), [(0.2, 0.02), (0.8, 0.02), (2.0, 0.05), (20.0, 0.5)])
def test_looks_are_as_many_as_a_hang_needs(hang_s: float, every_s: float) -> None:
    limits = msgspec.structs.replace(LIMITS, hang_limit_s=hang_s)
    assert policy.look_every(0.02, limits) == pytest.approx(every_s)
    assert 2 * policy.look_every(0.02, limits) <= policy.gap(limits), "two looks before a gap counts"


def test_backoff_doubles_and_is_capped() -> None:
    assert [backoff(n, LIMITS) for n in (1, 2, 3, 10)] == [1.0, 2.0, 4.0, 60.0]
    assert [gives_up(n, LIMITS) for n in (2, 3)] == [False, True]


def test_repeat_is_inside_the_window_only() -> None:
    assert not is_repeat(None, 10.0, LIMITS)
    assert is_repeat(0.0, 59.0, LIMITS)
    assert not is_repeat(0.0, 60.0, LIMITS)


def view(slot: str, state: str, *, spare: bool = False, waiting: bool = False, model: str = "m") -> policy.SpareView:
    return policy.SpareView(slot=slot, model=model, state=state, configured=spare, waiting=waiting)


def test_one_spare_is_called_for_each_quarantined_slot_of_its_model() -> None:
    fine, out = view("slot0", "protected"), view("slot1", "quarantined")
    first, second = (view(f"spare{n}", "reserve", spare=True, waiting=True) for n in (0, 1))
    starting = view("spare9", "arming", spare=True, waiting=True)
    assert policy.spares_to_call([fine, first]) == []
    assert policy.spares_to_call([fine, out, starting, first, second]) == ["spare0"], "a ready one first"
    called = view("spare0", "handover", spare=True)
    assert policy.spares_to_call([fine, out, called, second]) == [], "asked again, nothing more is called"
    assert policy.spares_to_call([view("slot0", "quarantined"), out, called, second]) == ["spare1"]
    assert policy.spares_to_call([out, view("spare0", "reserve", spare=True, waiting=True, model="other")]) == []


def outlook(state: str, workers: int, gave_up: bool = False) -> policy.Outlook:
    return policy.Outlook(slot="s", state=state, gave_up=gave_up, workers=workers)


@pytest.mark.parametrize(
    ("slot", "missing", "blocked", "lost"),
    [
        (outlook("quarantined", 0, True), False, False, True),
        (outlook("quarantined", 0, True), True, False, True),  # the device waits for an operator, whoever comes back
        (outlook("empty", 0, True), False, False, True),
        (outlook("empty", 0, True), True, False, False),  # tried again when the owner is back, or an update has ended
        (outlook("empty", 0, True), True, True, True),  # what is missing has refused to start
        (outlook("empty", 0), False, False, False),  # not tried yet
        (outlook("arming", 0), False, False, False),
        (outlook("arming", 0), False, True, True),  # no zygote, so no worker
        (outlook("arming", 1), False, True, False),  # that one was forked before
        (outlook("exposed", 1, True), False, True, False),  # it serves
        (outlook("protected", 2), False, True, False),
        (outlook("handover", 1), False, True, False),
        (outlook("reserve", 1), False, True, False),
    ],
)
def test_who_comes_back_without_an_operator(slot: policy.Outlook, missing: bool, blocked: bool, lost: bool) -> None:
    assert policy.beyond_help([slot], missing=missing, blocked=blocked) == (("s",) if lost else ())


@pytest.mark.parametrize(
    ("leader", "rank", "hung"),
    [
        (Vital("S", 0), Vital("S", 0), True),  # all asleep: a deadlock
        (Vital("S", 0), Vital("T", 0), True),  # the leader waits for a stopped rank
        (Vital("R", 0.1), Vital("T", 0), True),  # also while it could run
        (Vital("S", 0), Vital("R", 0.5), False),  # the rank is starved, not the leader hung
        (Vital("S", 0), Vital("D", 0.5), False),
        (Vital("S", 0), Vital("R", 2.1), True),  # the rank is in an endless loop
        (Vital("R", 0.5), Vital("S", 2.1), True),  # and the leader is only waiting for the core
        (Vital("S", 0), Vital("Z", 0), True),
    ],
)
def test_a_worker_of_two_processes_is_judged_as_one(leader: Vital, rank: Vital, hung: bool) -> None:
    assert bool(hang(seen(2.1), policy.vital_of([leader, rank]), LIMITS)) is hung
