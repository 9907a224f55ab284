"""What a host makes of its peers, and what a peer may do here: every rule without a network."""

from __future__ import annotations

import msgspec
import pytest

from belayer.errors import ErrorCode, Fenced, Refused
from belayer.messages.fleet import Greeting, Life, RemoteSlot, Slots
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.fleet_core import PEER_NEXT, Bounds, Fit, FleetCore, PeerState
from belayerd.router.fleet_guests import Guests
from belayerd.router.records import SlotState

OLD, NEW = Life(number=10, nonce="a"), Life(number=11, nonce="b")
SLOT = RemoteSlot(slot="s0", generation=3, state="serving", model="m", fingerprint="f", max_model_len=100, capacity=2)
UP = {"b/s0": SlotState.SERVING}


def peers() -> FleetCore:
    return FleetCore({"b": "10.0.0.2:1"}, Fit("m", "f", 100), Bounds(slow_s=1.0, lost_s=5.0))


def answer(fleet: FleetCore, at: float, life: Life = OLD, *slots: RemoteSlot, took: float = 0.1, host: str = "b",
           standing: dict[str, SlotState] = UP) -> list[ev.Event]:  # fmt: skip
    number = fleet.ask("b", at)
    return fleet.answered("b", Slots(host=host, life=life, number=number, slots=slots), at + took, standing)


def changed(**more: object) -> RemoteSlot:
    return msgspec.structs.replace(SLOT, **more)


def linked() -> FleetCore:
    fleet = peers()
    told = answer(fleet, 0.0, OLD, SLOT, standing={})
    assert [type(event) for event in told] == [ev.Register, ev.Offer]
    return fleet


def test_each_link_has_an_epoch_of_its_own() -> None:
    fleet = linked()
    again = answer(fleet, 1.0, OLD, SLOT, standing={"b/s0": SlotState.EMPTY})
    register = again[0]
    assert isinstance(register, ev.Register)
    assert (register.generation, register.worker_id) == (2, "b/s0#2")


def test_a_silent_peer_is_slow_then_lost_and_its_slot_goes() -> None:
    fleet = linked()
    assert fleet.tick(0.9, UP) == []
    assert [event.open for event in fleet.tick(1.2, UP) if isinstance(event, ev.Offer)] == [False]
    assert fleet.tick(5.2, UP) == [ev.Unregister("b/s0", 1, ev.Cause.HOST_LOST, removed=True)]
    assert fleet.peers["b"].state is PeerState.SILENT


@pytest.mark.parametrize("first", ["a tick", "an answer"])
def test_silence_of_peers_counts_only_while_we_listened(first: str) -> None:
    """This host stood still for an hour (SIGSTOP, a paused VM). All answers wait unread when it wakes."""
    fleet = FleetCore({"b": "10.0.0.2:1"}, Fit("m", "f", 100), Bounds(slow_s=1.0, lost_s=5.0, gap_s=0.8))
    answer(fleet, 0.0, OLD, SLOT, standing={})
    assert fleet.tick(0.5, UP) == []
    if first == "a tick":
        told = fleet.tick(3600.0, UP)
        assert not [event for event in told if isinstance(event, ev.Unregister)]
    told = answer(fleet, 3600.0, OLD, SLOT)
    assert [type(event) for event in told] == [ev.Offer]
    assert fleet.peers["b"].state is PeerState.UP
    late = [event for beat in range(1, 13) for event in fleet.tick(3600.0 + beat / 2, UP)]
    assert late[-1] == ev.Unregister("b/s0", 1, ev.Cause.HOST_LOST, removed=True), "and then it is lost in its time"
    assert [type(event) for event in late] == [ev.Offer, ev.Unregister]


def test_what_an_answer_says_grows_old_while_we_stand_still() -> None:
    fleet = FleetCore({"b": "10.0.0.2:1"}, Fit("m", "f", 100), Bounds(slow_s=1.0, lost_s=5.0, gap_s=0.8))
    assert answer(fleet, 0.0, OLD, SLOT, took=60.0) == []
    assert (fleet.stale, fleet.peers["b"].state) == (1, PeerState.SILENT)


def test_an_answer_after_its_deadline_says_nothing() -> None:
    fleet = linked()
    fleet.tick(6.0, UP)
    assert answer(fleet, 6.0, OLD, SLOT, took=5.0) == []
    assert (fleet.stale, fleet.peers["b"].state) == (1, PeerState.SILENT)


