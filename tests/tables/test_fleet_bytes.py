"""Tokens that one host's weights made go on with the same bytes or a newer version, and whoever gets them looks: by the
digest that came with them, not by what their slot happens to serve now (promise R4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer.errors import Refused
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.journal import Journal
from belayerd.router.journal_reader import read
from belayerd.router.records import SlotState
from belayerd.router.shell import to_record
from tests.tables.test_fleet import lose, of_bytes, started, to


def guest(digest: str, version: str = "2", pin: str = "s0") -> ev.Add:
    """A request of host c, with two tokens."""
    prefix = {"prefix": (1, 2), "prefix_version": version, "prefix_digest": digest}
    return ev.Add("r", (b"x",), external_id="c:r", pin=pin, origin="c", **prefix)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("had", "digest", "goes_on"),
    [("2", "aaaa", True), ("2", "bbbb", False), ("2", "", False), ("1", "bbbb", True), ("1", "", True)],
    ids=["the same", "others", "unknown ones", "older ones", "older unknown ones"],
)
def test_the_host_that_gets_tokens_looks_at_the_bytes_that_made_them(had: str, digest: str, goes_on: bool) -> None:
    core = Core(Limits())
    of_bytes(core, "s0", "2", "aaaa")
    if goes_on:
        assert to(core.step(guest(digest, had), 0.0)) == ["s0"]
        return
    with pytest.raises(Refused, match=r"cannot go on here: weights 2 of other bytes \(digest aaaa"):
        core.step(guest(digest, had), 0.0)
    assert core.requests == {}, "it is its own host's again, at once"


def test_a_guest_goes_to_the_slot_of_this_host_that_has_its_bytes() -> None:
    """In the middle of an update: the slot that it was sent to has others by now, its neighbour has them."""
    core = Core(Limits(home_s=5.0))
    of_bytes(core, "s0", "2", "bbbb")
    of_bytes(core, "s1", "2", "aaaa")
    assert to(core.step(guest("aaaa"), 0.0)) == ["s1"]


def test_a_guest_waits_while_nobody_serves() -> None:
    core = Core(Limits())
    of_bytes(core, "s0", "2", "bbbb")
    core.step(ev.Unregister("s0", 1), 0.0)
    assert core.step(guest("aaaa"), 0.0)
    assert core.waiting == 1, "its next worker may serve newer weights"


@pytest.mark.parametrize(("digest", "goes_on"), [("aaaa", True), ("bbbb", False), ("", False)])
def test_what_made_the_tokens_counts_and_not_what_their_slot_serves_now(digest: str, goes_on: bool) -> None:
    core = Core(Limits())
    of_bytes(core, "s0", "2", "aaaa")
    started(core, "s0", "2")
    of_bytes(core, "s0", "3", "cccc")
    lose(core, "s0")
    of_bytes(core, "c/s0", "2", digest)
    core.step(ev.Tick(), 1.0)
    request = core.requests["r"]
    assert (request.slot == "c/s0" and request.state == "running") is goes_on


def test_the_digest_goes_along_also_when_it_is_told_after_the_tokens() -> None:
    """Outputs name a new version before the worker is asked for its digest."""
    core = Core(Limits())
    of_bytes(core, "s0", "2", "aaaa")
    started(core, "s0", "3")
    assert core.requests["r"].spans[-1].weights_digest == ""
    of_bytes(core, "s0", "3", "cccc")
    lose(core, "s0")
    (given,) = [one for one in of_bytes(core, "b/s0", "3", "cccc") if isinstance(one, ev.SendAdd)]
    assert (given.prefix_version, given.prefix_digest) == ("3", "cccc")


def test_a_router_that_returns_knows_the_bytes(tmp_path: Path) -> None:
    core, book = Core(Limits()), Journal(tmp_path, "t", 1 << 20, list)
    of_bytes(core, "s0", "2", "aaaa")
    event = ev.Add("r", (b"x",), name="mine", digest=b"d", eager=True)
    effects = core.step(event, 0.0)
    effects += core.step(ev.Outputs("s0", 1, "s0", 0, (ev.Item("r", (1, 2)),), "2"), 0.0)
    book.append([record for effect in effects if (record := to_record(effect)) is not None])
    book.close()
    later = Core(Limits())
    later.step(ev.Recover(tuple(story.past() for story in read(tmp_path).stories.values())), 0.0)
    assert later.requests["r"].spans[-1][1:] == ("s0", 1, "2", "aaaa")
    later.step(ev.Unregister("s0", 5, removed=True), 0.0)
    of_bytes(later, "b/s0", "2", "bbbb")
    assert later.requests["r"].state == "waiting"
    assert to(of_bytes(later, "c/s0", "2", "aaaa")) == ["c/s0"]
    assert later.slots["b/s0"].state is SlotState.SERVING
