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

SAMPLES: dict[type, object] = {
    core.Acquire: core.Acquire(epoch=3, peer=1, who="w"),
    core.HolderDied: core.HolderDied(peer=1),
    core.FenceBegun: core.FenceBegun(epoch=3),
    core.FenceEnded: core.FenceEnded(epoch=3, holder_alive=False),
    core.Quarantined: core.Quarantined(epoch=3, reason="not dead in time"),
    core.Restored: core.Restored(epoch=3, holder_alive=False),
    core.Built: core.Built(version=1),
    core.BuildFailed: core.BuildFailed(reason="truncated"),
    core.UpdateBegun: core.UpdateBegun(version=2, peer=1),
    core.Committed: core.Committed(version=2, peer=1),
    core.Aborted: core.Aborted(peer=1, touched=True),
    core.WriterDied: core.WriterDied(peer=1),
    core.RebuildBegun: core.RebuildBegun(),
}


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
        with pytest.raises(LeaseRefused if event is core.Acquire else Refused, match="epoch 3"):
            core.arena_step(before, SAMPLES[event])
    else:
        assert core.arena_step(before, SAMPLES[event]).state in cell.to


@pytest.mark.parametrize(("state", "event"), list(core.WEIGHTS_TABLE))
def test_each_weights_cell_does_what_it_says(state: W, event: type) -> None:
    before = core.Weights("m", 4096, state=state, version=1, peer=1 if state is W.UPDATING else None)
    cell = core.WEIGHTS_TABLE[state, event]
    if not cell.to:
        with pytest.raises(WeightsTorn if state is W.TORN else Refused):
            core.weights_step(before, SAMPLES[event])
    else:
        assert core.weights_step(before, SAMPLES[event]).state in cell.to


@pytest.mark.parametrize("state", list(A))
@pytest.mark.parametrize("epoch", [2, 4])
def test_another_epoch_is_fenced_in_every_state(state: A, epoch: int) -> None:
    arena = core.Arena("slot0", 4096, state=state, epoch=3)
    for event in (
        core.Acquire(epoch, 1, "w"),
        core.FenceBegun(epoch),
        core.FenceEnded(epoch, False),
        core.Quarantined(epoch, "x"),
        core.Restored(epoch, False),
    ):
        with pytest.raises(Fenced, match="epoch 3"):
            core.arena_step(arena, event)


def test_a_living_holder_keeps_the_fence_open() -> None:
    fencing = core.Arena("slot0", 4096, state=A.FENCING, epoch=3, peer=1, who="w")
    with pytest.raises(Refused, match="still alive"):
        core.arena_step(fencing, core.FenceEnded(3, holder_alive=True))
    quarantined = core.arena_step(fencing, core.Quarantined(3, "not dead in time"))
    with pytest.raises(Refused, match="still alive"):
        core.arena_step(quarantined, core.Restored(3, holder_alive=True))
    assert core.arena_step(quarantined, core.Restored(3, holder_alive=False)) == core.Arena("slot0", 4096, epoch=4)


def test_only_the_holders_death_counts() -> None:
    leased = core.Arena("slot0", 4096, state=A.LEASED, epoch=3, peer=1, who="w")
    assert core.arena_step(leased, core.HolderDied(peer=2)) is leased
    assert core.arena_step(leased, core.HolderDied(peer=1)).state is A.FENCING


peers = st.integers(0, 3)
epochs = st.integers(0, 4)
arena_events = st.one_of(
    st.builds(core.Acquire, epoch=epochs, peer=peers, who=st.just("w")),
    st.builds(core.HolderDied, peer=peers),
    st.builds(core.FenceBegun, epoch=epochs),
    st.builds(core.FenceEnded, epoch=epochs, holder_alive=st.booleans()),
    st.builds(core.Quarantined, epoch=epochs, reason=st.just("r")),
    st.builds(core.Restored, epoch=epochs, holder_alive=st.booleans()),
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
    st.builds(core.UpdateBegun, version=st.integers(0, 6), peer=peers),
    st.builds(core.Committed, version=st.integers(0, 6), peer=peers),
    st.builds(core.Aborted, peer=peers, touched=st.booleans()),
    st.builds(core.WriterDied, peer=peers),
    st.builds(core.RebuildBegun),
)


@given(st.lists(weights_events, max_size=60))
def test_a_half_written_version_is_never_readable(events: list[core.WeightsEvent]) -> None:
    weights = core.Weights("m", 4096)
    dirty, writer = True, None  # BUILDING: the bytes are not whole
    for event in events:
        try:
            weights = core.weights_step(weights, event)
        except BelayerError:
            continue
        match event:
            case core.Built():
                dirty, writer = False, None
            case core.UpdateBegun(peer=peer):
                dirty, writer = True, peer
            case core.Committed(peer=peer):
                assert peer == writer
                dirty = False
            case core.Aborted(touched=touched):
                dirty = touched
            case core.BuildFailed() | core.RebuildBegun():
                dirty = True
        if dirty:
            with pytest.raises(WeightsTorn):
                core.readable(weights)
        else:
            core.readable(weights)


def test_an_update_needs_the_next_version_and_its_own_writer() -> None:
    sealed = core.weights_step(core.Weights("m", 1), core.Built(version=1))
    with pytest.raises(Fenced, match="not the next"):
        core.weights_step(sealed, core.UpdateBegun(version=3, peer=1))
    updating = core.weights_step(sealed, core.UpdateBegun(version=2, peer=1))
    for stranger in (core.Committed(version=2, peer=2), core.Aborted(peer=2, touched=False)):
        with pytest.raises(Fenced, match="another writer"):
            core.weights_step(updating, stranger)
    assert core.weights_step(updating, core.Committed(version=2, peer=1)).version == 2