@pytest.mark.parametrize(
    ("life", "host"), [(Life(number=9, nonce="z"), "b"), (Life(number=10, nonce="z"), "b"), (NEW, "c")]
)
def test_an_earlier_life_a_twin_or_another_host_is_fenced(life: Life, host: str) -> None:
    fleet = linked()
    told = answer(fleet, 1.0, life, SLOT, host=host)
    assert told == [ev.Unregister("b/s0", 1, ev.Cause.HOST_LOST, removed=True)]
    assert fleet.peers["b"].state is PeerState.FENCED


def test_a_later_life_begins_anew() -> None:
    told = answer(linked(), 1.0, NEW, changed(generation=1))
    assert [type(event) for event in told] == [ev.Unregister, ev.Register, ev.Offer]


@pytest.mark.parametrize(
    "slot",
    [changed(generation=2), changed(model="n"), changed(fingerprint="g"), changed(max_model_len=99)],
    ids=["old generation", "other model", "other files", "smaller context"],
)
def test_a_slot_that_does_not_fit_is_let_go(slot: RemoteSlot) -> None:
    fleet = linked()
    assert answer(fleet, 1.0, OLD, slot) == [ev.Unregister("b/s0", 1, ev.Cause.HOST_LOST, removed=True)]
    assert "s0" in fleet.peers["b"].why


def test_a_slot_between_two_workers_keeps_its_link_and_gets_nothing_new() -> None:
    told = answer(linked(), 1.0, OLD, changed(state="empty"))
    assert told == [ev.Offer("b/s0", False, 0, 2, "")]


def test_the_table_of_peers_is_total() -> None:
    assert set(PEER_NEXT) == set(PeerState)


# -- placement: a remote slot in the router's core ------------------------------------------------------------


def core_with(*slots: tuple[str, bool]) -> Core:
    core = Core(Limits(capacity={"s0": 1}))
    for name, remote in slots:
        core.step(ev.Register(name, 1, name, "x", "1", "m", remote), 0.0)
        core.step(ev.Ready(name, 1, name, 0), 0.0)
        if remote:
            core.step(ev.Offer(name, True, 0, 1), 0.0)
    return core


def to(effects: list[ev.Effect]) -> list[str]:
    return [effect.worker_id for effect in effects if isinstance(effect, ev.SendAdd)]


def test_here_while_there_is_room_then_there_then_here() -> None:
    core = core_with(("s0", False), ("b/s0", True))
    assert [to(core.step(ev.Add(f"r{n}", (b"x",)), 0.0)) for n in range(3)] == [["s0"], ["b/s0"], ["s0"]]


def test_a_forwarded_request_is_never_forwarded_again() -> None:
    core = core_with(("b/s0", True))
    assert to(core.step(ev.Add("r", (b"x",), origin="c"), 0.0)) == []


def test_only_the_next_position_counts() -> None:
    core = core_with(("b/s0", True))
    core.step(ev.Add("r", (b"x",)), 0.0)

    def out(seq: int, *items: ev.Item) -> list[ev.Effect]:
        return core.step(ev.Outputs("b/s0", 1, "b/s0", seq, items, "", ("b/s0", 7)), 0.0)

    assert any(isinstance(effect, ev.Deliver) for effect in out(0, ev.Item("r", (1, 2), start=0)))
    doubled = out(1, ev.Item("r", (3,), start=2), ev.Item("r", (3,), start=2))
    assert not any(isinstance(effect, ev.Deliver) for effect in doubled)
    assert core.requests["r"].tokens == [1, 2]
    assert core.requests["r"].spans[-1][1:3] == ("b/s0", 7)
    assert core.counters.torn_links == 1


@pytest.mark.parametrize("code", [ErrorCode.POISON_REQUEST, ErrorCode.WORKER_GONE])
def test_a_final_word_of_another_host_ends_the_request(code: ErrorCode) -> None:
    core = core_with(("b/s0", True))
    core.step(ev.Add("r", (b"x",)), 0.0)
    out = core.step(ev.HandedBack("b/s0", 1, "b/s0", 0, "r", code, "why"), 0.0)
    assert [effect.code for effect in out if isinstance(effect, ev.Fail)] == [code]


