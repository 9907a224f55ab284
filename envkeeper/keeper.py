"""Sandboxes of one host: requests come in, the table in ``core`` decides, and this shell does it in that order.

Here: the boxes, making and ending them, and watching for their death. What happens in them is in ``acting``, what is
kept of them in ``prefix``.

One gate per sandbox keeps actions and checkpoints apart (an action that comes during a checkpoint waits, it is not
refused). Restore and destroy do not queue at the gate: they are decided at once by the state. Blocking work (agent,
Docker, CRIU, copies) runs in threads; all states change in the event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from belayer.clock import wall
from belayer.config import Envkeeper
from belayer.errors import (
    BelayerError,
    Fenced,
    HostNotReady,
    Refused,
    SandboxLost,
    SandboxUnknown,
    from_code,
)
from belayer.ids import is_name, new_sandbox_id
from belayer.messages.sandbox import (
    Birth,
    CreateSandbox,
    DestroySandbox,
)
from belayer.paths import Paths
from belayer.procs import boot_id, start_time
from envkeeper import freezer, network, restore
from envkeeper.agentlink import AgentLink, open_pidfd
from envkeeper.core import Event, Go, Refuse, State, decide
from envkeeper.docker_port import EngineFault
from envkeeper.engine import Life
from envkeeper.failpoints import Point, reach
from envkeeper.host import Host
from envkeeper.lineage import Lineage
from envkeeper.lives import Lives
from envkeeper.passing import Hindered
from envkeeper.patience import FEW_S, patiently
from envkeeper.pool import Pool, Waiting
from envkeeper.recipe import Recipe
from envkeeper.records import Records, SandboxRecord
from envkeeper.seal import seal_of
from envkeeper.store import Manifest, Store
from envkeeper.story import Story

T = TypeVar("T")


@dataclass(slots=True)
class Box:
    """One sandbox. ``pidfd`` is -1 when it has no life; it is closed only by ``Keeper.let_go``."""

    record: SandboxRecord
    store: Store
    life: Life | None = None
    pidfd: int = -1
    holder_fd: int = -1  # pidfd of the container that holds its network, -1 for none
    link: AgentLink | None = None
    ready: Manifest | None = None
    ready_digest: str = ""
    injected: bool = False  # its death was asked for
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)  # taken before the gate, never inside it


class Keeper:
    """``adopt`` (envkeeper.adopt) fills ``boxes`` before the first request."""

    def __init__(self, config: Envkeeper, paths: Paths, host: Host, log: Any) -> None:
        self.config, self.paths, self.host, self.log = config, paths, host, log
        self.boxes: dict[str, Box] = {}
        self.records = Records(paths.state / "sandboxes")
        self.lives, self.story = Lives(paths.run / "lives"), Story(paths.incidents, log)
        self.seal = seal_of(config, paths)
        paths.checkpoints.mkdir(mode=0o700, exist_ok=True)
        self._threads = ThreadPoolExecutor(max_workers=256, thread_name_prefix="env")
        self._chores: set[asyncio.Future[None]] = set()
        self.pool = Pool(config.pool, self.thread, self._make, self._drop, log)

    # ---- requests ----

    async def create(self, ask: CreateSandbox) -> Box:
        sandbox_id = ask.name or new_sandbox_id()
        self.check_name(sandbox_id)
        recipe = self._recipe(ask)
        record = SandboxRecord(
            sandbox_id=sandbox_id, state=State.CREATING, incarnation=f"{sandbox_id}.1", lives=1, recipe=recipe
        )
        box = self.boxes[sandbox_id] = Box(record, self.store_of(sandbox_id))
        born = Birth(incarnation=record.incarnation, sandbox_id=sandbox_id, kind="created", at=round(wall(), 3))
        try:
            await self.thread(Lineage(box.store.home).add, born)
            pinned = await self.thread(self._pin, recipe, ask.image)
            box.record = msgspec.structs.replace(record, recipe=pinned)
            waiting = self.pool.take(pinned)
            life, pidfd, link = (
                await self.thread(self._name, box, waiting) if waiting else await self.thread(self._make_box, box)
            )
        except BelayerError:
            self.go(box, Event.CREATE_FAILED, "could not be made")
            await self.finish(box)
            raise
        self.live(box, life, pidfd, link)
        self.go(box, Event.CREATED)
        self.save(box, durable=True)
        return box

    async def destroy(self, ask: DestroySandbox) -> None:
        if ask.sandbox_id not in self.boxes and self.ended(ask.sandbox_id) and not ask.keep_checkpoints:
            await self.thread(self.store_of(ask.sandbox_id).destroy)
            return
        box = self.box(ask.sandbox_id)
        self.go(box, Event.DESTROY)
        box.record = msgspec.structs.replace(box.record, keep=ask.keep_checkpoints)
        self.save(box, durable=True)
        reach(Point.DESTROY_RECORDED)
        await self.fence(box)
        reach(Point.DESTROY_FENCED)
        async with box.publishing, box.gate:  # an action that was in flight has told its caller by now
            await self.thread(self.clear, box)
        self.boxes.pop(ask.sandbox_id, None)

    async def finish(self, box: Box) -> None:
        """Remove what is left of a destroyed sandbox. When Docker is away it stays listed as destroyed, and is tried
        again now and then and at the next start."""
        try:
            await self.thread(self.clear, box)
        except (BelayerError, OSError) as why:
            self.log.error("not removed yet", sandbox=box.record.sandbox_id, why=str(why))
        else:
            self.boxes.pop(box.record.sandbox_id, None)

    async def unmake(self, box: Box) -> None:
        """Remove what a failed restore left half made. It may run: so it stays on record until it is gone, and no other
        life of the sandbox is made before."""
        making = box.record.making
        if not making:
            return
        try:
            await self.thread(self.host.engine.unmake, making)
        except BelayerError as why:
            self.log.error("half made and not removed yet", sandbox=box.record.sandbox_id, why=str(why))
            return
        if box.record.making == making:
            self.save(box, durable=True, making="")

    async def finish_all(self) -> None:
        """Those whose removal failed; one whose destroy is under way holds its gate."""
        for box in list(self.boxes.values()):
            if box.record.state is State.LOST:
                await self.unmake(box)
            if box.record.state is State.DESTROYED and not box.gate.locked():
                async with box.gate:
                    await self.finish(box)

    # ---- for requests and adoption ----

    def box(self, sandbox_id: str) -> Box:
        try:
            return self.boxes[sandbox_id]
        except KeyError:
            raise SandboxUnknown(f"no sandbox {sandbox_id}", remedy="see `belayerctl sandboxes`") from None

    def store_of(self, sandbox_id: str) -> Store:
        return Store(self.paths.checkpoints, sandbox_id, seal=self.seal)

    def ended(self, sandbox_id: str) -> bool:
        """There is no such sandbox, but its checkpoints were kept."""
        known = is_name(sandbox_id) and sandbox_id not in self.boxes
        return known and (self.paths.checkpoints / sandbox_id / "ck").is_dir()

    def check_name(self, sandbox_id: str) -> None:
        """Raises Refused unless a new sandbox may be named so."""
        if not is_name(sandbox_id):
            raise Refused(f"{sandbox_id!r} is no name: 1-48 of a-z 0-9 _ . -")
        if sandbox_id in self.boxes:
            raise Refused(f"there is a sandbox {sandbox_id} already", remedy="destroy it, or take another name")
        if self.ended(sandbox_id):  # its READY would be taken for the new one's
            raise Refused(
                f"checkpoints of an ended sandbox {sandbox_id} are kept",
                remedy="fork it, destroy it for good, or take another name",
            )

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
        self.story.transition(box.record, before, event, detail, injected=box.injected)

    def live(self, box: Box, life: Life, pidfd: int, link: AgentLink) -> None:
        """Take a proven life into service and watch for its death."""
        self.let_go(box)
        box.life, box.pidfd, box.link = life, pidfd, link
        box.record = msgspec.structs.replace(
            box.record,
            container_id=life.container_id,
            pid=life.pid,
            start_time=start_time(life.pid),
            boot_id=boot_id(),
        )
        asyncio.get_running_loop().add_reader(pidfd, self._died, box, pidfd)
        if life.holder_pid:
            self._watch_holder(box, life.holder_pid)

    def _watch_holder(self, box: Box, pid: int) -> None:
        """Without its holder a sandbox has no network any more, and nothing inside would be told: it must end."""
        try:
            box.holder_fd = open_pidfd(pid)
        except SandboxLost:
            self._holder_died(box, -1)
            return
        asyncio.get_running_loop().add_reader(box.holder_fd, self._holder_died, box, box.holder_fd)

    def _holder_died(self, box: Box, fd: int) -> None:
        if fd >= 0:
            asyncio.get_running_loop().remove_reader(fd)
        self.log.error("the holder of its network died: ending the sandbox", sandbox=box.record.sandbox_id)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)

    async def thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def close(self) -> None:
        """Leave all sandboxes running. Calls in flight end; their actions' fate is decided at the next start."""
        for box in self.boxes.values():
            if box.link is not None:
                box.link.abort()
        await self.pool.close()
        if self._chores:
            await asyncio.wait(self._chores, timeout=10)
        self.story.close()
        if self.seal is not None:
            self.seal.leave()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- inside ----

    def _recipe(self, ask: CreateSandbox) -> Recipe:
        """Without what only Docker knows. Raises Refused for an egress that this host does not allow."""
        return Recipe(
            image_id="",
            agent=str(self.host.agent),
            hostname=ask.hostname or self.config.hostname,
            memory_mb=ask.memory_mb or self.config.memory_mb,
            cpus=ask.cpus or self.config.cpus,
            pids=ask.pids or self.config.pids,
            env=ask.env,
            user=ask.user,
            allow=network.permit(ask.allow, self.config.egress),
            labels=tuple(sorted(ask.labels.items())),
            disk_mb=ask.disk_mb or self.config.disk_mb,
        )

    def _pin(self, recipe: Recipe, image: str) -> Recipe:
        name = image or self.config.image
        image_id, user = self.host.engine.pin(name)
        return msgspec.structs.replace(recipe, image=name, image_id=image_id, user=recipe.user or user)

    async def fill_pool(self) -> None:
        """Begin to keep the pool full. Raises HostUnfit."""
        recipe = await self.thread(self._pin, self._recipe(CreateSandbox()), "")
        self.pool.start(recipe, self._hurried)

    def _hurried(self) -> bool:
        busy = (State.CAPTURING, State.RESTORING)
        return any(box.publishing.locked() or box.record.state in busy for box in self.boxes.values())

    def _make_box(self, box: Box) -> tuple[Life, int, AgentLink]:
        def made(container_id: str) -> None:
            box.record = msgspec.structs.replace(box.record, container_id=container_id)
            self.records.save(box.record, durable=True)
            reach(Point.CREATE_RECORDED)

        record = box.record
        return self._make(record.recipe, record.sandbox_id, record.incarnation, made)

    def _make(
        self, recipe: Recipe, sandbox_id: str, incarnation: str, made: Callable[[str], None] = lambda _: None
    ) -> tuple[Life, int, AgentLink]:
        """A started container whose agent answers; another one where the engine hindered the first, in which nothing
        has been done. What fails is removed by whoever has its id, or by its label. Raises HostNotReady."""
        try:
            return patiently(lambda: self._make_once(recipe, sandbox_id, incarnation, made), lambda: None, FEW_S)
        except Hindered as why:
            raise HostNotReady(why.message, kept="the other sandboxes", remedy="create it again later") from why

    def _make_once(
        self, recipe: Recipe, sandbox_id: str, incarnation: str, made: Callable[[str], None]
    ) -> tuple[Life, int, AgentLink]:
        engine = self.host.engine
        with _engines_own():
            container_id = engine.create(recipe, sandbox_id, incarnation, self.lives.make(incarnation))
        made(container_id)
        try:
            with _engines_own():
                engine.start(container_id)
                reach(Point.CREATE_STARTED)
                life = engine.life(container_id)
            pidfd = open_pidfd(life.pid)
            try:
                link = AgentLink(life.pid, pidfd)
                link.wait_ready(self.config.restore_timeout_s)
            except BelayerError:
                os.close(pidfd)
                raise
        except BelayerError:
            with contextlib.suppress(BelayerError):  # what failed before is what must be told
                engine.remove(container_id)
            raise
        return life, pidfd, link

    def _name(self, box: Box, waiting: Waiting) -> tuple[Life, int, AgentLink]:
        """A sandbox of the pool becomes this one: on record before anything is told of it."""
        self.lives.rename(waiting.born, box.record.incarnation)
        box.record = msgspec.structs.replace(box.record, container_id=waiting.life.container_id)
        self.records.save(box.record, durable=True)
        reach(Point.CREATE_RECORDED)
        return waiting.life, waiting.pidfd, waiting.link

    def _drop(self, waiting: Waiting) -> None:
        os.close(waiting.pidfd)
        self.host.engine.remove(waiting.life.container_id)
        self.lives.remove(waiting.born)

    def clear(self, box: Box) -> None:
        """The end of a sandbox on disk; its record goes last, so that a killed envkeeper does it again."""
        for container_id in (box.record.container_id, box.record.making):
            if container_id:
                self.host.engine.remove(container_id)
        if box.record.recipe.allow:
            self.host.engine.remove_holders(box.record.sandbox_id)
        reach(Point.DESTROY_REMOVED)
        if not box.record.keep:
            box.store.destroy()
        self.lives.remove(box.record.incarnation)
        self.records.forget(box.record.sandbox_id)

    async def fence(self, box: Box) -> None:
        if box.pidfd < 0:
            if box.record.container_id:  # its agent did not answer at adoption: dead or hung, nobody knows
                await self.thread(self.host.engine.remove, box.record.container_id)
            return
        asyncio.get_running_loop().remove_reader(box.pidfd)
        group = None
        if box.life is not None and start_time(box.life.pid) == box.record.start_time:
            group = await self.thread(_group_of, box.life.pid)
        await self.thread(restore.fence, box.pidfd, group)
        self.let_go(box)

    def let_go(self, box: Box) -> None:
        if box.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(box.pidfd)
            os.close(box.pidfd)
        if box.holder_fd >= 0:
            asyncio.get_running_loop().remove_reader(box.holder_fd)
            os.close(box.holder_fd)
        box.life, box.pidfd, box.link, box.holder_fd = None, -1, None, -1

    def _died(self, box: Box, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        if box.pidfd != pidfd:
            return
        during = f" in the middle of action {box.record.boundary + 1}" if box.record.state is State.ACTING else ""
        self.go(box, Event.DIED, f"its PID 1 died{during}")
        self.save(box, durable=True)

    def current(self, box: Box, incarnation: str, boundary: int) -> None:
        """The one gate for stale requests."""
        record = box.record
        if record.state is State.RUNNING and (incarnation, boundary) != (record.incarnation, record.boundary):
            raise Fenced(
                f"the request is for {incarnation} at boundary {boundary}; "
                f"{record.sandbox_id} is {record.incarnation} at {record.boundary}"
            )

    def save(self, box: Box, *, durable: bool, making: str | None = None) -> None:
        if making is not None:
            box.record = msgspec.structs.replace(box.record, making=making)
        self.records.save(box.record, durable=durable)

    def chore(self, function: Callable[..., None], *args: Any) -> None:
        """Work that nobody waits for; the next start does it when this life does not get to it."""
        future = asyncio.ensure_future(self.thread(function, *args))
        self._chores.add(future)
        future.add_done_callback(self._chore_done)

    def _chore_done(self, future: asyncio.Future[None]) -> None:
        self._chores.discard(future)
        why = None if future.cancelled() else future.exception()
        if why is not None:
            expected = isinstance(why, BelayerError | OSError)
            self.log.warning("chore failed", why=str(why), exc_info=None if expected else why)


@contextlib.contextmanager
def _engines_own() -> Iterator[None]:
    """An answer of the engine that blames itself (5xx), or is none, is no word about what was asked for (4xx)."""
    try:
        yield
    except EngineFault as why:
        if 400 <= why.status < 500:
            raise
        raise Hindered(why.message) from why


def alive(box: Box) -> AgentLink:
    if box.link is None or box.record.state not in (State.RUNNING, State.ACTING, State.CAPTURING):
        raise SandboxLost(f"{box.record.sandbox_id} has no living container ({box.record.reason or box.record.state})")
    return box.link


def _group_of(pid: int) -> freezer.Freezer | None:
    try:
        return freezer.of_process(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
