"""Actions of sandboxes, and faults put into them on purpose.

An observation is released only when its boundary is on record; an action whose end was not seen makes the sandbox
LOST, and is never run again (promise E5).
"""

from __future__ import annotations

import os
from typing import NoReturn

import msgspec

from belayer.clock import Stopwatch
from belayer.errors import Refused, SandboxLost
from belayer.messages.sandbox import ExecAction, InjectSandboxFault, Observation
from envkeeper import restore
from envkeeper.agentlink import MAX_COMMAND, ActionResult, AgentError
from envkeeper.core import Event, State
from envkeeper.failpoints import Point, reach
from envkeeper.keeper import Box, Keeper, alive
from envkeeper.records import SandboxRecord


class Acting:
    """What the LLM does in a sandbox."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def exec(self, ask: ExecAction) -> Observation:
        """A committed observation, or SandboxLost: never an error text that looks like one (promise E5)."""
        box = self._keeper.box(ask.sandbox_id)
        command = ask.command.encode("utf-8", errors="surrogateescape")
        if len(command) > MAX_COMMAND or "\0" in ask.command:
            raise Refused(f"a command of {len(command)} bytes, or one with a NUL, cannot be an action")
        async with box.gate:
            self._keeper.current(box, ask.incarnation, ask.boundary)
            self._keeper.go(box, Event.ACT)
            link, number = alive(box), box.record.boundary + 1
            config = self._keeper.config
            timeout = ask.timeout_s or config.action_timeout_s
            watch = Stopwatch()
            try:
                result = await self._keeper.thread(link.run, number, command, timeout, config.max_output_bytes)
            except (SandboxLost, AgentError, OSError) as why:
                await self._lose(box, number, str(why))
            reach(Point.ACTION_ENDED)
            if box.record.state is not State.ACTING:
                await self._lose(box, number, "it died in the moment of its answer")
            box.record = msgspec.structs.replace(box.record, boundary=number, context_digest=ask.context_digest)
            self._keeper.go(box, Event.COMMITTED)
            self._keeper.save(box, durable=False)
            reach(Point.ACTION_RECORDED)
            return _observation(box.record, result, watch.ms())

    async def inject(self, ask: InjectSandboxFault) -> tuple[int, str, float]:
        """SIGKILL to PID 1 of the sandbox; returns (pid, what was seen, milliseconds). Refused unless it lives."""
        box = self._keeper.box(ask.sandbox_id)
        if ask.kind != "kill":
            raise Refused(f"there is no sandbox fault {ask.kind!r}; there is: kill")
        alive(box)
        box.injected = True
        pid, container, watch = box.record.pid, box.record.container_id, Stopwatch()
        pidfd = os.dup(box.pidfd)
        try:
            await self._keeper.thread(restore.fence, pidfd, None)
        finally:
            os.close(pidfd)
        ms = watch.ms()
        why = await self._keeper.thread(self._keeper.host.engine.why_dead, container)
        return pid, f"pidfd of PID 1 readable (dead); Docker: {why}", ms

    async def _lose(self, box: Box, number: int, why: str) -> NoReturn:
        """The end of action ``number`` was not seen: no observation, no replay."""
        if box.record.state is State.ACTING:
            self._keeper.go(box, Event.FATE_UNKNOWN, f"action {number}: {why}")
            self._keeper.save(box, durable=True)
        docker = await self._keeper.thread(self._keeper.host.engine.why_dead, box.record.container_id)
        raise SandboxLost(
            f"{box.record.sandbox_id} was lost in action {number} ({why}; Docker: {docker}): "
            "what the action did is unknown",
            kept=f"checkpoint {box.ready.checkpoint_id} at boundary {box.ready.boundary}"
            if box.ready
            else "no checkpoint",
            remedy="restore, and generate again from that boundary" if box.ready else "start a new sandbox",
        )


def _observation(record: SandboxRecord, result: ActionResult, ms: float) -> Observation:
    return Observation(
        sandbox_id=record.sandbox_id,
        incarnation=record.incarnation,
        boundary=record.boundary,
        stdout=result.stdout.decode("utf-8", errors="replace"),
        stderr=result.stderr.decode("utf-8", errors="replace"),
        exit_code=result.code,
        ms=round(ms, 3),
        timed_out=result.timed_out,
        truncated=result.truncated,
    )
