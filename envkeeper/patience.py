"""How often, and how long apart, something is tried again that the engine or the host hindered. Blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from envkeeper.passing import Hindered

T = TypeVar("T")

PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0)  # a restore: the work of a whole attempt is behind it
FEW_S = (0.2, 1.0)  # a new sandbox: nothing is lost with it


def patiently(attempt: Callable[[], T], clean: Callable[[], None], pauses_s: Sequence[float] = PAUSES_S) -> T:
    """``attempt``, and again while it is Hindered; ``clean`` removes before what the last one may have left. Raises
    what either raises, at last Hindered."""
    for pause in pauses_s:
        try:
            return attempt()
        except Hindered as why:
            if not why.again:
                raise
        time.sleep(pause)
        clean()
    return attempt()
