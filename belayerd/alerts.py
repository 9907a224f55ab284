"""An alert leaves the host in three ways: the log, the incident, and the operator's own command.

The command gets one JSON object on its standard input: ``{"host", "slot", "state", "generation", "reason", "at"}``
(``at``: Unix seconds). It runs without a shell, in a session of its own, and is killed at its deadline; whatever it
does, supervision goes on. Its failure is logged.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from belayerd import commands


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    slot: str
    state: str
    generation: int
    reason: str
    at: float


class Alerts:
    """``tell`` returns at once, commands run one beside the other, ``settled`` waits for them."""

    def __init__(self, command: tuple[str, ...], log: Any, deadline_s: float = commands.DEADLINE_S) -> None:
        self._command, self._log, self._deadline_s = command, log, deadline_s
        self._running: set[asyncio.Task[bool]] = set()

    def tell(self, alert: Alert) -> None:
        self._log.error("alert", slot=alert.slot, state=alert.state, reason=alert.reason)
        if self._command:
            work = commands.run("alert command", self._command, alert, self._deadline_s, self._log)
            task = asyncio.get_running_loop().create_task(work)
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def settled(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
