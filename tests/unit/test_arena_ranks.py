"""The arenas of a slot's tensor-parallel ranks are leased as one: gpuowner.ranks, as ``Arenas`` uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.errors import Fenced, LeaseRefused
from gpuowner import core
from gpuowner.keeping import Caller
from gpuowner.vault import Vault

SIZE = 1 << 20


class Two:
    """A slot with two ranks in a vault."""

    def __init__(self, folder: Path) -> None:
        self.vault = Vault(1, folder / "ledger", None)
        self.arenas = self.vault.arenas
        for rank in (0, 1):
            os.close(self.arenas.open("slot0", rank, SIZE)[1])
        self.pidfd = os.pidfd_open(os.getpid())

    def take(self, rank: int, epoch: int, who: str, peer: int) -> None:
        by = Caller(peer=peer, who=who, pid=os.getpid(), pidfd=self.pidfd)
        os.close(self.arenas.acquire("slot0", rank, core.Stamp(1, epoch), by))

    def fence(self, rank: int) -> None:
        epoch = self.arenas.entry("slot0", rank).arena.epoch
        self.arenas.fence("slot0", rank, core.FenceBegun(core.Stamp(1, epoch)))
        self.arenas.fence("slot0", rank, core.FenceEnded(core.Stamp(1, epoch), holder_alive=False))

    def rows(self) -> list[tuple[str, int]]:
        found = (self.arenas.entry("slot0", rank).arena for rank in (0, 1))
        return [(arena.state.value, arena.epoch) for arena in found]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    os.close(made.pidfd)
    for entry in made.arenas.entries.values():
        entry.memory.close()


def test_the_ranks_of_one_worker_get_all_arenas_in_one_epoch(two: Two) -> None:
    two.take(0, 0, "a", 1)
    two.take(1, 0, "a", 2)
    assert two.rows() == [("leased", 0), ("leased", 0)]
    two.fence(0)
    two.fence(1)
    assert two.rows() == [("free", 1), ("free", 1)]


@pytest.mark.parametrize("held", [0, 1])
def test_no_rank_is_leased_while_another_is_somebody_elses(two: Two, held: int) -> None:
    two.take(held, 0, "old", 1)
    with pytest.raises(LeaseRefused, match="another rank is leased at epoch 0, held by old"):
        two.take(1 - held, 0, "new", 2)
    assert two.rows()[1 - held] == ("free", 0)
    two.arenas.peer_gone(1)
    with pytest.raises(LeaseRefused, match="another rank is fencing"):
        two.take(1 - held, 0, "new", 2)
    two.arenas.fence("slot0", held, core.Quarantined(core.Stamp(1, 0), "does not die"))
    with pytest.raises(LeaseRefused, match="another rank is quarantined"):
        two.take(1 - held, 0, "new", 2)


@pytest.mark.parametrize("held", [0, 1])
def test_a_fence_of_half_a_group_ends_the_epoch_of_all(two: Two, held: int) -> None:
    """The worker died between two leases: what it was still about to lease must not fit any more."""
    two.take(held, 0, "old", 1)
    two.fence(held)
    assert two.rows() == [("free", 1), ("free", 1)]
    with pytest.raises(Fenced):
        two.take(1 - held, 0, "old", 2)
    two.take(0, 1, "new", 3)
    two.take(1, 1, "new", 4)


def test_a_rank_that_is_opened_later_begins_at_the_epoch_of_the_slot(two: Two) -> None:
    two.take(0, 0, "a", 1)
    two.fence(0)
    os.close(two.arenas.open("slot0", 2, SIZE)[1])
    assert two.arenas.entry("slot0", 2).arena.epoch == 1