def test_a_request_that_comes_back_is_given_to_others_a_bounded_number_of_times() -> None:
    core = core_with(("b/s0", True), ("c/s0", True))
    core.step(ev.Add("r", (b"x",)), 0.0)
    given, failed = ["b/s0"], []
    for seq in range(4):
        if "r" not in core.requests:
            break
        name = core.requests["r"].slot
        number = core.slots[name].next_seq or 0
        out = core.step(ev.HandedBack(name, 1, name, number, "r", ErrorCode.NO_HEALTHY_SLOT, "full"), float(seq))
        given += to(out)
        failed += [effect.code for effect in out if isinstance(effect, ev.Fail)]
    assert (given, failed) == (["b/s0", "c/s0", "b/s0"], [ErrorCode.NO_HEALTHY_SLOT])


def test_a_lost_host_gives_its_requests_to_others_with_their_tokens() -> None:
    core = core_with(("b/s0", True), ("c/s0", True))
    core.step(ev.Add("r", (b"x",)), 0.0)
    core.step(ev.Outputs("b/s0", 1, "b/s0", 0, (ev.Item("r", (1, 2), start=0),)), 0.0)
    out = core.step(ev.Unregister("b/s0", 1, ev.Cause.HOST_LOST, removed=True), 1.0)
    assert [(one.worker_id, one.prefix) for one in out if isinstance(one, ev.SendAdd)] == [("c/s0", (1, 2))]
    assert core.step(ev.Outputs("b/s0", 1, "b/s0", 1, (ev.Item("r", (3,), start=2),)), 1.0) == []
    assert core.counters.late_messages == 1


# -- weights: between hosts nothing falls back to older ones (promise R4) --------------------------------------


def weighed(**versions: str) -> Core:
    """Slots that serve these weights: ``b_s0`` is host b's, ``s0`` this one's."""
    core = Core(Limits(capacity={"s0": 1}))
    for name, version in versions.items():
        join(core, name.replace("_", "/"), version)
    return core


def join(core: Core, name: str, version: str, generation: int = 1) -> list[ev.Effect]:
    remote = "/" in name
    core.step(ev.Register(name, generation, name, "x", version, "m", remote), 0.0)
    out = core.step(ev.Ready(name, generation, name, 0), 0.0)
    return out + (core.step(ev.Offer(name, True, 0, 1, version), 0.0) if remote else [])


def started(core: Core, on: str, version: str = "") -> None:
    assert to(core.step(ev.Add("r", (b"x",)), 0.0)) == [on]
    core.step(ev.Outputs(on, 1, on, 0, (ev.Item("r", (1, 2), start=0),), version), 0.0)


def lose(core: Core, name: str, generation: int = 1) -> list[ev.Effect]:
    return core.step(ev.Unregister(name, generation, ev.Cause.HOST_LOST, removed=True), 1.0)


FALLS = [("2", "1", False), ("1", "1", True), ("1", "2", True), ("9", "10", True), ("10", "9", False),
         ("blue", "blue", True), ("blue", "red", False), ("blue", "3", False), ("3", "blue", False)]  # fmt: skip


@pytest.mark.parametrize(("had", "other", "goes_on"), FALLS)
@pytest.mark.parametrize(
    ("first", "second"), [("s0", "b/s0"), ("b/s0", "s0"), ("b/s0", "c/s0")], ids=["to remote", "to own", "to a third"]
)
def test_tokens_go_on_elsewhere_only_with_weights_that_are_not_older(
    first: str, second: str, had: str, other: str, goes_on: bool
) -> None:
    core = Core(Limits())
    join(core, first, had)
    started(core, first)
    join(core, second, other)
    assert to(lose(core, first)) == ([second] if goes_on else [])


def test_a_request_that_waits_for_weights_gets_them_or_a_named_error() -> None:
    for update in (ev.Beat("b/s0", "b/s0", 0, "2"), ev.Offer("b/s0", True, 0, 1, "2")):
        core = weighed(s0="2", b_s0="1")
        started(core, "s0")
        assert to(lose(core, "s0")) == []
        assert to(core.step(update, 2.0)) == ["b/s0"]
    core = weighed(s0="2", b_s0="1")
    started(core, "s0")
    lose(core, "s0")
    (failed,) = [one for one in core.step(ev.Tick(), 1.0 + 120.0) if isinstance(one, ev.Fail)]
    assert failed.code == ErrorCode.NO_HEALTHY_SLOT
    assert "its tokens are of weights 2, and b/s0 serves 1" in failed.message


def test_a_slot_that_comes_back_older_does_not_go_on_and_holds_nothing_up() -> None:
    core = weighed(b_s0="2", c_s0="1")
    started(core, "b/s0", "2")
    lose(core, "b/s0")
    assert to(join(core, "b/s0", "1", 2)) == []
    assert to(join(core, "d/s0", "2")) == ["d/s0"]


