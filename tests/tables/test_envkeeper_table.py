"""The sandbox table is total, keeps its allowed next states, and the order of effects is the protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import ErrorCode
from envkeeper.core import NEXT, TABLE, Effect, Event, Go, Refuse, State, after_restart, decide

PAIRS = [(state, event) for state in State for event in Event]


def test_every_state_and_event_is_decided() -> None:
    assert [(s, e) for s, e in PAIRS if e not in TABLE[s]] == []
    assert sum(len(row) for row in TABLE.values()) == len(State) * len(Event)


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_next_states_are_allowed(state: State, event: Event) -> None:
    decision = decide(state, event)
    if isinstance(decision, Go):
        assert decision.state in NEXT[state]


def test_every_state_can_be_entered() -> None:
    entered = {d.state for s, e in PAIRS if isinstance(d := decide(s, e), Go) and d.state is not s}
    assert entered == set(State) - {State.CREATING}


def test_destroyed_is_the_end() -> None:
    assert not any(isinstance(decide(State.DESTROYED, event), Go) for event in Event)


def before(effects: tuple[Effect, ...], first: Effect, second: Effect) -> bool:
    return effects.index(first) < effects.index(second)


def test_order_of_effects() -> None:
    for state in (State.RUNNING, State.LOST):
        back = decide(state, Event.RESTORE)
        assert isinstance(back, Go)
        assert before(back.effects, Effect.TAKE_CLAIM, Effect.FENCE)
        assert before(back.effects, Effect.FENCE, Effect.BRING_BACK)
    commit = decide(State.ACTING, Event.COMMITTED)
    assert isinstance(commit, Go)
    assert before(commit.effects, Effect.RECORD, Effect.RELEASE_OBSERVATION)
    failed = decide(State.RESTORING, Event.RESTORE_FAILED)
    assert isinstance(failed, Go)
    assert before(failed.effects, Effect.REMOVE_CONTAINER, Effect.RELEASE_CLAIM)


def test_an_observation_comes_only_from_a_committed_action() -> None:
    releasing = [
        (s, e) for s, e in PAIRS if isinstance(d := decide(s, e), Go) and Effect.RELEASE_OBSERVATION in d.effects
    ]
    assert releasing == [(State.ACTING, Event.COMMITTED)]


def test_what_is_lost_is_never_acted_on() -> None:
    for event in (Event.ACT, Event.CAPTURE):
        decision = decide(State.LOST, event)
        assert isinstance(decision, Refuse)
        assert decision.code is ErrorCode.SANDBOX_LOST


def test_a_second_restorer_is_told_that_the_claim_is_taken() -> None:
    decision = decide(State.RESTORING, Event.RESTORE)
    assert isinstance(decision, Refuse)
    assert decision.code is ErrorCode.CLAIM_TAKEN


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_no_history_leaves_the_allowed_states_or_acts_on_the_dead(events: list[Event]) -> None:
    state = State.CREATING
    for event in events:
        decision = decide(state, event)
        if isinstance(decision, Go):
            if Effect.RUN in decision.effects or Effect.FREEZE_AND_COPY in decision.effects:
                assert state is State.RUNNING
            state = decision.state


@pytest.mark.parametrize("recorded", list(State))
@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("last", [4, 5, 6])
def test_after_a_restart_only_certainty_is_served(recorded: State, alive: bool, busy: bool, last: int) -> None:
    state, reason = after_restart(recorded, alive=alive, agent_busy=busy, agent_last=last, boundary=5)
    certain = recorded in (State.RUNNING, State.ACTING, State.CAPTURING) and alive and not busy and last == 5
    assert (state is State.RUNNING) == certain
    assert state in (State.RUNNING, State.LOST, State.DESTROYED)
    assert bool(reason) == (state is State.LOST or recorded is State.CREATING)
