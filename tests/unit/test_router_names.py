"""Requests with a name: repeated, heard twice, taken up after their client or the router has gone. Wishes on death."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.errors import Refused, RequestUnknown
from belayerd.router import events as ev
from belayerd.router.archive import Archive
from belayerd.router.core import Core, Limits
from belayerd.router.journal import Journal
from belayerd.router.journal_reader import read
from belayerd.router.records import Past, Span
from belayerd.router.shell import to_record

FRAMES = (b"request",)


def serve(core: Core, slot: str = "a", generation: int = 0) -> list[ev.Effect]:
    worker_id = f"{slot}-{generation}"
    first = core.step(ev.Register(slot, generation, worker_id, "e"), 0.0)
    return first + core.step(ev.Ready(slot, generation, worker_id, 0), 0.0)


def add(core: Core, reader: str, name: str = "x", digest: bytes = b"d", position: int | None = None) -> list[ev.Effect]:
    event = ev.Add(reader, FRAMES, name=name, digest=digest, position=position, eager=True)
    return core.step(event, 0.0)


def out(core: Core, seq: int, *items: ev.Item, slot: str = "a", generation: int = 0) -> list[ev.Effect]:
    return core.step(ev.Outputs(slot, generation, f"{slot}-{generation}", seq, items), 0.0)


def of(effects: list[ev.Effect], kind: type[ev.Effect]) -> list[ev.Effect]:
    return [effect for effect in effects if type(effect) is kind]


def running() -> Core:
    core = Core(Limits())
    serve(core)
    add(core, "r1")
    out(core, 0, ev.Item("r1", (5, 6), row=b"row"))
    return core


def test_a_stream_with_a_name_is_on_disk_before_it_is_delivered() -> None:
    core = running()
    effects = out(core, 1, ev.Item("r1", (7,)))
    assert [type(effect) for effect in effects] == [ev.JournalTokens, ev.Deliver]


def test_a_repeated_id_hears_the_running_request_from_its_start_and_goes_on_with_it() -> None:
    core = running()
    assert add(core, "r2", position=1) == [ev.Replay("r2", (5, 6), ((0, b"row"),), (Span(0, "a", 0, ""),))]
    assert of(out(core, 1, ev.Item("r1", (7,))), ev.Deliver) == [ev.Deliver("r1", 0, False, ("r1", "r2"))]
    core.step(ev.Abort(("r1",)), 0.0)
    assert of(out(core, 2, ev.Item("r1", (8,), "stop")), ev.Deliver) == [ev.Deliver("r1", 0, False, ("r2",))]


def test_the_engine_is_freed_when_the_last_who_hears_leaves() -> None:
    core = running()
    add(core, "r2", position=0)
    assert core.step(ev.Abort(("r2",)), 0.0) == []
    assert of(core.step(ev.Abort(("r1",)), 0.0), ev.SendAbort) == [ev.SendAbort("a-0", ("r1",))]
    assert core.reader_of == {}


def test_the_same_id_at_once_is_refused_or_attached_as_configured() -> None:
    core = running()
    with pytest.raises(Refused, match="running already"):
        add(core, "r2")
    core.limits = Limits(same_id=ev.SameId.ATTACH)
    assert of(add(core, "r3"), ev.Replay)


def test_an_ended_request_is_told_without_an_engine() -> None:
    core = running()
    out(core, 1, ev.Item("r1", (7,), "length", 99))
    before = dict(core.slots["a"].running)
    (told,) = add(core, "r2", position=2)
    assert told == ev.Replay("r2", (5, 6, 7), ((0, b"row"),), (Span(0, "a", 0, ""),), "length", 99)
    assert core.slots["a"].running == before == {}
    assert core.requests == {}


def test_what_a_client_left_goes_on_where_it_was() -> None:
    core = running()
    core.step(ev.Abort(("r1",)), 0.0)
    effects = add(core, "r2", position=2)
    assert [type(effect) for effect in effects] == [ev.JournalAdd, ev.JournalTokens, ev.Replay, ev.SendAdd]
    assert effects[-1] == ev.SendAdd("a-0", "r2", FRAMES, (5, 6))


def test_a_text_that_a_stop_string_ended_is_whole() -> None:
    core = running()
    core.step(ev.Abort(("r1",), left=False), 0.0)
    (told,) = add(core, "r2", position=0)
    assert isinstance(told, ev.Replay)
    assert told.finish == "stop_string"


def test_unknown_ids_positions_and_contents_are_typed_errors_that_change_nothing() -> None:
    core = running()
    with pytest.raises(RequestUnknown, match="position 3"):
        add(core, "r2", position=3)
    with pytest.raises(RequestUnknown):
        add(core, "r2", name="y", position=0)
    with pytest.raises(RequestUnknown):
        add(core, "r2", name="", position=0)
    with pytest.raises(Refused, match="another content"):
        add(core, "r2", digest=b"other", position=0)
    out(core, 1, ev.Item("r1", (7,), "stop"))
    with pytest.raises(Refused, match="another content"):
        add(core, "r2", digest=b"other", position=0)
    assert (core.requests, core.reader_of, core.named) == ({}, {}, {})


@pytest.mark.parametrize("ended", [False, True])
def test_tokens_that_an_earlier_life_told_and_lost_are_never_taken_for_others(ended: bool) -> None:
    """A full disk, or a power cut: the client has more than is known after it. What the engine says instead are other
    tokens under the same positions."""
    core = Core(Limits())
    story = Past("r1", "", "x", b"d", FRAMES, (5, 6), (), (Span(0, "a", 0, ""),), "", eager=True)
    core.step(ev.Recover((story,)), 0.0)
    serve(core, "a", 1)
    out(core, 0, ev.Item("r1", (17, 18), "length" if ended else ""), generation=1)
    with pytest.raises(RequestUnknown, match="has 2 known tokens, position 4"):
        add(core, "r2", position=4)
    (told,) = of(add(core, "r2", position=2), ev.Replay)
    assert isinstance(told, ev.Replay)
    assert told.tokens == (5, 6, 17, 18)
    assert of(add(core, "r3", position=4), ev.Replay), "from here on somebody has heard them"


def test_an_id_without_a_position_is_a_new_request_once_the_old_one_has_ended() -> None:
    """Samples of one prompt under one id must never be copies of each other."""
    core = running()
    out(core, 1, ev.Item("r1", (7,), "stop"))
    assert of(add(core, "r2"), ev.SendAdd) == [ev.SendAdd("a-0", "r2", FRAMES, ())]


def test_the_archive_is_bounded_and_forgets_the_oldest() -> None:
    archive = Archive(4000)
    for number in range(10):
        archive.put(Past(f"r{number}", "", f"n{number}", b"", (b"f" * 500,), (1, 2), (), (), "stop"))
    assert archive.bytes <= 4000
    assert archive.get("n0") is None
    assert archive.get("n9") is not None
    archive.put(Past("big", "", "big", b"", (b"f" * 9000,), (), (), (), "stop"))
    assert (len(archive), archive.bytes) == (0, 0)


@pytest.mark.parametrize("wish", list(ev.OnDeath))
@pytest.mark.parametrize("by", ["request", "slot"])
def test_what_becomes_of_a_request_whose_worker_dies_is_its_wish(wish: ev.OnDeath, by: str) -> None:
    core = Core(Limits(on_death={"a": wish if by == "slot" else ev.OnDeath.RESUME}))
    serve(core)
    core.step(ev.Add("r", FRAMES, on_death=wish if by == "request" else None), 0.0)
    out(core, 0, ev.Item("r", (1,)))
    effects = core.step(ev.Unregister("a", 0), 0.0)
    match wish:
        case ev.OnDeath.RESUME:
            assert of(serve(core, "a", 1), ev.SendAdd)
        case ev.OnDeath.ABORT:
            assert of(effects, ev.Cut) == [ev.Cut(("r",))]
            assert of(effects, ev.JournalFinish) == [ev.JournalFinish("r", "cut", 1)]
        case ev.OnDeath.ERROR:
            (fail,) = of(effects, ev.Fail)
            assert isinstance(fail, ev.Fail)
            assert fail.code == "worker_gone"
    assert (core.requests == {}) is (wish is not ev.OnDeath.RESUME)


def test_a_planned_handover_asks_nobody_for_a_wish() -> None:
    core = Core(Limits())
    serve(core)
    core.step(ev.Add("r", FRAMES, on_death=ev.OnDeath.ERROR), 0.0)
    assert not of(core.step(ev.Unregister("a", 0, ev.Cause.PLANNED), 0.0), ev.Fail)


def test_weights_of_an_older_version_get_nothing_while_newer_ones_serve() -> None:
    core = Core(Limits())
    for slot, version in (("a", "3"), ("b", "4")):
        core.step(ev.Register(slot, 0, f"{slot}-0", "e", version), 0.0)
        core.step(ev.Ready(slot, 0, f"{slot}-0", 0), 0.0)
    for number in range(3):
        add(core, f"r{number}", name="")
    assert len(core.slots["b"].running) == 3
    core.step(ev.Beat("a", "a-0", 0, "4"), 0.0)
    add(core, "r9", name="")
    assert len(core.slots["a"].running) == 1


def test_a_request_from_the_url_of_a_slot_waits_for_that_slot() -> None:
    core = Core(Limits(home_s=5.0))
    serve(core, "a")
    core.step(ev.Add("r", FRAMES, pin="b"), 0.0)
    assert core.waiting == 1
    assert of(serve(core, "b"), ev.SendAdd)


# -- through the journal ---------------------------------------------------------------------------------------


class Life:
    """One life of a router: a core whose journal is a real folder."""

    def __init__(self, folder: Path, number: int, every: int) -> None:
        self.core = Core(Limits(journal_every=every))
        earlier = read(folder, named_only=True)
        assert earlier.damage == []
        live = lambda: [r for e in self.core.live_records() if (r := to_record(e)) is not None]  # noqa: E731
        self.book = Journal(folder, f"life{number}", 1 << 20, live)
        self.do(ev.Recover(tuple(story.past() for story in earlier.stories.values())))

    def do(self, event: ev.Event) -> list[ev.Effect]:
        effects = self.core.step(event, 0.0)
        self.book.append([record for effect in effects if (record := to_record(effect)) is not None])
        return effects


def test_after_a_restart_a_running_request_goes_on_and_its_client_finds_it(tmp_path: Path) -> None:
    one = Life(tmp_path, 1, every=4)
    serve(one.core)
    one.do(ev.Add("r1", FRAMES, "ext", name="x", digest=b"d", eager=True))
    one.do(ev.Add("nobody", FRAMES))
    for seq in range(5):
        one.do(ev.Outputs("a", 0, "a-0", seq, (ev.Item("r1", (seq,), row=b"%d" % seq), ev.Item("nobody", (9,)))))
    two = Life(tmp_path, 2, every=4)
    assert set(two.core.requests) == {"r1"}
    assert two.core.counters.recovered == 1
    serve(two.core, "b")
    assert two.core.waiting == 1, "it waits for its own slot"
    two.do(ev.Register("a", 0, "a-0", "e"))
    (given,) = of(two.do(ev.Ready("a", 0, "a-0", 17)), ev.SendAdd)
    assert given == ev.SendAdd("a-0", "r1", FRAMES, (0, 1, 2, 3, 4))
    (told,) = of(two.do(ev.Add("r2", FRAMES, name="x", digest=b"d", position=5)), ev.Replay)
    assert isinstance(told, ev.Replay)
    assert told.rows == tuple((n, b"%d" % n) for n in range(5))
    last = two.do(ev.Outputs("a", 0, "a-0", 17, (ev.Item("r1", (5,), "stop", 5),)))
    assert of(last, ev.Deliver) == [ev.Deliver("r1", 0, True, ("r2",))]
    three = Life(tmp_path, 3, every=4)
    (told,) = three.do(ev.Add("r3", FRAMES, name="x", digest=b"d", position=0))
    assert isinstance(told, ev.Replay)
    assert (told.tokens, told.finish, told.stop) == ((0, 1, 2, 3, 4, 5), "stop", 5)


def test_an_end_whose_block_was_lost_is_not_told_as_whole(tmp_path: Path) -> None:
    one = Life(tmp_path, 1, every=256)
    one.book.append([r for e in (
        ev.JournalAdd("r", "", FRAMES, "x", b"d"),
        ev.JournalTokens("r", 2, (3,), "a", 0, ""),
        ev.JournalFinish("r", "stop", 3),
    ) if (r := to_record(e)) is not None])  # fmt: skip
    past = Life(tmp_path, 2, every=256).core.archive.get("x")
    assert past is not None
    assert not past.whole


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_client_has_nothing_that_the_next_life_does_not_know(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Killed after any event, any number of times: what was delivered of a named stream is a prefix of what the next
    life gives the worker, and a client that comes back is told exactly its tokens."""
    folder = tmp_path_factory.mktemp("journal")
    delivered: list[int] = []
    for number in range(data.draw(st.integers(2, 4))):
        life = Life(folder, number, every=3)
        life.do(ev.Register("a", number, f"a-{number}", "e"))
        given = of(life.do(ev.Ready("a", number, f"a-{number}", 0)), ev.SendAdd)
        if number == 0:
            given = of(life.do(ev.Add("r", FRAMES, name="x", digest=b"d", eager=True)), ev.SendAdd)
        else:
            again = life.do(ev.Add(f"r{number}", FRAMES, name="x", digest=b"d", position=len(delivered)))
            (told,) = of(again, ev.Replay)
            assert isinstance(told, ev.Replay)
            assert list(told.tokens[: len(delivered)]) == delivered
            delivered = list(told.tokens)
        (start,) = given
        assert isinstance(start, ev.SendAdd)
        assert list(start.prefix) == delivered
        for seq in range(data.draw(st.integers(0, 6))):
            fresh = data.draw(st.integers(0, 99))
            event = ev.Outputs("a", number, f"a-{number}", seq, (ev.Item("r", (fresh,)),))
            if of(life.do(event), ev.Deliver):
                delivered.append(fresh)
