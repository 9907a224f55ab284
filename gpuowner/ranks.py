"""A slot whose engine has several tensor-parallel ranks has one arena for each, and they are leased as one. Pure.

The worker is one: its ranks stop together, so an arena of one rank may be written only while all of them are this
worker's. Two rules keep that: no lease while another rank's arena is anybody else's, and one epoch for all, so that a
message about the last group fits none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from belayer.errors import LeaseRefused
from gpuowner.core import Arena, ArenaState


def lease_or_refuse(mine: Arena, siblings: Iterable[Arena], who: str) -> None:
    """Raises LeaseRefused unless every other rank's arena is free or ``who``'s, at the epoch of ``mine``."""
    for other in siblings:
        ours = other.state is ArenaState.LEASED and other.who == who
        if not (ours or other.state is ArenaState.FREE) or other.epoch != mine.epoch:
            raise LeaseRefused(
                f"arena {mine.slot}: that of another rank is {other.state.value} at epoch {other.epoch}"
                + (f", held by {other.who}" if other.who else ""),
                kept=f"the arena stays {mine.state.value} at epoch {mine.epoch}",
                remedy="the ranks of a slot are leased as one: fence all of the last worker first",
            )


def epoch_of(freed: Arena, siblings: Iterable[Arena]) -> Arena:
    """``freed`` at the epoch of the slot: that of a rank that was freed before it, when that is later."""
    return replace(freed, epoch=max([freed.epoch, *(other.epoch for other in siblings)]))


def lifted(other: Arena, freed: Arena) -> Arena:
    """A free arena of another rank after ``freed`` became free: the worker that got only some of them is gone."""
    return replace(other, epoch=freed.epoch) if other.state is ArenaState.FREE and other.epoch < freed.epoch else other
