"""Until the weights of a model are whole for the first time in a life of belayerd: who waits, why, and who is told.

There is no bound: hundreds of gigabytes take their minutes from a disk, and giving up brings nobody closer. Whoever is
on call hears of it once, and other models' slots go their way meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from belayer.clock import monotonic
from belayer.errors import DaemonUnreachable, OwnerComing
from belayer.messages.owner import OwnerStatusReply

_EVERY_S = 0.1


def unsealed(model: str, owner: OwnerStatusReply | None) -> str:
    """Why no worker of ``model`` can be made yet, "" when one can. ``owner``: None when it does not answer. Pure."""
    if owner is None:
        return "gpuowner@weights does not answer"
    rows = [row for row in owner.weights if row.model == model]
    if not rows:
        return f"gpuowner@weights (pid {owner.pid}) does not hold {model} yet"
    row = next((row for row in rows if row.state != "sealed"), None)
    if row is None:
        return ""
    part = f"the part of rank {row.rank} of {model}" if len(rows) > 1 else model
    return f"{part} is {row.state}" + (f": {row.reason}" if row.reason else "")


class Sealed:
    """``tell(model, why)`` is called once for a model that is not whole after ``patience_s`` in which its owner got on
    with nothing. ``waits``: why, by model. ``seen``: models that were whole once; later an owner's absence is
    the gate's affair."""

    def __init__(
        self,
        status: Callable[[], Awaitable[OwnerStatusReply]],
        patience_s: float,
        tell: Callable[[str, str], None],
        log: Any,
    ) -> None:
        self._status, self._patience_s, self._tell, self._log = status, patience_s, tell, log
        self._told: set[str] = set()
        self.waits: dict[str, str] = {}
        self.seen: set[str] = set()

    async def wait(self, model: str) -> None:
        began = monotonic()
        while model not in self.seen:
            coming, owner = await self._answer()
            why = coming or unsealed(model, owner)
            if not why:
                self.seen.add(model)
                break
            self.waits[model] = f"waits for its weights: {why}"
            if coming:
                began = monotonic()
            elif monotonic() - began >= self._patience_s and model not in self._told:
                self._told.add(model)
                self._log.warning("weights not sealed", model=model, after_s=self._patience_s, why=why)
                self._tell(model, f"no worker can be made for {self._patience_s:g} s now: {why}")
            await asyncio.sleep(_EVERY_S)
        self.waits.pop(model, None)

    async def _answer(self) -> tuple[str, OwnerStatusReply | None]:
        """How far an owner is that is on its way, and what one says that answers."""
        try:
            return "", await self._status()
        except OwnerComing as why:
            return why.message, None
        except DaemonUnreachable:
            return "", None
