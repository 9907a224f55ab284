"""The owner's tables are total, and no order of events gives an arena two holders (promise R1)."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import BelayerError, Fenced, LeaseRefused, Refused, WeightsTorn
from gpuowner import core
from gpuowner.core import ArenaState as A
from gpuowner.core import WeightsState as W

HERE = core.Stamp(owner=1, count=3)
NEXT = core.Stamp(owner=1, count=2)
NOW = core.Stamp(owner=1, count=1)
SAMPLES: dict[type, object] = {
    core.Acquire: core.Acquire(HERE, peer=1, who="w"),
    core.Reclaimed: core.Reclaimed(HERE, peer=1, same=True),
    core.HolderDied: core.HolderDied(peer=1),
    core.FenceBegun: core.FenceBegun(HERE),
    core.FenceEnded: core.FenceEnded(HERE, holder_alive=False),
    core.Quarantined: core.Quarantined(HERE, reason="not dead in time"),
    core.Restored: core.Restored(HERE, holder_alive=False),
    core.ArenaAdopted: core.ArenaAdopted(owner=2, holder_alive=True),
    core.Built: core.Built(version=1),
    core.BuildFailed: core.BuildFailed(reason="truncated"),
    core.UpdateBegun: core.UpdateBegun(NOW, peer=1, in_place=False, rewrite=True),
    core.CommitAsked: core.CommitAsked(NEXT, peer=1),
    core.Committed: core.Committed(version=2),
    core.Mismatched: core.Mismatched(reason="chunk 3"),
    core.Aborted: core.Aborted(NEXT, peer=1, touched=True),
    core.WriterDied: core.WriterDied(peer=1),
    core.RebuildBegun: core.RebuildBegun(NOW),
    core.WeightsAdopted: core.WeightsAdopted(owner=2, intact=True),
    core.SiblingTorn: core.SiblingTorn(version=1, reason="rank 1"),
}
COMMITTING = (core.Committed, core.Mismatched)  # come after the writer has let go


def test_tables_are_total() -> None:
    assert set(core.ARENA_TABLE) == set(itertools.product(A, get_args(core.ArenaEvent)))
    assert set(core.WEIGHTS_TABLE) == set(itertools.product(W, get_args(core.WeightsEvent)))
    for cell in [*core.ARENA_TABLE.values(), *core.WEIGHTS_TABLE.values()]:
        assert bool(cell.to) != bool(cell.why), "a cell either leads somewhere or says why not"


@pytest.mark.parametrize(("state", "event"), list(core.ARENA_TABLE))
def test_each_arena_cell_does_what_it_says(state: A, event: type) -> None:
    holder = {} if state is A.FREE else {"peer": 1, "who": "w"}
    before = core.Arena("slot0", 4096, state=state, epoch=3, **holder)
    cell = core.ARENA_TABLE[state, event]
    if not cell.to:
        with pytest.raises(LeaseRefused if event in (core.Acquire, core.Reclaimed) else Refused, match="epoch 3"):
            core.arena_step(before, SAMPLES[event])
    else:
        assert core.arena_step(before, SAMPLES[event]).state in cell.to


@pytest.mark.parametrize(("state", "event"), list(core.WEIGHTS_TABLE))
def test_each_weights_cell_does_what_it_says(state: W, event: type) -> None:
    writer = 1 if state is W.UPDATING and event not in COMMITTING else None
    before = core.Weights("m", 4096, state=state, version=1, whole=state is W.SEALED, peer=writer)
    cell = core.WEIGHTS_TABLE[state, event]
    if not cell.to:
        with pytest.raises(WeightsTorn if state is W.TORN else Refused):
            core.weights_step(before, SAMPLES[event])
    else:
        assert core.weights_step(before, SAMPLES[event]).state in cell.to


STALE = [core.Stamp(1, 2), core.Stamp(1, 4), core.Stamp(0, 3), core.Stamp(2, 3)]


@pytest.mark.parametrize("state", list(A))
@pytest.mark.parametrize("stamp", STALE)
def test_a_stale_epoch_or_owner_is_fenced_in_every_state(state: A, stamp: core.Stamp) -> None:
    arena = core.Arena("slot0", 4096, state=state, epoch=3)
    for event in (
        core.Acquire(stamp, 1, "w"),
        core.Reclaimed(stamp, 1, True),
        core.FenceBegun(stamp),
        core.FenceEnded(stamp, False),
        core.Quarantined(stamp, "x"),
        core.Restored(stamp, False),
    ):
        with pytest.raises(Fenced, match="at 3 in owner generation 1"):
            core.arena_step(arena, event)


@pytest.mark.parametrize("state", list(W))
@pytest.mark.parametrize("stamp", STALE)
def test_a_stale_version_or_owner_is_fenced_in_every_state(state: W, stamp: core.Stamp) -> None:
    of_this = core.Weights("m", 4096, state=state, version=3, peer=1)
    of_next = core.Weights("m", 4096, state=state, version=2, peer=1)
    for weights, event in (
        (of_this, core.UpdateBegun(stamp, 1, False, True)),
        (of_this, core.RebuildBegun(stamp)),
        (of_next, core.CommitAsked(stamp, 1)),
        (of_next, core.Aborted(stamp, 1, False)),
    ):
        with pytest.raises(Fenced, match="at 3 in owner generation 1"):
            core.weights_step(weights, event)


def test_a_living_holder_keeps_the_fence_open() -> None:
    fencing = core.Arena("slot0", 4096, state=A.FENCING, epoch=3, peer=1, who="w")
    with pytest.raises(Refused, match="still alive"):
        core.arena_step(fencing, core.FenceEnded(HERE, holder_alive=True))
    quarantined = core.arena_step(fencing, core.Quarantined(HERE, "not dead in time"))
    with pytest.raises(Refused, match="still alive"):
        core.arena_step(quarantined, core.Restored(HERE, holder_alive=True))
    assert core.arena_step(quarantined, core.Restored(HERE, holder_alive=False)) == core.Arena("slot0", 4096, epoch=4)


def test_only_the_holders_death_counts() -> None:
    leased = core.Arena("slot0", 4096, state=A.LEASED, epoch=3, peer=1, who="w")
    for stranger in (2, None):
        assert core.arena_step(leased, core.HolderDied(peer=stranger)) is leased
    assert core.arena_step(leased, core.HolderDied(peer=1)).state is A.FENCING


def test_an_adopted_lease_is_its_holders_only() -> None:
    """The next life of the owner knows the holder by its process; only that one can reclaim, at the same epoch."""
    leased = core.Arena("slot0", 4096, state=A.LEASED, epoch=3, peer=1, who="w")
    adopted = core.arena_step(leased, core.ArenaAdopted(owner=2, holder_alive=True))
    assert (adopted.state, adopted.epoch, adopted.peer, adopted.owner) == (A.LEASED, 3, None, 2)
    now = core.Stamp(2, 3)
    with pytest.raises(LeaseRefused, match="another process"):
        core.arena_step(adopted, core.Reclaimed(now, peer=5, same=False))
    with pytest.raises(LeaseRefused, match="has a holder"):
        core.arena_step(adopted, core.Acquire(now, 5, "other"))
    assert core.arena_step(adopted, core.HolderDied(peer=None)).state is A.FENCING
    mine = core.arena_step(adopted, core.Reclaimed(now, peer=5, same=True))
    assert core.arena_step(mine, core.HolderDied(peer=None)) is mine
    assert core.arena_step(mine, core.HolderDied(peer=5)).state is A.FENCING
    assert core.arena_step(leased, core.ArenaAdopted(owner=2, holder_alive=False)).state is A.FENCING


peers = st.integers(0, 3)
stamps = st.builds(core.Stamp, owner=st.integers(1, 2), count=st.integers(0, 4))
arena_events = st.one_of(
    st.builds(core.Acquire, stamp=stamps, peer=peers, who=st.just("w")),
    st.builds(core.Reclaimed, stamp=stamps, peer=peers, same=st.just(False)),
    st.builds(core.HolderDied, peer=st.none() | peers),
    st.builds(core.FenceBegun, stamp=stamps),
    st.builds(core.FenceEnded, stamp=stamps, holder_alive=st.booleans()),
    st.builds(core.Quarantined, stamp=stamps, reason=st.just("r")),
    st.builds(core.Restored, stamp=stamps, holder_alive=st.booleans()),
    st.builds(core.ArenaAdopted, owner=st.just(2), holder_alive=st.booleans()),
)


@given(st.lists(arena_events, max_size=60))
def test_never_two_holders(events: list[core.ArenaEvent]) -> None:
    """A model that only watches grants: whoever was let in must have been seen dead before the next one is."""
    arena = core.Arena("slot0", 4096)
    inside: int | None = None  # the peer that may still write
    for event in events:
        before = arena
        try:
            arena = core.arena_step(arena, event)
        except BelayerError:
            assert arena is before
            continue
        assert arena.epoch - before.epoch in (0, 1)
        if isinstance(event, core.FenceEnded | core.Restored):
            assert not event.holder_alive
            inside = None
        if isinstance(event, core.Acquire):
            assert inside is None, "a second holder was let in"
            inside = event.peer
        assert (arena.state is A.FREE) <= (inside is None)


weights_events = st.one_of(
    st.builds(core.Built, version=st.integers(1, 3)),
    st.builds(core.BuildFailed, reason=st.just("r")),
    st.builds(core.UpdateBegun, stamp=stamps, peer=peers, in_place=st.booleans(), rewrite=st.booleans()),
    st.builds(core.CommitAsked, stamp=stamps, peer=peers),
    st.builds(core.Committed, version=st.integers(0, 6)),
    st.builds(core.Mismatched, reason=st.just("r")),
    st.builds(core.Aborted, stamp=stamps, peer=peers, touched=st.booleans()),
    st.builds(core.WriterDied, peer=peers),
    st.builds(core.RebuildBegun, stamp=stamps),
    st.builds(core.WeightsAdopted, owner=st.just(2), intact=st.booleans()),
    st.builds(core.SiblingTorn, version=st.integers(1, 4), reason=st.just("r")),
)


@given(st.lists(weights_events, max_size=60))
def test_bytes_that_are_not_those_of_a_version_are_never_readable(events: list[core.WeightsEvent]) -> None:
    """A model that only watches the bytes: ``dirty`` when those of the last version may differ from what was sealed."""
    weights = core.Weights("m", 4096)
    dirty, overwriting = True, False
    for event in events:
        before = weights
        try:
            weights = core.weights_step(weights, event)
        except BelayerError:
            continue
        match event:
            case core.Built():
                dirty = False
            case core.UpdateBegun(in_place=in_place):
                dirty, overwriting = dirty or in_place, in_place
            case core.Committed():
                assert before.peer is None
                dirty = False
            case core.Aborted(touched=touched):
                dirty = dirty and (touched or not overwriting)
            case core.WeightsAdopted(intact=False):
                dirty = True
            case core.BuildFailed() | core.RebuildBegun() | core.SiblingTorn():
                dirty = True
        if dirty:
            with pytest.raises(WeightsTorn):
                core.readable(weights)
        elif weights.state in (W.SEALED, W.UPDATING):
            core.readable(weights)


def _sealed() -> core.Weights:
    return core.weights_step(core.Weights("m", 1), core.Built(version=1))


def test_an_update_needs_the_version_that_holds_and_its_own_writer() -> None:
    with pytest.raises(Fenced, match="at 1 in"):
        core.weights_step(_sealed(), core.UpdateBegun(core.Stamp(1, 2), 1, False, False))
    updating = core.weights_step(_sealed(), core.UpdateBegun(NOW, 1, False, False))
    for stranger in (core.CommitAsked(NEXT, 2), core.Aborted(NEXT, 2, False)):
        with pytest.raises(Fenced, match="another writer"):
            core.weights_step(updating, stranger)
    asked = core.weights_step(updating, core.CommitAsked(NEXT, 1))
    assert core.weights_step(asked, core.WriterDied(1)) is asked, "its work is done"
    assert core.weights_step(asked, core.Committed(2)).version == 2


@pytest.mark.parametrize("end", [core.WriterDied(1), core.Aborted(NEXT, 1, True), core.WeightsAdopted(2, True)])
def test_a_version_beside_the_last_one_leaves_it_whole(end: core.WeightsEvent) -> None:
    """swap: v stays readable during the update and after its end without a commit; in place it is torn at once."""
    beside = core.weights_step(_sealed(), core.UpdateBegun(NOW, 1, False, False))
    core.readable(beside)
    after = core.weights_step(beside, end)
    assert (after.state, after.version) == (W.SEALED, 1)
    over = core.weights_step(_sealed(), core.UpdateBegun(NOW, 1, True, False))
    with pytest.raises(WeightsTorn, match="updating"):
        core.readable(over)
    torn = core.weights_step(over, end)
    assert (torn.state, torn.version) == (W.TORN, 1)


def test_torn_weights_take_a_whole_rewrite_only() -> None:
    torn = core.Weights("m", 1, state=W.TORN, version=1)
    with pytest.raises(WeightsTorn, match="a part"):
        core.weights_step(torn, core.UpdateBegun(NOW, 1, False, rewrite=False))
    again = core.weights_step(torn, core.UpdateBegun(NOW, 1, False, rewrite=True))
    with pytest.raises(WeightsTorn):
        core.readable(again)
    assert core.weights_step(again, core.WriterDied(1)).state is W.TORN
    done = core.weights_step(core.weights_step(again, core.CommitAsked(NEXT, 1)), core.Committed(2))
    core.readable(done)
