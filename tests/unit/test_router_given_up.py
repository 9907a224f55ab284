"""The router's core, when slots gave up: who is answered at once, and who waits on (R6)."""

from __future__ import annotations

from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from tests.unit.test_router_core import FRAMES, of, serve

TWO = Limits(slots=frozenset("ab"), waiting_s=50.0, home_s=10.0)


def no_slot(effects: list[ev.Effect]) -> list[str]:
    found = [effect for effect in effects if isinstance(effect, ev.Fail)]
    assert {effect.code for effect in found} <= {"no_healthy_slot"}
    return [effect.request_id for effect in found]


def test_nobody_waits_for_slots_that_none_but_an_operator_brings_back() -> None:
    core = Core(TWO)
    core.step(ev.Add("early", FRAMES), 0.0)
    assert no_slot(core.step(ev.GivenUp(frozenset("a")), 1.0)) == [], "b may come"
    assert no_slot(core.step(ev.GivenUp(frozenset("ab")), 2.0)) == ["early"]
    assert no_slot(core.step(ev.Add("late", FRAMES), 3.0)) == ["late"]
    assert (core.requests, core.next_deadline()) == ({}, None)
    core.step(ev.GivenUp(frozenset("b")), 4.0)  # a was restored, and is on its way
    assert no_slot(core.step(ev.Add("again", FRAMES), 5.0)) == []
    assert of(serve(core, "a", 0, 6.0), ev.SendAdd) == [ev.SendAdd("a-0", "again", FRAMES, ())]


def test_a_slot_that_serves_is_not_given_up_whatever_was_said() -> None:
    """belayerd's word may be older than the worker: who serves, or is being greeted, counts."""
    core = Core(TWO)
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    assert no_slot(core.step(ev.GivenUp(frozenset("ab")), 1.0)) == []
    core.step(ev.Add("next", FRAMES), 1.0)
    assert core.slots["a"].running.keys() == {"r", "next"}
    assert sorted(no_slot(core.step(ev.Unregister("a", 0), 2.0))) == ["next", "r"], "now nobody is left"
    core.step(ev.Register("a", 1, "a-1", "e"), 3.0)  # so it was mended: the word about it is over
    assert core.given_up == frozenset("b")
    assert no_slot(core.step(ev.Add("waits", FRAMES), 3.0)) == []
    core.step(ev.GivenUp(frozenset("ab")), 4.0)
    assert no_slot(core.step(ev.ConnectFailed("a", 1, "a-1"), 5.0)) == ["waits"]


def test_a_replacement_under_way_keeps_requests_of_its_slot() -> None:
    core = Core(TWO)
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    core.step(ev.GivenUp(frozenset("ab")), 1.0)
    assert no_slot(core.step(ev.Register("a", 1, "a-1", "e"), 2.0)) == []
    assert of(core.step(ev.Ready("a", 1, "a-1"), 3.0), ev.SendAdd) == [ev.SendAdd("a-1", "r", FRAMES, ())]


def test_a_home_that_was_given_up_is_left_at_once() -> None:
    core = Core(TWO)
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    core.step(ev.Unregister("a", 0), 1.0)
    assert not of(serve(core, "b", 0, 1.0), ev.SendAdd), "a may come back"
    assert of(core.step(ev.GivenUp(frozenset("a")), 2.0), ev.SendAdd) == [ev.SendAdd("b-0", "r", FRAMES, ())]
    core.step(ev.Unregister("b", 0), 3.0)
    core.step(ev.Add("pinned", FRAMES, pin="a"), 3.0)
    assert len(of(serve(core, "b", 1, 4.0), ev.SendAdd)) == 2, "its URL leads to whoever serves"


def test_with_other_hosts_only_those_end_that_must_stay_here() -> None:
    core = Core(Limits(slots=frozenset("a"), peers=True))
    core.step(ev.GivenUp(frozenset("a")), 0.0)
    assert no_slot(core.step(ev.Add("may go", FRAMES), 0.0)) == []
    assert no_slot(core.step(ev.Add("pooling", FRAMES, continuable=False), 0.0)) == ["pooling"]
    assert no_slot(core.step(ev.Add("guest", FRAMES, origin="host-b"), 0.0)) == ["guest"]
