"""Garbage collection plans nothing that must stay, no more than is needed, and in the promised order (promise E8)."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from envkeeper.budget import Entry, Limits, Plan, plan

NOW = 1000.0


def entry(sandbox: str, number: int, **more: object) -> Entry:
    plain = Entry(
        sandbox_id=sandbox,
        checkpoint_id=f"{sandbox}-k{number}",
        nbytes=10,
        made_at=float(number),
        ready=False,
        live=True,
        claimed=False,
    )
    return replace(plain, **more)  # type: ignore[arg-type]


@st.composite
def stores(draw: st.DrawFn) -> list[Entry]:
    """Up to five sandboxes, each with at most one READY; forks share a checkpoint (and its size) with the first."""
    out: list[Entry] = []
    for number in range(draw(st.integers(0, 5))):
        name, live, count = f"s{number}", draw(st.booleans()), draw(st.integers(0, 6))
        ready = draw(st.integers(-1, max(0, count - 1)))
        for k in range(count):
            made, size, claimed = float(draw(st.integers(0, int(NOW)))), draw(st.integers(0, 50)), draw(st.booleans())
            more = {"made_at": made, "nbytes": size, "claimed": claimed}
            out.append(entry(name, k, ready=k == ready, live=live, **more))
    forked = draw(st.sampled_from(["", "live", "ended"]))
    if out and forked:
        out.append(replace(out[0], sandbox_id="fork", ready=True, live=forked == "live", claimed=False))
    return out


limits = st.builds(
    lambda high, low, ttl, keep: Limits(high=high, low=min(low, high), ttl_s=float(ttl), keep=keep),
    st.integers(0, 300),
    st.integers(0, 300),
    st.sampled_from([0, 1, 500]),
    st.integers(1, 5),
)


def used(entries: list[Entry]) -> int:
    return sum({e.checkpoint_id: e.nbytes for e in entries}.values())


def rest(entries: list[Entry], found: Plan) -> list[Entry]:
    return [e for e in entries if e not in found.delete]


@settings(deadline=None)
@given(stores(), limits, st.integers(0, 100))
def test_what_must_stay_stays_and_the_books_are_right(entries: list[Entry], limit: Limits, incoming: int) -> None:
    found = plan(entries, NOW, limit, incoming)
    assert len(set(found.delete)) == len(found.delete)
    assert not [e for e in found.delete if e.claimed or (e.ready and e.live)]
    left = rest(entries, found)
    assert found.used == used(left)
    assert found.fits == (not limit.high or used(left) + incoming <= limit.high)
    if not found.fits:
        assert all(e.kept for e in left), "everything that may go has gone before a refusal"


@settings(deadline=None)
@given(stores(), limits, st.integers(0, 100))
def test_it_is_stable_and_knows_no_order_of_its_input(entries: list[Entry], limit: Limits, incoming: int) -> None:
    found = plan(entries, NOW, limit, incoming)
    assert plan(reversed(entries), NOW, limit, incoming) == found
    again = plan(rest(entries, found), NOW, limit, incoming)
    assert again.delete == ()
    assert (again.used, again.fits) == (found.used, found.fits)


@settings(deadline=None)
@given(stores(), st.integers(1, 300), st.integers(0, 100))
def test_no_more_goes_than_is_needed(entries: list[Entry], high: int, incoming: int) -> None:
    limit = Limits(high=high, low=high, keep=100)
    found = plan(entries, NOW, limit, incoming)
    if found.delete:
        without_last = [e for e in entries if e not in found.delete[:-1]]
        assert used(without_last) + incoming > high


@settings(deadline=None)
@given(stores(), limits)
def test_nothing_expired_is_left_and_without_limits_only_keep_counts(entries: list[Entry], limit: Limits) -> None:
    left = rest(entries, plan(entries, NOW, limit))
    if limit.ttl_s:
        assert not [e for e in left if NOW - e.made_at > limit.ttl_s and not e.kept]
    for name in {e.sandbox_id for e in left}:
        mine = [e for e in left if e.sandbox_id == name]
        assert len(mine) <= max(limit.keep, sum(e.kept or e.ready for e in mine))


def test_older_states_go_before_the_last_state_of_an_ended_sandbox() -> None:
    ended = [entry("a", 1, live=False), entry("a", 2, live=False, ready=True)]
    lives = [entry("b", 3), entry("b", 4, ready=True)]
    found = plan([*ended, *lives], NOW, Limits(high=35, low=10))
    assert [e.checkpoint_id for e in found.delete] == ["a-k1", "b-k3", "a-k2"]
    assert found.used == 10
    assert found.fits


def test_above_high_room_is_made_down_to_low_and_not_before() -> None:
    rows = [*(entry("a", n) for n in range(1, 9)), entry("a", 9, ready=True)]
    assert plan(rows, NOW, Limits(high=90, low=40, keep=100)).delete == ()
    assert len(plan(rows, NOW, Limits(high=90, low=40, keep=100), incoming=1).delete) == 6


def test_shared_bytes_are_freed_with_their_last_holder() -> None:
    source = entry("a", 1, live=False, ready=True, nbytes=100)
    forks = [replace(source, sandbox_id=name, live=True) for name in ("f1", "f2")]
    found = plan([source, *forks], NOW, Limits(high=50, low=50))
    assert [e.sandbox_id for e in found.delete] == ["a"]
    assert (found.used, found.fits) == (100, False)
    ended = [replace(e, live=False) for e in forks]
    assert plan([source, *ended], NOW, Limits(high=50, low=50)).used == 0


def test_a_rewound_ready_is_kept_although_it_is_the_oldest() -> None:
    rows = [entry("a", 1, ready=True), *(entry("a", n) for n in range(2, 6))]
    assert [e.checkpoint_id for e in plan(rows, NOW, Limits(keep=2)).delete] == ["a-k2", "a-k3", "a-k4"]
