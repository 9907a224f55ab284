"""What one worker process has been given: its weights, its arena, and who listens to its scheduler.

vLLM builds loader, worker and scheduler by name, deep inside its own constructors, so the way in for our
objects is this one variable, set once per process before the engine is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from belayer.errors import BelayerError
from belayerd.worker.adapter.bound import Bound
from belayerd.worker.ranks import Mapped, Ranks
from gpuowner.attach import ArenaView, WeightsView
from gpuowner.digest import Told, nobody


@dataclass
class Seat:
    """``scheduled`` is called inside each step, before the model runs, with its number of tokens; ``stepped`` after
    the step. ``bound``: what became of the model's tensors, once they are loaded. ``ranks``: the other processes of a
    tensor-parallel worker, in its leader; ``meet``: the file where they meet; ``others``: what they said last
    that they map of the weights. ``packed``: the slot wants its matrices in the CPU kernel's own form too.
    ``verified`` hears how many bytes of how many of another weight version are verified."""

    weights: WeightsView
    arena: ArenaView
    scheduled: Callable[[int], None]
    stepped: Callable[[], None]
    bound: Bound | None = None
    ranks: Ranks | None = None
    meet: Path | None = None
    others: tuple[Mapped, ...] = ()
    packed: bool = False
    verified: Told = nobody


_seat: list[Seat] = []


def take(seat: Seat) -> None:
    if _seat:
        raise BelayerError("this process already has an engine's seat")
    _seat.append(seat)


def seat() -> Seat:
    if not _seat:
        raise BelayerError("no seat was taken: engines are built by belayerd.worker only")
    return _seat[0]
