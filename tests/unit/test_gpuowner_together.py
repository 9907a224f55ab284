"""The parts of a model: one step for all or for none, and torn as one when they come back apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import BelayerError, Fenced, Refused, WeightsTorn
from gpuowner import core, together
from gpuowner.core import WeightsState as W

SEALED = core.weights_step(core.Weights("m", 64), core.Built(version=1))
NOW, NEXT = core.Stamp(1, 1), core.Stamp(1, 2)


def begun(in_place: bool, rewrite: bool = True) -> core.UpdateBegun:
    return core.UpdateBegun(NOW, peer=1, in_place=in_place, rewrite=rewrite)


def test_an_event_that_one_part_refuses_steps_none() -> None:
    torn = replace(SEALED, state=W.TORN, whole=False)
    with pytest.raises(WeightsTorn, match="update of a part"):
        together.step((SEALED, torn), begun(in_place=False, rewrite=False))
    both = together.step((SEALED, torn), begun(in_place=False))
    assert [part.state for part in both] == [W.UPDATING, W.UPDATING]


def test_parts_in_order_stay_as_they_are() -> None:
    torn = replace(SEALED, state=W.TORN, whole=False, reason="r")
    for parts in ((SEALED,), (SEALED, SEALED), (torn, torn), (torn,)):
        assert together.levelled(parts) == parts


@pytest.mark.parametrize(
    ("parts", "version", "said"),
    [
        ((SEALED, replace(SEALED, state=W.TORN, whole=False, reason="lost")), 1, "the part of rank 1 is torn: lost"),
        ((replace(SEALED, state=W.TORN, whole=False), SEALED), 1, "the part of rank 0 is torn"),
        ((SEALED, replace(SEALED, version=3)), 3, "versions 1, 3"),
        ((replace(SEALED, version=2), replace(SEALED, state=W.TORN, whole=False)), 2, "the part of rank 1"),
    ],
)
def test_parts_that_come_back_apart_are_torn_as_one_under_the_highest_number(
    parts: tuple[core.Weights, ...], version: int, said: str
) -> None:
    with pytest.raises(WeightsTorn):
        together.readable(parts)
    after = together.levelled(parts)
    assert {(part.state, part.version, part.whole) for part in after} == {(W.TORN, version, False)}
    assert any(said in part.reason for part in after)
    assert together.levelled(after) == after
    again = together.step(after, core.RebuildBegun(core.Stamp(1, version)))
    sealed = together.step(again, core.Built(version=version + 1))
    together.readable(sealed)


def test_only_the_writer_gets_the_other_parts() -> None:
    updating = core.weights_step(SEALED, begun(in_place=False))
    together.writing(updating, NEXT, peer=1)
    with pytest.raises(Refused, match="no update of this connection"):
        together.writing(updating, NEXT, peer=2)
    with pytest.raises(Refused, match="sealed"):
        together.writing(SEALED, NEXT, peer=1)
    with pytest.raises(Fenced):
        together.writing(updating, NOW, peer=1)


of_writers = st.one_of(
    st.builds(core.UpdateBegun, stamp=st.just(NOW), peer=st.just(1), in_place=st.booleans(), rewrite=st.booleans()),
    st.just(core.CommitAsked(NEXT, 1)),
    st.just(core.Committed(version=2)),
    st.just(core.Mismatched(reason="r")),
    st.builds(core.Aborted, stamp=st.just(NEXT), peer=st.just(1), touched=st.booleans()),
    st.just(core.WriterDied(peer=1)),
)


@given(st.lists(of_writers, max_size=20))
def test_whatever_a_writer_does_the_parts_stay_one(events: list[core.WeightsEvent]) -> None:
    parts: tuple[core.Weights, ...] = (SEALED, SEALED, SEALED)
    for event in events:
        try:
            parts = together.step(parts, event)
        except BelayerError:
            continue
        assert len(set(parts)) == 1
        assert together.levelled(parts) == parts