@pytest.mark.parametrize(
    ("own", "other", "used"),
    [("2", "1", False), ("2", "2", True), ("1", "2", True), ("blue", "red", False), ("blue", "blue", True),
     ("2", "blue", False), ("blue", "2", False)],
)  # fmt: skip
@pytest.mark.parametrize("away", ["full", "quarantined", "between workers"])
def test_a_new_request_never_gets_weights_older_than_this_host_had(own: str, other: str, used: bool, away: str) -> None:
    core = weighed(s0=own, b_s0=other)
    if away == "full":
        assert to(core.step(ev.Add("first", (b"x",)), 0.0)) == ["s0"]
    else:
        core.step(ev.Unregister("s0", 1, ev.Cause.DIED, removed=away == "quarantined"), 0.0)
    expected = ["b/s0"] if used else (["s0"] if away == "full" else [])
    assert to(core.step(ev.Add("r", (b"x",)), 0.0)) == expected
    if not expected:
        failed = [one for one in core.step(ev.Tick(), 120.0) if isinstance(one, ev.Fail)]
        assert f"this host had weights {own}, and b/s0 serves {other}" in failed[0].message


def test_a_host_that_never_had_weights_takes_what_there_is() -> None:
    assert to(weighed(b_s0="1").step(ev.Add("r", (b"x",)), 0.0)) == ["b/s0"]


def test_a_guest_is_continued_here_only_with_weights_that_are_not_older() -> None:
    """Its host learned of our weights a moment ago; what counts is what they are now."""
    for version, goes_on in (("1", False), ("2", True), ("3", True)):
        core = weighed(s0=version)
        guest = ev.Add("r", (b"x",), pin="s0", origin="c", prefix=(1, 2), prefix_version="2")
        assert to(core.step(guest, 0.0)) == (["s0"] if goes_on else [])


def test_the_weights_of_the_tokens_go_along_to_another_host() -> None:
    core = weighed(s0="2")
    started(core, "s0")
    join(core, "b/s0", "3")
    (given,) = [one for one in lose(core, "s0") if isinstance(one, ev.SendAdd)]
    assert (given.prefix, given.prefix_version) == ((1, 2), "2")


def test_status_says_why_a_slot_gets_nothing_new() -> None:
    core = weighed(s0="2", b_s0="1", c_s0="2")
    assert core.unused("b/s0") == "weights 1, this host had 2"
    assert (core.unused("c/s0"), core.unused("d/s0")) == ("", "not linked")
    core.step(ev.Offer("c/s0", True, 1, 1), 0.0)
    assert core.unused("c/s0") == "full"
    core.step(ev.Offer("c/s0", False, 0, 1), 0.0)
    assert core.unused("c/s0") == "its host lets nothing new in"


def test_a_silence_that_is_shown_grows() -> None:
    fleet = linked()
    fleet.tick(6.0, UP)
    peer = fleet.peers["b"]
    assert [fleet.why(peer, at) for at in (6.1, 60.1)] == ["no answer for 6.0 s", "no answer for 60.0 s"]


# -- weights: the same version is the same bytes, or it is not used -------------------------------------------


def of_bytes(core: Core, name: str, version: str, digest: str, generation: int = 1) -> list[ev.Effect]:
    """The slot joins, or says what it serves now."""
    if name not in core.slots or core.slots[name].generation < generation:
        join(core, name, version, generation)
    if "/" in name:
        return core.step(ev.Offer(name, True, 0, 1, version, digest), 0.0)
    return core.step(ev.Beat(name, name, core.slots[name].next_seq or 0, version, digest), 0.0)


@pytest.mark.parametrize(
    ("version", "digest", "used"), [("2", "aaaa", True), ("2", "bbbb", False), ("2", "", False), ("3", "bbbb", True)]
)
def test_a_new_request_never_gets_other_bytes_under_the_same_version(version: str, digest: str, used: bool) -> None:
    core = Core(Limits(capacity={"s0": 1}))
    of_bytes(core, "s0", "2", "aaaa")
    of_bytes(core, "b/s0", version, digest)
    core.step(ev.Unregister("s0", 1, ev.Cause.DIED), 0.0)
    assert to(core.step(ev.Add("r", (b"x",)), 0.0)) == (["b/s0"] if used else [])
    assert ("other bytes" in core.unused("b/s0")) is not used
    if not used:
        (failed,) = [one for one in core.step(ev.Tick(), 120.0) if isinstance(one, ev.Fail)]
        assert "b/s0 serves weights 2 of other bytes" in failed.message
        assert "s0: aaaa" in failed.message


