"""Actions of sandboxes, and faults put into them on purpose.

An observation is released only when its boundary is on record; an action whose end was not seen makes the sandbox
LOST, and is never run again (promise E5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from typing import NoReturn

import msgspec

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, Refused, SandboxLost
from belayer.messages.sandbox import (
    ExecAction,
    FileIn,
    FilesWritten,
    InjectSandboxFault,
    Observation,
    PathContent,
    ReadPath,
    WriteFiles,
)
from envkeeper import restore
from envkeeper.actions import MAX_OUTPUT, check_file, observe, plan
from envkeeper.agentlink import SOCKET_IN_SANDBOX, Action, ActionResult, AgentError, AgentLink
from envkeeper.core import Event, State
from envkeeper.failpoints import Point, reach
from envkeeper.keeper import Box, Keeper, alive
from envkeeper.usage import Meter, disk_bytes

_DISK_GLANCE_S = 1.0  # how often the upper layer of a sandbox with a disk limit is measured while it acts


class Acting:
    """What the LLM does in a sandbox."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    async def exec(self, ask: ExecAction) -> Observation:
        """A committed observation, or SandboxLost: never an error text that looks like one (promise E5). Refused when
        the agent did not begin it; then the boundary stays."""
        keeper, box = self._keeper, self._keeper.box(ask.sandbox_id)
        config, recipe = keeper.config, box.record.recipe
        plan(ask, 0, recipe.user, config.action_timeout_s, config.max_output_bytes)  # refused before it waits
        async with box.gate:
            keeper.current(box, ask.incarnation, ask.boundary)
            keeper.go(box, Event.ACT)
            link, number = alive(box), box.record.boundary + 1
            action = plan(ask, number, recipe.user, config.action_timeout_s, config.max_output_bytes)
            watch, meter = Stopwatch(), Meter(box.record.pid)
            try:
                result, limit = await self._run(box, link, action)
                limit = limit or _memory(meter.killed(), box.record.recipe.memory_mb)
            except AgentError as why:
                keeper.go(box, Event.DECLINED)
                raise Refused(f"{ask.sandbox_id}: {why.message}", kept=f"boundary {number - 1}") from why
            except SandboxLost as why:
                await self._lose(box, number, why.message)
            except OSError as why:
                await self._unreached(box, number, why)
            finally:
                cpu_s, peak = meter.close()
            await self._commit(box, number, ask.context_digest, unkilled=result.unkilled)
            return observe(box.record, result, watch.ms(), limit=limit, cpu_s=cpu_s, peak=peak)

    async def write_files(self, ask: WriteFiles) -> FilesWritten:
        """One boundary further. A file that cannot be written ends it; those before it stay, and that is said."""
        keeper, box = self._keeper, self._keeper.box(ask.sandbox_id)
        for file in ask.files:
            check_file(file)
        async with box.gate:
            keeper.current(box, ask.incarnation, ask.boundary)
            keeper.go(box, Event.ACT)
            link, number = alive(box), box.record.boundary + 1
            written, failed = 0, ""
            try:
                for file in ask.files:
                    await keeper.thread(_put, link, number, file, file.user or box.record.recipe.user)
                    written += 1
            except AgentError as why:
                failed = why.message
            except SandboxLost as why:
                await self._lose(box, number, why.message)
            except OSError as why:
                await self._unreached(box, number, why)
            if not written:  # nothing has changed, and the agent still counts the boundary before
                keeper.go(box, Event.DECLINED)
                raise Refused(f"{ask.sandbox_id}: {failed or 'no files'}", kept=f"boundary {number - 1}")
            await self._commit(box, number, ask.context_digest)
            return FilesWritten(boundary=number, written=written, failed=failed)

    async def read_path(self, ask: ReadPath) -> PathContent:
        keeper, box = self._keeper, self._keeper.box(ask.sandbox_id)
        async with box.gate:  # a connection of ours must not be open in a dump
            keeper.current(box, ask.incarnation, box.record.boundary)
            try:
                found = await keeper.thread(alive(box).read_path, ask.path, ask.offset, min(ask.most, MAX_OUTPUT))
            except AgentError as why:
                raise Refused(f"{ask.sandbox_id}: {why.message}") from why
            except OSError as why:  # an action has taken the agent's socket away: the next one will say so too
                raise SandboxLost(f"{ask.sandbox_id}: its agent does not listen ({why})", remedy="restore it") from why
        if not stat.S_ISDIR(found.mode):
            return PathContent(size=found.size, mode=found.mode, data=found.data)
        names = sorted(name.decode("utf-8", errors="replace") for name in found.data.split(b"\0") if name)
        return PathContent(size=found.size, mode=found.mode, names=tuple(names))

    async def _run(self, box: Box, link: AgentLink, action: Action) -> tuple[ActionResult, str]:
        """The result, and the name of the limit that ended it ("" for none)."""
        keeper, most = self._keeper, box.record.recipe.disk_mb << 20
        if not most or box.life is None:
            return await keeper.thread(link.run, action), ""
        upper, limit = box.life.upper, ""
        before = await keeper.thread(disk_bytes, upper)
        running = asyncio.ensure_future(keeper.thread(link.run, action))
        pause = _DISK_GLANCE_S
        while not (await asyncio.wait({running}, timeout=pause))[0]:
            watch = Stopwatch()
            now = await keeper.thread(disk_bytes, upper)
            pause = max(_DISK_GLANCE_S, 20 * watch.ms() / 1000)  # a look costs at most a twentieth of the time
            # One that is over the limit already may still run, to delete; it may not grow.
            if now > most and now > before and not limit:
                limit = f"disk: {now >> 20} MiB of {most >> 20}"
                with contextlib.suppress(BelayerError, OSError):  # what became of it, its own end tells
                    await keeper.thread(link.stop, action.number)
        result = await running
        if not limit:  # what grew before it, beside it, or faster than the looks
            now = await keeper.thread(disk_bytes, upper)
            limit = f"disk: {now >> 20} MiB of {most >> 20}" if now > most else ""
        return result, limit

    async def _commit(self, box: Box, number: int, digest: str, *, unkilled: bool = False) -> None:
        """On record before it is told (promise E5)."""
        keeper = self._keeper
        reach(Point.ACTION_ENDED)
        if box.record.state is not State.ACTING:
            await self._lose(box, number, "it died in the moment of its answer")
        if unkilled:
            await self._lose(box, number, "what it started cannot be killed")
        box.record = msgspec.structs.replace(box.record, boundary=number, context_digest=digest)
        keeper.go(box, Event.COMMITTED)
        keeper.save(box, durable=False)
        reach(Point.ACTION_RECORDED)

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

    async def _unreached(self, box: Box, number: int, why: OSError) -> NoReturn:
        """The agent could not be asked. Where its life still has a root, no death of its own is behind it."""
        lives = await self._keeper.thread(os.path.isdir, f"/proc/{box.record.pid}/root/")
        said = f"its agent cannot be reached: {why.strerror} at /{SOCKET_IN_SANDBOX}"
        if lives:
            said += ", which something in the sandbox has taken away; its PID 1 lives"
        await self._lose(box, number, said, lives=lives)

    async def _lose(self, box: Box, number: int, why: str, *, lives: bool = False) -> NoReturn:
        """The end of action ``number`` was not seen: no observation, no replay. ``lives``: Docker knows of no end."""
        if box.record.state is State.ACTING:
            self._keeper.go(box, Event.FATE_UNKNOWN, f"action {number}: {why}")
            self._keeper.save(box, durable=True)
        said = "" if lives else await self._keeper.thread(self._keeper.host.engine.why_dead, box.record.container_id)
        raise SandboxLost(
            f"{box.record.sandbox_id} was lost in action {number} ({why}{said and f'; Docker: {said}'}): "
            "what the action did is unknown",
            kept=f"checkpoint {box.ready.checkpoint_id} at boundary {box.ready.boundary}"
            if box.ready
            else "no checkpoint",
            remedy="restore, and generate again from that boundary" if box.ready else "start a new sandbox",
        )


def _memory(killed: int, most_mb: int) -> str:
    return f"memory: {killed} killed at {most_mb} MiB" if killed else ""


def _put(link: AgentLink, number: int, file: FileIn, user: str) -> None:
    if stat.S_ISDIR(file.mode):
        link.make_folder(number, file.path, stat.S_IMODE(file.mode), user)
    else:
        link.write_file(number, file.path, file.data, file.mode, user, file.append)
