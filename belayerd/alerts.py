"""An alert leaves the host in three ways: the log, the incident, and the operator's own command.

The command gets one JSON object on its standard input: ``{"host", "slot", "state", "generation", "reason", "at"}``
(``at``: Unix seconds). It runs without a shell, in a session of its own, and is killed at its deadline; whatever it
does, supervision goes on. Its failure is logged, since a pager that is broken must be seen somewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import msgspec

DEADLINE_S = 30.0


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    slot: str
    state: str
    generation: int
    reason: str
    at: float


class Alerts:
    """``tell`` returns at once, commands run one beside the other, ``settled`` waits for them."""

    def __init__(self, command: tuple[str, ...], log: Any, deadline_s: float = DEADLINE_S) -> None:
        self._command, self._log, self._deadline_s = command, log, deadline_s
        self._running: set[asyncio.Task[None]] = set()

    def tell(self, alert: Alert) -> None:
        self._log.error("alert", slot=alert.slot, state=alert.state, reason=alert.reason)
        if self._command:
            task = asyncio.get_running_loop().create_task(self._run(alert))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def settled(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _run(self, alert: Alert) -> None:
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as why:
            self._log.error("alert command cannot be started", command=self._command[0], why=str(why))
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                _, said = await child.communicate(msgspec.json.encode(alert))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
            self._log.error("alert command killed", command=self._command[0], after_s=self._deadline_s)
            return
        if child.returncode:
            text = said.decode(errors="replace")[-300:]
            self._log.error("alert command failed", command=self._command[0], status=child.returncode, said=text)