@pytest.mark.parametrize("digest", ["aaaa", "bbbb"])
@pytest.mark.parametrize(
    ("first", "second"), [("s0", "b/s0"), ("b/s0", "s0"), ("b/s0", "c/s0")], ids=["to remote", "to own", "to a third"]
)
def test_tokens_go_on_elsewhere_only_with_the_same_bytes(first: str, second: str, digest: str) -> None:
    core = Core(Limits())
    of_bytes(core, first, "2", "aaaa")
    started(core, first, "2")
    of_bytes(core, second, "2", digest)
    assert to(lose(core, first)) == ([second] if digest == "aaaa" else [])
    if digest != "aaaa":
        assert to(of_bytes(core, second, "2", "aaaa")) == [second], "once they are the same, it goes on"


def test_the_first_outputs_of_a_new_version_wait_for_its_digest() -> None:
    """Outputs name the version and no digest: what was known of the version before is no digest of this one."""
    core = Core(Limits(capacity={"s0": 1}))
    of_bytes(core, "s0", "2", "aaaa")
    started(core, "s0", "3")
    assert core.slots["s0"].weights_digest == ""
    of_bytes(core, "s0", "3", "cccc")
    core.step(ev.Outputs("s0", 1, "s0", 1, (ev.Item("r", (3,), start=2),), "3"), 0.0)
    assert core.slots["s0"].weights_digest == "cccc"


def test_within_a_host_its_own_updates_decide() -> None:
    core = weighed(s0="2")
    started(core, "s0")
    join(core, "s1", "1")
    assert to(lose(core, "s0")) == ["s1"]


# -- guests ---------------------------------------------------------------------------------------------------


def greeting(epoch: int = 1, life: Life = OLD) -> Greeting:
    return Greeting(slot="s0", life=life, front=0, stamp="b/s0", worker_id="w", epoch=epoch)


def test_a_new_link_ends_what_ran_for_the_old_one_and_old_ones_are_fenced() -> None:
    guests = Guests(orphan_s=4.0)
    link, ended = guests.greet("a", greeting(2), b"t1", b"r1", 0.0)
    assert ended == []
    assert guests.come(link, "r", 0) is False
    _, ended = guests.greet("a", greeting(3), b"t2", b"r2", 0.0)
    assert ended == ["r"]
    with pytest.raises(Fenced):
        guests.greet("a", greeting(2), b"t1", b"r1", 0.0)
    with pytest.raises(Fenced):
        guests.greet("a", greeting(9, Life(number=9, nonce="z")), b"t3", b"r3", 0.0)
    assert guests.by_route(b"r1") is None


def test_guests_are_no_orphans_while_we_stood_still() -> None:
    for wakes_by_hello in (True, False):
        guests = Guests(orphan_s=4.0, gap_s=1.0)
        link, _ = guests.greet("a", greeting(), b"t1", b"r1", 0.0)
        guests.come(link, "r", 0)
        assert guests.silent(0.5) == []
        if wakes_by_hello:
            guests.greet("a", greeting(), b"t1", b"r1", 3600.0)
        assert guests.silent(3600.0) == []
        assert [bool(guests.silent(3600.0 + beat)) for beat in (1, 2, 3, 4)] == [False, False, not wakes_by_hello, True]


def test_positions_are_counted_and_a_late_abort_of_an_earlier_link_ends_nothing() -> None:
    guests = Guests(orphan_s=4.0)
    first, _ = guests.greet("a", greeting(), b"t1", b"r1", 0.0)
    second, _ = guests.greet("a", msgspec.structs.replace(greeting(), slot="s1"), b"t2", b"r2", 0.0)
    guests.come(first, "r", 5)
    assert guests.took("r", 2) == (first, 5)
    assert guests.come(second, "r", 7) is True
    assert guests.go(first, ["r"]) == []
    assert guests.took("r", 1) == (second, 7)
    other, _ = guests.greet("c", greeting(), b"t3", b"r3", 0.0)
    with pytest.raises(Refused):
        guests.come(other, "r", 0)
    assert guests.silent(4.0) == [first, second, other]
    assert guests.leave(second) == ["r"]
    assert len(guests) == 0
