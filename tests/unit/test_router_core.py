"""The router's core: the rules one by one (R2, R6); random interleavings are in test_router_core_machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.errors import Fenced, Refused
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.records import REQUEST_NEXT, SLOT_NEXT, RequestState, SlotState

FRAMES = (b"request",)


def serve(core: Core, slot: str, generation: int, now: float = 0.0) -> list[ev.Effect]:
    worker_id = f"{slot}-{generation}"
    first = core.step(ev.Register(slot, generation, worker_id, f"ipc://{worker_id}"), now)
    return first + core.step(ev.Ready(slot, generation, worker_id), now)


def out(core: Core, slot: str, generation: int, seq: int, *items: ev.Item, now: float = 0.0) -> list[ev.Effect]:
    return core.step(ev.Outputs(slot, generation, f"{slot}-{generation}", seq, items), now)


def of(effects: list[ev.Effect], kind: type[ev.Effect]) -> list[ev.Effect]:
    return [effect for effect in effects if type(effect) is kind]


def test_tables_are_total() -> None:
    assert set(REQUEST_NEXT) == set(RequestState)
    assert set(SLOT_NEXT) == set(SlotState)
    assert REQUEST_NEXT[RequestState.FINISHED] == frozenset()


def test_every_event_has_a_handler() -> None:
    assert set(Core(Limits())._handlers) == set(ev.Event.__subclasses__())


def test_a_request_that_came_before_any_worker_is_given_to_the_first() -> None:
    core = Core(Limits())
    assert not of(core.step(ev.Add("r", FRAMES), 0.0), ev.SendAdd)
    assert of(serve(core, "a", 0), ev.SendAdd) == [ev.SendAdd("a-0", "r", FRAMES, ())]


def test_after_a_death_the_same_slot_gets_the_request_again_with_its_tokens() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    serve(core, "b", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    out(core, "a", 0, 0, ev.Item("r", (7, 8)))
    gone = core.step(ev.Unregister("a", 0), 1.0)
    assert gone == [ev.Disconnect("a", "a-0")]
    assert core.waiting == 1
    assert of(serve(core, "a", 1, 2.0), ev.SendAdd) == [ev.SendAdd("a-1", "r", FRAMES, (7, 8))]
    done = out(core, "a", 1, 0, ev.Item("r", (9,), "length"), now=2.5)
    assert of(done, ev.Deliver) == [ev.Deliver("r", 0, True, ("r",))]
    note = core.slots["a"].last_resume
    assert note is not None
    assert (note.generation, note.resumed, note.first_token_ms) == (1, 1, pytest.approx(500.0))


def test_requests_of_a_removed_slot_are_spread_evenly() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    for i in range(10):
        core.step(ev.Add(f"r{i}", FRAMES), 0.0)
    serve(core, "b", 0)
    serve(core, "c", 0)
    moved = of(core.step(ev.Unregister("a", 0, removed=True), 1.0), ev.SendAdd)
    assert len(moved) == 10
    assert (len(core.slots["b"].running), len(core.slots["c"].running)) == (5, 5)
    assert core.counters.moved == 10


def test_home_is_waited_for_and_then_left() -> None:
    core = Core(Limits(home_s=5.0, waiting_s=50.0))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    core.step(ev.Unregister("a", 0), 1.0)
    assert not of(serve(core, "b", 0, 1.0), ev.SendAdd)
    assert core.next_deadline() == 6.0
    assert of(core.step(ev.Tick(), 6.0), ev.SendAdd) == [ev.SendAdd("b-0", "r", FRAMES, ())]


def test_waiting_is_bounded() -> None:
    core = Core(Limits(waiting_s=10.0))
    core.step(ev.Add("r", FRAMES), 3.0)
    assert core.next_deadline() == 13.0
    assert not of(core.step(ev.Tick(), 12.0), ev.Fail)
    (fail,) = of(core.step(ev.Tick(), 13.0), ev.Fail)
    assert isinstance(fail, ev.Fail)
    assert fail.code == "no_healthy_slot"
    assert core.requests == {}
    assert core.next_deadline() is None


def test_poison_is_bounded_by_deaths_and_planned_handovers_do_not_count() -> None:
    core = Core(Limits(deaths=2))
    core.step(ev.Add("r", FRAMES), 0.0)
    for generation in range(5):
        serve(core, "a", generation)
        assert not of(core.step(ev.Unregister("a", generation, ev.Cause.PLANNED), 0.0), ev.Fail)
    for generation in range(5, 7):
        serve(core, "a", generation)
        assert not of(core.step(ev.Unregister("a", generation), 0.0), ev.Fail)
    serve(core, "a", 7)
    (fail,) = of(core.step(ev.Unregister("a", 7), 0.0), ev.Fail)
    assert isinstance(fail, ev.Fail)
    assert fail.code == "poison_request"


def test_old_generations_are_fenced() -> None:
    core = Core(Limits())
    serve(core, "a", 3)
    with pytest.raises(Fenced):
        core.step(ev.Register("a", 2, "old", "e"), 0.0)
    with pytest.raises(Fenced):
        core.step(ev.Register("a", 3, "other", "e"), 0.0)
    with pytest.raises(Fenced):
        core.step(ev.Unregister("a", 2), 0.0)
    assert core.step(ev.Register("a", 3, "a-3", "e"), 0.0) == []
    core.step(ev.Unregister("a", 3), 0.0)
    assert core.step(ev.Unregister("a", 3), 0.0) == []
    with pytest.raises(Fenced):
        core.step(ev.Register("a", 3, "a-3", "e"), 0.0)
    assert core.serving == 0


def test_a_worker_replaced_before_it_was_ready_is_fenced() -> None:
    core = Core(Limits())
    core.step(ev.Register("a", 0, "w0", "e0"), 0.0)
    effects = core.step(ev.Register("a", 1, "w1", "e1"), 0.0)
    assert [type(effect) for effect in effects] == [ev.Disconnect, ev.Connect]
    with pytest.raises(Fenced):
        core.step(ev.Ready("a", 0, "w0"), 0.0)


def test_a_connection_that_failed_may_be_tried_again() -> None:
    core = Core(Limits())
    core.step(ev.Register("a", 0, "w0", "e0"), 0.0)
    assert core.step(ev.ConnectFailed("a", 0, "w0"), 0.0) == [ev.Disconnect("a", "w0")]
    assert core.step(ev.ConnectFailed("a", 0, "w0"), 0.0) == []
    assert of(core.step(ev.Register("a", 0, "w0", "e0"), 0.0), ev.Connect)


def test_late_output_is_dropped_and_counted() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    core.step(ev.Unregister("a", 0), 0.0)
    serve(core, "a", 1)
    assert out(core, "a", 0, 0, ev.Item("r", (1,))) == []
    assert core.counters.late_messages == 1
    core.step(ev.Abort(("r",)), 0.0)
    assert out(core, "a", 1, 0, ev.Item("r", (1,), "stop")) == []
    assert core.counters.late_items == 1


def test_what_an_earlier_router_left_on_a_worker_is_aborted() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    assert out(core, "a", 0, 41, ev.Item("orphan", (1,))) == [ev.SendAbort("a-0", ("orphan",))]
    core.step(ev.Add("r", FRAMES), 0.0)
    assert of(out(core, "a", 0, 42, ev.Item("r", (1,))), ev.Deliver)


@pytest.mark.parametrize("seq", [0, 2])
def test_a_doubled_or_missing_message_ends_the_link_not_the_request(seq: int) -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    out(core, "a", 0, 0, ev.Item("r", (1,)))
    anew = [ev.Disconnect("a", "a-0"), ev.Connect("a", 0, "a-0", "ipc://a-0")]
    assert out(core, "a", 0, seq, ev.Item("r", (2,))) == anew
    again = core.step(ev.Ready("a", 0, "a-0", seq=7), 1.0)
    assert of(again, ev.SendAdd) == [ev.SendAdd("a-0", "r", FRAMES, (1,))]
    assert of(out(core, "a", 0, 7, ev.Item("r", (2,))), ev.Deliver)
    assert core.requests["r"].deaths == 0


def test_a_link_that_is_torn_again_and_again_waits_for_the_next_generation() -> None:
    core = Core(Limits(tears=2))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    for _ in range(2):
        assert of(core.step(ev.Torn("a", "a-0"), 0.0), ev.Connect)
        core.step(ev.Ready("a", 0, "a-0"), 0.0)
    assert core.step(ev.Torn("a", "a-0"), 0.0) == [ev.Disconnect("a", "a-0")]
    assert of(serve(core, "a", 1), ev.SendAdd) == [ev.SendAdd("a-1", "r", FRAMES, ())]
    assert core.slots["a"].tears == 0


def test_an_answer_with_another_count_shows_what_no_message_showed() -> None:
    """The last message of a request was lost: nothing more comes, so nothing would ever show the gap."""
    core = Core(Limits())
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    out(core, "a", 0, 0, ev.Item("r", (1,)))
    assert core.step(ev.Beat("a", "a-0", 1), 0.0) == []
    assert of(core.step(ev.Beat("a", "a-0", 2), 0.0), ev.Connect)
    assert of(core.step(ev.Ready("a", 0, "a-0", 2), 0.0), ev.SendAdd) == [ev.SendAdd("a-0", "r", FRAMES, (1,))]
    assert core.counters.torn_links == 1


def test_a_worker_that_says_nothing_about_a_request_loses_it_to_another_slot() -> None:
    core = Core(Limits(silence_s=30.0))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    out(core, "a", 0, 0, ev.Item("r", (1,)), now=5.0)
    serve(core, "b", 0)
    assert core.next_deadline() == 35.0
    assert core.step(ev.Tick(), 34.0) == []
    moved = core.step(ev.Tick(), 35.0)
    assert moved == [ev.SendAbort("a-0", ("r",)), ev.SendAdd("b-0", "r", FRAMES, (1,))]
    assert not of(out(core, "a", 0, 1, ev.Item("r", (2,))), ev.Deliver)


def test_without_another_slot_silence_ends_in_a_typed_error_and_a_pause_is_no_silence() -> None:
    core = Core(Limits(silence_s=30.0))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    core.step(ev.Paused(True), 10.0)
    assert core.next_deadline() is None
    assert core.step(ev.Tick(), 100.0) == []
    core.step(ev.Paused(False), 200.0)
    assert core.next_deadline() == 230.0
    abort, _, fail = core.step(ev.Tick(), 230.0)
    assert abort == ev.SendAbort("a-0", ("r",))
    assert isinstance(fail, ev.Fail)
    assert (fail.code, fail.readers) == ("request_stalled", ("r",))
    assert core.requests == {}


def test_what_cannot_be_continued_ends_with_a_typed_error_only_if_it_had_tokens() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    core.step(ev.Add("with", FRAMES, continuable=False), 0.0)
    core.step(ev.Add("without", FRAMES, continuable=False), 0.0)
    out(core, "a", 0, 0, ev.Item("with", (1,)))
    (fail,) = of(core.step(ev.Unregister("a", 0), 0.0), ev.Fail)
    assert isinstance(fail, ev.Fail)
    assert (fail.request_id, fail.code) == ("with", "worker_gone")
    serve(core, "a", 1)
    assert core.slots["a"].restarted_total == 1


def test_the_journal_is_written_every_k_tokens_and_before_the_finish_is_delivered() -> None:
    core = Core(Limits(journal_every=3))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    assert not of(out(core, "a", 0, 0, ev.Item("r", (1, 2))), ev.JournalTokens)
    (block,) = of(out(core, "a", 0, 1, ev.Item("r", (3,))), ev.JournalTokens)
    assert block == ev.JournalTokens("r", 0, (1, 2, 3), "a", 0, "")
    core.step(ev.Unregister("a", 0), 0.0)
    serve(core, "a", 1)
    end = out(core, "a", 1, 0, ev.Item("r", (4,), "stop"))
    assert [type(effect) for effect in end] == [ev.JournalTokens, ev.JournalFinish, ev.Deliver]
    assert end[0] == ev.JournalTokens("r", 3, (4,), "a", 1, "")


def test_each_journal_block_has_one_maker() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    for seq, version in enumerate(["v1", "v1", "v2"]):
        core.step(ev.Outputs("a", 0, "a-0", seq, (ev.Item("r", (seq,)),), version), 0.0)
    blocks = of(core.step(ev.Abort(("r",)), 0.0), ev.JournalTokens)
    assert blocks == [ev.JournalTokens("r", 2, (2,), "a", 0, "v2")]


def test_the_same_id_twice_is_refused() -> None:
    core = Core(Limits())
    core.step(ev.Add("r", FRAMES), 0.0)
    with pytest.raises(Refused):
        core.step(ev.Add("r", FRAMES), 0.0)
    assert core.counters.added == 1


def test_a_session_stays_with_its_slot() -> None:
    core = Core(Limits())
    serve(core, "a", 0)
    serve(core, "b", 0)
    for i in range(6):
        core.step(ev.Add(f"r{i}", FRAMES, session="s"), 0.0)
    assert len(core.slots["a"].running) == 6
    core.step(ev.Unregister("a", 0, removed=True), 0.0)
    assert len(core.slots["b"].running) == 6


@given(st.integers(1, 20), st.integers(0, 20))
@settings(max_examples=50)
def test_next_deadline_is_never_late(count: int, pause: int) -> None:
    core = Core(Limits(home_s=5.0, waiting_s=10.0))
    for i in range(count):
        core.step(ev.Add(f"r{i}", FRAMES), float(i * pause))
    while (due := core.next_deadline()) is not None:
        before = len(core.requests)
        core.step(ev.Tick(), due)
        assert len(core.requests) < before
    assert core.counters.failed == {"no_healthy_slot": count}


def test_a_tick_at_its_deadline_counts_whatever_the_sum_rounds_to() -> None:
    now = 1.9880253857581236 + 42.41102233946358
    assert (now + 20.0) - now < 20.0
    core = Core(Limits(home_s=20.0, waiting_s=100.0))
    core.step(ev.Add("r", FRAMES), now)
    serve(core, "a", 0, now)
    core.step(ev.Unregister("a", 0), now)
    serve(core, "b", 0, now)
    due = core.next_deadline()
    assert due is not None
    assert of(core.step(ev.Tick(), due), ev.SendAdd) == [ev.SendAdd("b-0", "r", FRAMES, ())]


def test_time_in_which_the_router_stood_still_is_no_silence_and_no_waiting() -> None:
    """SIGSTOP, a paused VM: outputs wait unread, and so do the workers that come."""
    core = Core(Limits(home_s=5.0, waiting_s=20.0, silence_s=10.0))
    serve(core, "a", 0)
    core.step(ev.Add("runs", FRAMES), 0.0)
    core.step(ev.Add("waits", FRAMES, pin="b"), 1.0)
    core.step(ev.StoodStill(3600.0), 3602.0)
    assert core.step(ev.Tick(), 3602.0) == []
    assert core.next_deadline() == 3606.0
    assert of(core.step(ev.Tick(), 3606.0), ev.SendAdd) == [ev.SendAdd("a-0", "waits", FRAMES, ())]
    assert [one.code for one in core.step(ev.Tick(), 3610.0) if isinstance(one, ev.Fail)] == ["request_stalled"]
