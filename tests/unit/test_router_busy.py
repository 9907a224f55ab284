"""A worker that is busy for long, or whose link is torn now and then over weeks, is not given up: nobody else would
bring its slot back before its next generation."""

from __future__ import annotations

from typing import Any

import msgspec

from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.records import SlotState
from tests.unit.test_router_core import FRAMES, of, out, serve
from tests.unit.test_router_shell import Heard, Scene, play

ANEW = [ev.Disconnect("a", "a-0"), ev.Connect("a", 0, "a-0", "ipc://a-0")]


def test_a_link_that_is_torn_now_and_then_is_always_made_anew() -> None:
    core = Core(Limits(tears=2, steady_s=60.0))
    serve(core, "a", 0)
    for day in range(1, 30):
        assert core.step(ev.Torn("a", "a-0"), day * 86400.0) == ANEW
        core.step(ev.Ready("a", 0, "a-0"), day * 86400.0 + 1)
    for _ in range(2):
        assert core.slots["a"].state is SlotState.SERVING
        last = core.step(ev.Torn("a", "a-0"), 30 * 86400.0)
        core.step(ev.Ready("a", 0, "a-0"), 30 * 86400.0)
    assert last == ANEW
    assert core.step(ev.Torn("a", "a-0"), 30 * 86400.0 + 59) == ANEW[:1], "one soon after the other still counts"


def test_a_worker_is_knocked_at_until_it_answers_or_is_unregistered() -> None:
    core = Core(Limits(home_s=1e6, waiting_s=1e6))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    out(core, "a", 0, 0, ev.Item("r", (1,)))
    core.step(ev.Torn("a", "a-0"), 1.0)
    for again in range(50):
        assert core.step(ev.ConnectFailed("a", 0, "a-0", silent=True), 6.0 + again) == ANEW
    back = core.step(ev.Ready("a", 0, "a-0", 0), 60.0)
    assert of(back, ev.SendAdd) == [ev.SendAdd("a-0", "r", FRAMES, (1,))]
    core.step(ev.Torn("a", "a-0"), 61.0)
    assert core.step(ev.Unregister("a", 0), 62.0) == ANEW[:1]
    assert core.step(ev.ConnectFailed("a", 0, "a-0", silent=True), 63.0) == [], "it was the word of nobody any more"


def test_so_is_one_that_was_busy_when_it_was_registered() -> None:
    """By a belayerd that sees a new router, for example: it tells it once."""
    core = Core(Limits())
    core.step(ev.Register("a", 0, "a-0", "ipc://a-0"), 0.0)
    assert core.step(ev.ConnectFailed("a", 0, "a-0", silent=True), 5.0) == ANEW
    assert core.step(ev.Register("a", 0, "a-0", "ipc://a-0"), 6.0) == []
    assert core.step(ev.Unregister("a", 0), 7.0) == ANEW[:1]
    assert of(core.step(ev.Register("a", 1, "a-1", "ipc://a-1"), 8.0), ev.Connect)


def test_a_worker_that_answers_wrongly_is_not_knocked_at() -> None:
    core = Core(Limits())
    serve(core, "a", 1)
    core.step(ev.Torn("a", "a-1"), 6.0)
    assert core.step(ev.ConnectFailed("a", 1, "a-1"), 7.0) == [ev.Disconnect("a", "a-1")]
    assert core.slots["a"].state is SlotState.EMPTY


def test_requests_beside_an_admin_call_may_hear_nothing_as_long_as_it_runs() -> None:
    core = Core(Limits(silence_s=5.0))
    serve(core, "a", 0)
    serve(core, "b", 0)
    for name in ("r", "s"):
        core.step(ev.Add(name, FRAMES), 0.0)
    assert [core.requests[name].slot for name in ("r", "s")] == ["a", "b"]
    core.step(ev.Calls("a", "a-0", 100.0), 1.0)
    taken = [one for one in core.step(ev.Tick(), 6.0) if isinstance(one, ev.SendAbort)]
    assert taken == [ev.SendAbort("b-0", ("s",))], "the other slot's silence counts"
    assert core.next_deadline() == 11.0
    core.step(ev.Tick(), 99.0)
    core.step(ev.Calls("a", "a-0", 0.0), 99.5)
    assert of(core.step(ev.Tick(), 104.0), ev.SendAbort) == []
    assert {request_id for one in core.step(ev.Tick(), 104.5) if isinstance(one, ev.SendAbort)
            for request_id in one.request_ids} == {"r", "s"}  # fmt: skip


def test_a_call_that_takes_longer_than_it_may_keeps_nobody_waiting() -> None:
    core = Core(Limits(silence_s=5.0))
    serve(core, "a", 0)
    core.step(ev.Add("r", FRAMES), 0.0)
    core.step(ev.Calls("a", "a-0", 12.0), 0.0)
    assert core.step(ev.Tick(), 11.0) == []
    (failed,) = [one for one in core.step(ev.Tick(), 16.0) if isinstance(one, ev.Fail)]
    assert failed.code == "request_stalled"


def test_a_worker_too_busy_for_its_new_link_serves_again_when_it_answers() -> None:
    """Its link was torn while it is in a long step: it hears the new hello only after the first has been given up."""
    sink = Heard()

    async def story(scene: Scene) -> None:
        await scene.join()
        scene.shell.add(ev.Add("r", (b"frame",)))
        assert (await scene.worker.recv_multipart())[1] == b"add"
        await scene.say(ev.Item("r", (5,)))
        assert await sink.tokens.get() == 5
        await scene.worker.send_multipart([b"\0\0", b"what"])
        tokens: list[bytes] = []
        while len(tokens) < 2:
            _, kind, token, *_ = await scene.worker.recv_multipart()
            if kind == b"hello" and token not in tokens and token != scene.token:
                tokens.append(token)  # the first is not answered
        assert scene.shell.serving_slots() == []
        standing = msgspec.msgpack.encode({"seq": scene.seq})
        await scene.worker.send_multipart([b"\0\0", b"ready", b"", tokens[-1], standing])
        again: list[Any] = await scene.worker.recv_multipart()
        while again[1] == b"hello":
            again = await scene.worker.recv_multipart()
        assert again[1:] == [b"add", msgspec.msgpack.encode((5,)), b"frame"]

    play(story, sink)


def test_a_slot_that_belayerd_gave_up_is_not_knocked_at() -> None:
    core = Core(Limits(slots=frozenset({"a"})))
    serve(core, "a", 0)
    core.step(ev.Torn("a", "a-0"), 1.0)
    core.step(ev.Add("r", FRAMES), 2.0)
    core.step(ev.GivenUp(frozenset({"a"})), 3.0)
    ended = core.step(ev.ConnectFailed("a", 0, "a-0", silent=True), 6.0)
    assert of(ended, ev.Connect) == []
    assert [one.code for one in ended if isinstance(one, ev.Fail)] == ["no_healthy_slot"]
