"""Sandboxes of one host: requests come in, the table in ``core`` decides, and this shell does it in that order.

One gate per sandbox keeps actions and checkpoints apart (an action that comes during a checkpoint waits, it is not
refused). Restore and destroy do not queue at the gate: they are decided at once by the state. Blocking work (agent,
Docker, CRIU, copies) runs in threads; all states change in the event loop only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from belayer.clock import Stopwatch
from belayer.config import Envkeeper
from belayer.errors import (
    BelayerError,
    ClaimTaken,
    Fenced,
    Refused,
    RestoreFailed,
    SandboxLost,
    SandboxUnknown,
    from_code,
)
from belayer.ids import is_name, new_sandbox_id
from belayer.messages.sandbox import (
    CreateSandbox,
    DestroySandbox,
    ExecAction,
    FullCheckpoint,
    FullRestore,
    InjectSandboxFault,
    Observation,
)
from belayer.paths import Paths
from belayer.procs import boot_id, start_time
from envkeeper import freezer, restore, upper
from envkeeper.agentlink import MAX_COMMAND, ActionResult, AgentError, AgentLink, open_pidfd
from envkeeper.checkpoint import Checkpointer, Draft, Subject
from envkeeper.core import Event, Go, Refuse, State, decide
from envkeeper.engine import Life, Recipe
from envkeeper.host import Host
from envkeeper.records import Records, SandboxRecord
from envkeeper.store import Manifest, RecipeRecord, Store

T = TypeVar("T")


@dataclass(slots=True)
class Box:
    """One sandbox. ``pidfd`` is -1 when it has no life; it is closed only by ``Keeper._let_go``."""

    record: SandboxRecord
    store: Store
    life: Life | None = None
    pidfd: int = -1
    link: AgentLink | None = None
    ready: Manifest | None = None
    ready_digest: str = ""
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)  # taken before the gate, never inside it


class Keeper:
    """``adopt`` (envkeeper.adopt) fills ``boxes`` before the first request."""

    def __init__(self, config: Envkeeper, paths: Paths, host: Host, log: Any) -> None:
        self.config, self.paths, self.host, self.log = config, paths, host, log
        self.boxes: dict[str, Box] = {}
        self.records = Records(paths.state / "sandboxes")
        self.restorer = restore.Restorer(host.engine, paths.checkpoints / ".restores", host.search)
        paths.checkpoints.mkdir(mode=0o700, exist_ok=True)
        reflink = upper.shares_blocks(Path(host.versions["data_root"]), paths.checkpoints)
        self._checkpointer = Checkpointer(host.criu, host.versions, config.checkpoint_timeout_s, reflink=reflink)
        self._pool = ThreadPoolExecutor(max_workers=256, thread_name_prefix="env")
        self._chores: set[asyncio.Future[None]] = set()

    # ---- requests ----

    async def create(self, ask: CreateSandbox) -> Box:
        sandbox_id = ask.name or new_sandbox_id()
        if not is_name(sandbox_id):
            raise Refused(f"{sandbox_id!r} is no name: 1-48 of a-z 0-9 _ . -")
        if sandbox_id in self.boxes:
            raise Refused(f"there is a sandbox {sandbox_id} already", remedy="destroy it, or take another name")
        recipe = RecipeRecord(
            image_id="",
            agent=str(self.host.agent),
            hostname=sandbox_id,
            memory_mb=ask.memory_mb or self.config.memory_mb,
            cpus=ask.cpus or self.config.cpus,
            pids=ask.pids or self.config.pids,
            env=ask.env,
        )
        record = SandboxRecord(
            sandbox_id=sandbox_id, state=State.CREATING, incarnation=f"{sandbox_id}.1", lives=1, recipe=recipe
        )
        box = self.boxes[sandbox_id] = Box(record, Store(self.paths.checkpoints, sandbox_id))
        try:
            image_id = await self.thread(self.host.engine.pin, ask.image or self.config.image)
            box.record = msgspec.structs.replace(record, recipe=msgspec.structs.replace(recipe, image_id=image_id))
            life, pidfd, link = await self.thread(self._make, box)
        except BelayerError:
            self.go(box, Event.CREATE_FAILED, "could not be made")
            await self.thread(self._clear, box)
            del self.boxes[sandbox_id]
            raise
        self.live(box, life, pidfd, link)
        self.go(box, Event.CREATED)
        self._save(box, durable=True)
        return box

    async def exec(self, ask: ExecAction) -> Observation:
        """A committed observation, or SandboxLost: never an error text that looks like one (promise E5)."""
        box = self.box(ask.sandbox_id)
        command = ask.command.encode("utf-8", errors="surrogateescape")
        if len(command) > MAX_COMMAND or "\0" in ask.command:
            raise Refused(f"a command of {len(command)} bytes, or one with a NUL, cannot be an action")
        async with box.gate:
            self._current(box, ask.incarnation, ask.boundary)
            self.go(box, Event.ACT)
            link, number = _alive(box), box.record.boundary + 1
            timeout = ask.timeout_s or self.config.action_timeout_s
            watch = Stopwatch()
            try:
                result = await self.thread(link.run, number, command, timeout, self.config.max_output_bytes)
            except (SandboxLost, AgentError, OSError) as why:
                await self._lose(box, number, str(why))
            if box.record.state is not State.ACTING:
                await self._lose(box, number, "it died in the moment of its answer")
            box.record = msgspec.structs.replace(box.record, boundary=number, context_digest=ask.context_digest)
            self.go(box, Event.COMMITTED)
            self._save(box, durable=False)
            return _observation(box.record, result, watch.ms())

    async def checkpoint(self, ask: FullCheckpoint) -> tuple[Box, float, dict[str, float]]:
        """The box with its new READY, total milliseconds and those of the phases."""
        box = self.box(ask.sandbox_id)
        watch = Stopwatch()
        async with box.publishing:  # in order: READY never moves back
            async with box.gate:
                draft = await self._capture(box, ask)
            # From here on actions run: what was captured is a private copy.
            manifest, digest, phases = await self.thread(self._checkpointer.publish, draft, box.store)
            box.ready, box.ready_digest = manifest, digest
            self.log.info(
                "ready", sandbox=ask.sandbox_id, checkpoint=manifest.checkpoint_id, boundary=manifest.boundary
            )
            total = watch.ms()
            await self.thread(box.store.prune, self.config.keep_checkpoints)
        return box, total, phases

    async def _capture(self, box: Box, ask: FullCheckpoint) -> Draft:
        self._current(box, ask.incarnation, ask.boundary)
        self.go(box, Event.CAPTURE)
        link, record, life = _alive(box), box.record, box.life
        assert life is not None
        subject = Subject(
            record.sandbox_id, record.incarnation, record.boundary, ask.context_digest, life, record.recipe
        )
        try:
            draft = await self.thread(self._checkpointer.capture, subject, link, box.store)
        except BelayerError as why:
            self.go(box, Event.DIED if isinstance(why, SandboxLost) else Event.CAPTURE_FAILED, str(why))
            if box.record.state is State.LOST:
                self._save(box, durable=True)
                raise SandboxLost(f"the sandbox died during a checkpoint: {why.message}") from why
            raise
        self.go(box, Event.CAPTURED, f"frozen {draft.frozen_ms:.0f} ms")
        return draft

    async def restore(self, ask: FullRestore) -> tuple[Box, Manifest, restore.Restored, float]:
        """Into a fresh container; the old life is fenced first. Of two at once one gets ClaimTaken."""
        box = self.box(ask.sandbox_id)
        async with box.publishing:  # a captured prefix on its way to READY is worth waiting for
            wanted = ask.checkpoint_id or (box.ready.checkpoint_id if box.ready else "")
        if not wanted:
            raise RestoreFailed(f"{ask.sandbox_id} has no READY checkpoint", remedy="start a new sandbox")
        watch = Stopwatch()
        # Before anything is touched: a checkpoint that cannot be read must not cost a living sandbox.
        manifest, _ = await self.thread(box.store.load, wanted)
        record = box.record
        if ask.incarnation and ask.incarnation != record.incarnation:
            raise ClaimTaken(f"{ask.incarnation} is restored already, as {record.incarnation}")
        self.go(box, Event.RESTORE, wanted)
        incarnation = f"{record.sandbox_id}.{record.lives + 1}"
        try:
            box.store.claim(record.incarnation, f"{os.getpid()} {wanted}")
            self._save(box, durable=False)
            await self._fence(box)
            fenced = watch.ms()
            back = await self.thread(
                self.restorer.run,
                manifest,
                box.store,
                incarnation,
                self.config.restore_timeout_s,
                partial(self._making, box),
            )
        except BelayerError as why:
            self.go(box, Event.RESTORE_FAILED, str(why))
            self._save(box, durable=True, making="")
            if not isinstance(why, ClaimTaken):
                box.store.release(record.incarnation)
            raise
        back.phases_ms["fence"] = fenced
        old = record.container_id
        box.record = msgspec.structs.replace(
            box.record,
            incarnation=incarnation,
            lives=record.lives + 1,
            boundary=manifest.boundary,
            context_digest=manifest.context_digest,
            recipe=manifest.recipe,
            making="",
        )
        self.live(box, back.life, back.pidfd, back.link)
        self.go(box, Event.PROVED, back.proof)
        self._save(box, durable=True)
        self._chore(self.host.engine.remove, old)
        return box, manifest, back, watch.ms()

    async def destroy(self, ask: DestroySandbox) -> Box:
        box = self.box(ask.sandbox_id)
        self.go(box, Event.DESTROY)
        self._save(box, durable=True)
        await self._fence(box)
        async with box.publishing, box.gate:  # an action that was in flight has told its caller by now
            await self.thread(self._clear, box, ask.keep_checkpoints)
        self.boxes.pop(ask.sandbox_id, None)
        return box

    async def inject(self, ask: InjectSandboxFault) -> tuple[int, str, float]:
        """SIGKILL to PID 1 of the sandbox; returns (pid, what was seen, milliseconds). Refused unless it lives."""
        box = self.box(ask.sandbox_id)
        if ask.kind != "kill":
            raise Refused(f"there is no sandbox fault {ask.kind!r}; there is: kill")
        _alive(box)
        pid, container, watch = box.record.pid, box.record.container_id, Stopwatch()
        pidfd = os.dup(box.pidfd)
        try:
            await self.thread(restore.fence, pidfd, None)
        finally:
            os.close(pidfd)
        ms = watch.ms()
        why = await self.thread(self.host.engine.why_dead, container)
        return pid, f"pidfd of PID 1 readable (dead); Docker: {why}", ms

    # ---- for requests and adoption ----

    def box(self, sandbox_id: str) -> Box:
        try:
            return self.boxes[sandbox_id]
        except KeyError:
            raise SandboxUnknown(f"no sandbox {sandbox_id}", remedy="see `belayerctl sandboxes`") from None

    def go(self, box: Box, event: Event, detail: str = "") -> None:
        """Take the transition, or raise what the table refuses with."""
        before = box.record.state
        decision = decide(before, event)
        if isinstance(decision, Refuse):
            why = f"{box.record.sandbox_id}: {decision.why}"
            if box.record.reason and before is State.LOST:
                why += f" ({box.record.reason})"
            raise from_code(decision.code, why)
        if not isinstance(decision, Go):
            return
        reason = detail if decision.state is State.LOST else ""
        box.record = msgspec.structs.replace(box.record, state=decision.state, reason=reason or "")
        self.log.info(
            "sandbox",
            sandbox=box.record.sandbox_id,
            incarnation=box.record.incarnation,
            before=str(before),
            after=str(decision.state),
            cause=str(event),
            boundary=box.record.boundary,
            detail=detail,
        )

    def live(self, box: Box, life: Life, pidfd: int, link: AgentLink) -> None:
        """Take a proven life into service and watch for its death."""
        self._let_go(box)
        box.life, box.pidfd, box.link = life, pidfd, link
        box.record = msgspec.structs.replace(
            box.record,
            container_id=life.container_id,
            pid=life.pid,
            start_time=start_time(life.pid),
            boot_id=boot_id(),
        )
        asyncio.get_running_loop().add_reader(pidfd, self._died, box, pidfd)

    async def thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def close(self) -> None:
        """Leave all sandboxes running. Calls in flight end; their actions' fate is decided at the next start."""
        for box in self.boxes.values():
            if box.link is not None:
                box.link.abort()
        if self._chores:
            await asyncio.wait(self._chores, timeout=10)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- inside ----

    def _make(self, box: Box) -> tuple[Life, int, AgentLink]:
        kept, engine = box.record.recipe, self.host.engine
        recipe = Recipe(kept.image_id, kept.agent, kept.hostname, kept.memory_mb, kept.cpus, kept.pids, dict(kept.env))
        container_id = engine.create(recipe, box.record.sandbox_id, box.record.incarnation)
        box.record = msgspec.structs.replace(box.record, container_id=container_id)
        self.records.save(box.record, durable=True)
        engine.start(container_id)
        life = engine.life(container_id)
        pidfd = open_pidfd(life.pid)
        link = AgentLink(life.pid, pidfd)
        try:
            link.wait_ready(self.config.restore_timeout_s)
        except BelayerError:
            os.close(pidfd)
            raise
        return life, pidfd, link

    def _clear(self, box: Box, keep_checkpoints: bool = False) -> None:
        for container_id in (box.record.container_id, box.record.making):
            if container_id:
                self.host.engine.remove(container_id)
        if not keep_checkpoints:
            box.store.destroy()
        self.records.forget(box.record.sandbox_id)

    def _making(self, box: Box, container_id: str) -> None:
        """Called in the restorer's thread; nothing else changes the record of a sandbox in RESTORING."""
        box.record = msgspec.structs.replace(box.record, making=container_id)
        self.records.save(box.record, durable=False)

    async def _fence(self, box: Box) -> None:
        if box.pidfd < 0:
            if box.record.container_id:  # its agent did not answer at adoption: dead or hung, nobody knows
                await self.thread(self.host.engine.remove, box.record.container_id)
            return
        asyncio.get_running_loop().remove_reader(box.pidfd)
        group = None
        if box.life is not None and start_time(box.life.pid) == box.record.start_time:
            group = await self.thread(_group_of, box.life.pid)
        await self.thread(restore.fence, box.pidfd, group)
        self._let_go(box)

    def _let_go(self, box: Box) -> None:
        if box.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(box.pidfd)
            os.close(box.pidfd)
        box.life, box.pidfd, box.link = None, -1, None

    def _died(self, box: Box, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        if box.pidfd != pidfd:
            return
        during = f" in the middle of action {box.record.boundary + 1}" if box.record.state is State.ACTING else ""
        self.go(box, Event.DIED, f"its PID 1 died{during}")
        self._save(box, durable=True)

    async def _lose(self, box: Box, number: int, why: str) -> NoReturn:
        """The end of action ``number`` was not seen: no observation, no replay."""
        if box.record.state is State.ACTING:
            self.go(box, Event.FATE_UNKNOWN, f"action {number}: {why}")
            self._save(box, durable=True)
        docker = await self.thread(self.host.engine.why_dead, box.record.container_id)
        raise SandboxLost(
            f"{box.record.sandbox_id} was lost in action {number} ({why}; Docker: {docker}): "
            "what the action did is unknown",
            kept=f"checkpoint {box.ready.checkpoint_id} at boundary {box.ready.boundary}"
            if box.ready
            else "no checkpoint",
            remedy="restore, and generate again from that boundary" if box.ready else "start a new sandbox",
        )

    def _current(self, box: Box, incarnation: str, boundary: int) -> None:
        """The one gate for stale requests."""
        record = box.record
        if record.state is State.RUNNING and (incarnation, boundary) != (record.incarnation, record.boundary):
            raise Fenced(
                f"the request is for {incarnation} at boundary {boundary}; "
                f"{record.sandbox_id} is {record.incarnation} at {record.boundary}"
            )

    def _save(self, box: Box, *, durable: bool, making: str | None = None) -> None:
        if making is not None:
            box.record = msgspec.structs.replace(box.record, making=making)
        self.records.save(box.record, durable=durable)

    def _chore(self, function: Callable[..., None], *args: Any) -> None:
        """Work that nobody waits for; the next start does it when this life does not get to it."""
        future = asyncio.ensure_future(self.thread(function, *args))
        self._chores.add(future)
        future.add_done_callback(self._chore_done)

    def _chore_done(self, future: asyncio.Future[None]) -> None:
        self._chores.discard(future)
        if not future.cancelled() and future.exception() is not None:
            self.log.warning("chore failed", why=str(future.exception()))


def _alive(box: Box) -> AgentLink:
    if box.link is None or box.record.state not in (State.RUNNING, State.ACTING, State.CAPTURING):
        raise SandboxLost(f"{box.record.sandbox_id} has no living container ({box.record.reason or box.record.state})")
    return box.link


def _group_of(pid: int) -> freezer.Freezer | None:
    try:
        return freezer.of_process(pid)
    except FileNotFoundError:
        return None


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
