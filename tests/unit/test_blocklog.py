"""The log of finished KV blocks: what a kill leaves behind is believed only if it is whole and of the lease before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import Refused
from belayerd.worker.blocklog import ENTRY, HEADER, BlockLog, Entry, room

BLOCKS, PRINT = 8, b"f" * 32
WEIGHTS = 7
KEY = bytes(range(36))


def memory() -> bytearray:
    return bytearray(HEADER + BLOCKS * ENTRY)


def opened(
    view: bytearray, epoch: int, weights: int = WEIGHTS, fingerprint: bytes = PRINT
) -> tuple[BlockLog, list[Entry]]:
    log = BlockLog(view, BLOCKS, fingerprint)
    return log, log.open(epoch, weights)


def kept(view: bytearray, epoch: int = 1) -> BlockLog:
    """A log of ``epoch`` with blocks 2 and 5 in it."""
    log, found = opened(view, epoch)
    assert found == []
    log.publish(Entry(2, KEY, 16), WEIGHTS)
    log.publish(Entry(5, KEY[::-1], 32), WEIGHTS)
    return log


def test_the_next_lease_finds_what_was_published() -> None:
    view = memory()
    kept(view)
    _, found = opened(view, 2)
    assert found == [Entry(2, KEY, 16), Entry(5, KEY[::-1], 32)]
    _, again = opened(view, 3)
    assert again == found, "a main that only adopted leaves the same blocks"


def test_an_invalidated_block_is_gone() -> None:
    view = memory()
    kept(view).invalidate(2)
    assert [entry.block for entry in opened(view, 2)[1]] == [5]


def test_a_cleared_log_is_empty() -> None:
    view = memory()
    kept(view).clear()
    assert opened(view, 2)[1] == []


@pytest.mark.parametrize("epoch", [1, 3, 4])
def test_only_the_lease_that_follows_believes(epoch: int) -> None:
    """In between somebody held the lease who did not keep the log, and may have written any block."""
    view = memory()
    kept(view)
    assert opened(view, epoch)[1] == []


def test_other_weights_or_another_engine_are_not_believed_and_stay_so() -> None:
    view = memory()
    kept(view)
    assert opened(view, 2, weights=8)[1] == []
    assert opened(view, 3)[1] == [], "not even when the old weights come back: their blocks may have been written over"
    view = memory()
    kept(view)
    assert opened(view, 2, fingerprint=b"g" * 32)[1] == []


def test_killed_between_clearing_and_the_header_nobody_believes() -> None:
    """``open`` clears what it does not believe first: its stores up to the header, replayed."""
    view = memory()
    kept(view)
    cut = memory()
    cut[:] = view
    opened(view, 2, weights=8)
    cut[HEADER:] = view[HEADER:]  # all but the header was done
    assert opened(cut, 3)[1] == []


@given(st.integers(0, ENTRY), st.binary(min_size=36, max_size=36), st.integers(0, 2**32 - 1))
def test_an_entry_cut_anywhere_counts_as_nothing_or_as_itself(cut: int, key: bytes, tokens: int) -> None:
    """Whatever prefix of the stores reached memory, even if the mark did: never a mixture."""
    view = memory()
    log = kept(view)
    old = bytes(view[HEADER + 2 * ENTRY : HEADER + 3 * ENTRY])
    new = Entry(2, key, tokens)
    log.publish(new, WEIGHTS)
    at = HEADER + 2 * ENTRY
    view[at + cut : at + ENTRY] = old[cut:]
    found = [entry for entry in opened(view, 2)[1] if entry.block == 2]
    assert found in ([], [new], [Entry(2, KEY, 16)])


def test_a_key_too_long_is_left_out_and_too_many_blocks_are_refused() -> None:
    view = memory()
    log, _ = opened(view, 1)
    log.publish(Entry(1, b"k" * 64, 16), WEIGHTS)
    assert opened(view, 2)[1] == []
    with pytest.raises(Refused, match="larger block_size"):
        BlockLog(bytearray(room(1 << 20)), 1 << 20, PRINT)
