"""The joint table is total, its allowed next states are kept, every state is reachable, and it does its job."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayerd import pair as p
from belayerd import pair_table
from belayerd.handover import HANDOVER, STEPS, Action, OnFailure
from tests.support.pairs import LIMITS, ORACLE, Stopped, World, protected


def test_every_state_and_event_is_decided() -> None:
    missing = [(s, e.__name__) for s in p.State for e in p.EVENTS if (s, e) not in pair_table.TABLE]
    assert missing == []
    assert len(pair_table.TABLE) == len(p.State) * len(p.EVENTS)


def test_every_state_can_be_entered_from_another() -> None:
    entered = {to for (state, _), (_, tos) in pair_table.TABLE.items() for to in tos if to is not state}
    assert entered == set(p.State)


def test_order_of_the_steps_is_the_protocol() -> None:
    order = [step.action for step in STEPS]
    for before, after in (
        (Action.UNREGISTER, Action.FENCE),
        (Action.FENCE, Action.LEASE),
        (Action.OWNERS, Action.LEASE),
        (Action.LEASE, Action.FLUSH),
        (Action.FLUSH, Action.ORACLE),
        (Action.ORACLE, Action.BECOME),
        (Action.BECOME, Action.REGISTER),
    ):
        assert order.index(before) < order.index(after)
    assert [step.number for step in STEPS] == sorted(step.number for step in STEPS)


def test_kill_hands_over_and_re_arms() -> None:
    world = protected()
    old, shadow = world.pair.main, world.pair.shadow
    assert old is not None
    assert shadow is not None
    world.lose(old.worker_id)
    world.drain()
    assert world.pair.protected
    assert world.pair.main == shadow
    assert world.pair.generation == 2
    assert world.routed == world.holder == shadow.worker_id
    assert world.outcomes[-2:] == ["open", "served"]


def test_shadow_death_is_replaced_and_main_goes_on() -> None:
    world = protected()
    main, shadow = world.pair.main, world.pair.shadow
    assert shadow is not None
    world.lose(shadow.worker_id)
    world.drain()
    assert world.pair.protected
    assert world.pair.main == main
    assert world.pair.shadow != shadow
    assert world.pair.generation == 1


def test_second_failure_inside_the_window_quarantines() -> None:
    world = protected()
    for _ in range(2):
        assert world.pair.main is not None
        world.lose(world.pair.main.worker_id)
        world.drain()
    assert world.pair.state is p.State.QUARANTINED
    assert world.quarantined
    assert world.routed is None
    assert world.alive == set()
    assert "second failure" in world.alerts[-1]


def test_one_failure_an_hour_never_quarantines() -> None:
    world = protected()
    for _ in range(100):
        world.now += 3600
        assert world.pair.main is not None
        world.lose(world.pair.main.worker_id)
        world.drain()
        assert world.pair.protected
    assert world.pair.handovers == 100


@pytest.mark.parametrize("action", [step.action for step in STEPS if step.on_failure is OnFailure.QUARANTINE])
def test_a_failing_gate_never_registers(action: Action) -> None:
    world = protected()
    world.fail[action] = "broken on purpose"
    assert world.pair.main is not None
    world.lose(world.pair.main.worker_id)
    world.drain()
    assert world.pair.state is p.State.QUARANTINED
    assert world.routed is None
    assert world.alive == set()
    assert f"{action} failed: broken on purpose" in world.pair.reason


@pytest.mark.parametrize("action", [Action.UNREGISTER, Action.REGISTER])
def test_a_router_that_is_down_is_waited_for(action: Action) -> None:
    world = protected()
    world.fail[action] = "no answer"
    assert world.pair.main is not None
    world.lose(world.pair.main.worker_id)
    for _ in range(30):
        world.send(world.pending.pop(0))
    assert world.pair.state is p.State.HANDOVER
    world.fail.clear()
    world.drain()
    assert world.pair.protected
    assert world.pair.generation == 2


@pytest.mark.parametrize("at", range(len(HANDOVER)))
def test_an_older_wait_begins_no_action_beside_itself(at: int) -> None:
    """A start failed and its wait is still running when the main is lost: its end falls into the handover. A second
    lease, or a second generation, would be refused by the worker, and a refusal is a failed gate."""
    world = protected()
    assert world.pair.main is not None
    world.lose(world.pair.main.worker_id)
    while world.pair.running is None or world.pair.running.done < at:
        world.send(world.pending.pop(0))
    begun = world.pair.running.serial
    world.send(p.BackoffOver())
    assert world.pair.running is not None
    assert world.pair.running.serial == begun
    world.drain()
    assert world.pair.protected
    assert world.pair.generation == 2


@pytest.mark.parametrize("at", range(len(HANDOVER)))
def test_candidate_dying_at_each_action_is_replaced(at: int) -> None:
    world = protected()
    main, shadow = world.pair.main, world.pair.shadow
    assert main is not None
    assert shadow is not None
    world.lose(main.worker_id)
    while world.pair.running is None or world.pair.running.done < at:
        world.send(world.pending.pop(0))
    world.lose(shadow.worker_id)
    world.pending.insert(0, world.pending.pop())  # its death is told before the action under way ends
    world.drain()
    assert world.pair.protected
    assert world.routed == world.holder
    assert world.routed not in (main.worker_id, shadow.worker_id)


def test_main_lost_while_re_arming_is_fenced_then_replaced() -> None:
    world = protected()
    world.now += 1000
    assert world.pair.shadow is not None
    world.lose(world.pair.shadow.worker_id)
    world.send(world.pending.pop(0))
    main = world.pair.main
    assert main is not None
    assert world.pair.state is p.State.REARMING
    world.lose(main.worker_id)
    world.drain()
    assert world.pair.protected
    assert world.pair.generation == 2
    assert world.holder == world.routed != main.worker_id


def test_shadow_of_a_replaced_kv_owner_is_replaced() -> None:
    world = protected()
    main, shadow = world.pair.main, world.pair.shadow
    assert shadow is not None
    world.send(p.ArenaGone())
    assert not world.pair.protected
    world.drain()
    assert world.pair.protected
    assert world.pair.main == main
    assert world.pair.shadow != shadow
    assert shadow.worker_id not in world.alive


def test_shadow_that_never_starts_leaves_the_main_serving() -> None:
    world = protected()
    for _ in range(LIMITS.restart_budget):
        while world.pair.shadow is None:
            world.send(world.pending.pop(0))
        world.pending.clear()  # its StandbyReady never comes
        world.lose(world.pair.shadow.worker_id)
        world.send(world.pending.pop(0))
    assert world.pair.state is p.State.EXPOSED
    assert world.routed is not None
    assert "starts in a row failed" in world.alerts[-1]


def test_operator_is_refused_without_a_ready_shadow() -> None:
    world = World()
    world.send(p.Wanted())
    with pytest.raises(p.Refuse, match="arming"):
        world.send(p.HandoverAsked(reason="test", incident_id="i1"))


def test_stale_events_change_nothing() -> None:
    world = protected()
    before = world.pair
    world.send(p.WorkerLost(worker_id="slot0-deadbeef", cause=p.Cause.HANG, detail="late", incident_id="i9"))
    world.send(p.ActionDone(action=Action.FENCE, serial=1, ms=0.0))
    world.send(p.ActionFailed(action=Action.ORACLE, serial=1, reason="late"))
    assert world.pair == before


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["main", "shadow", "step", "hour", "ask", "back", "restore", "arena"]), max_size=40))
def test_any_sequence_of_deaths_keeps_the_invariants(moves: list[str]) -> None:
    """World.check runs after every effect; at rest a slot is protected, quarantined or says why it is not."""
    world = protected()
    for move in moves:
        if move == "main" and world.pair.main:
            world.lose(world.pair.main.worker_id)
        elif move == "shadow" and world.pair.shadow:
            world.lose(world.pair.shadow.worker_id)
        elif move == "hour":
            world.now += 3600
        elif move == "back":
            world.pending.append(p.RouterBack())
        elif move == "arena":
            world.pending.append(p.ArenaGone())
        elif move in ("ask", "restore"):
            event = p.HandoverAsked(reason="x", incident_id="i0") if move == "ask" else p.RestoreAsked()
            try:
                world.send(event)
            except p.Refuse:
                continue
        elif world.pending:
            world.send(world.pending.pop(0))
    world.drain()
    assert world.pair.state in (p.State.PROTECTED, p.State.QUARANTINED, p.State.EXPOSED, p.State.EMPTY)
    assert world.pair.protected or world.pair.reason


def spare(*events: p.Event) -> World:
    world = World(pair=p.Pair(slot="spare0", spare=True))
    for event in (p.Wanted(), *events):
        world.send(event)
        world.drain()
    return world


def test_a_spare_waits_with_a_ready_worker_and_is_not_routed() -> None:
    world = spare()
    assert world.pair.state is p.State.RESERVE
    assert len(world.alive) == 1
    assert (world.routed, world.holder) == (None, None)


def test_a_called_spare_becomes_a_protected_slot_through_the_same_gate() -> None:
    world = spare(p.Called())
    assert world.pair.protected
    assert world.pair.generation == 1
    assert world.routed in world.gated
    assert not world.pair.spare


def test_a_spare_called_while_its_worker_starts_or_is_down_serves_when_it_can() -> None:
    world = World(pair=p.Pair(slot="spare0", spare=True))
    world.send(p.Wanted())
    world.send(p.Called())
    world.drain()
    assert world.pair.protected
    world = World(pair=p.Pair(slot="spare0", spare=True))
    world.send(p.Called())
    world.drain()
    assert world.pair.protected


def test_a_dying_spare_is_replaced_and_a_called_one_stays_called_over_a_restart() -> None:
    world = spare()
    assert world.pair.shadow is not None
    world.lose(world.pair.shadow.worker_id)
    world.drain()
    assert world.pair.state is p.State.RESERVE
    world.stop_after = world.performed + 1  # the Save of the call; belayerd is killed before the first action
    with pytest.raises(Stopped):
        world.send(p.Called())
    world.restart()
    world.drain()
    assert world.pair.protected


def test_a_spare_of_a_replaced_kv_owner_is_started_anew() -> None:
    world = spare()
    before = world.pair.shadow
    world.send(p.ArenaGone())
    world.drain()
    assert world.pair.state is p.State.RESERVE
    assert world.pair.shadow != before


def test_weights_that_are_being_written_are_waited_for_and_are_no_fault_of_the_device() -> None:
    world = protected()
    world.not_yet.add(Action.OWNERS)
    assert world.pair.main is not None
    world.lose(world.pair.main.worker_id)
    for _ in range(40):
        world.send(world.pending.pop(0))
    assert world.pair.state is p.State.HANDOVER
    assert "not yet" in world.pair.reason
    assert world.routed is None, "nothing is served meanwhile"
    world.not_yet.clear()
    world.drain()
    assert world.pair.protected
    assert world.pair.generation == 2


def test_a_worker_that_cannot_follow_the_weights_is_replaced_and_never_quarantines() -> None:
    world = protected()
    for _ in range(3):
        assert world.pair.main is not None
        lost = p.WorkerLost(worker_id=world.pair.main.worker_id, cause=p.Cause.WEIGHTS, detail="v2", incident_id="i")
        world.send(lost)
        world.drain()
        assert world.pair.protected
    assert world.pair.generation == 4


def test_the_oracle_of_the_last_weights_counts_and_no_older_one() -> None:
    world = protected()
    main, newer = world.pair.main, msgspec.structs.replace(ORACLE, weight_version=2, token=9)
    assert main is not None
    world.send(p.Followed(worker_id="slot0-gone", oracle=newer))
    assert world.pair.oracle == ORACLE, "a worker that the pair does not have says nothing"
    world.send(p.Followed(worker_id=main.worker_id, oracle=newer))
    assert world.pair.oracle == newer
    world.send(p.Followed(worker_id=main.worker_id, oracle=ORACLE))
    assert world.pair.oracle == newer
    world.lose(main.worker_id)
    world.drain()
    assert world.pair.oracle == newer, "a shadow of before the update does not bring its old oracle"
