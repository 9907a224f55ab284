"""envkeeper's socket: messages to keeper calls and back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from belayer import log
from belayer.clock import Stopwatch
from belayer.config import Config
from belayer.daemon import OnlyOne, feed_watchdog, new_instance, notify, serve_until
from belayer.errors import BadMessage, HostNotReady
from belayer.messages import sandbox as m
from belayer.messages.common import Done, FaultProof, Ping, Pong
from belayer.paths import Paths
from belayer.rpc import Server
from envkeeper import host
from envkeeper.acting import Acting
from envkeeper.adopt import adopt
from envkeeper.asking import check
from envkeeper.docker_port import EngineFault
from envkeeper.fork import Forks
from envkeeper.keeper import Box, Keeper
from envkeeper.lineage import Lineage
from envkeeper.prefix import Back, Prefixes
from envkeeper.store import Manifest

NAME = "envkeeper"
_COLLECT_EVERY_S = 30.0


class Service:
    def __init__(self, keeper: Keeper, acting: Acting, prefixes: Prefixes) -> None:
        self._keeper, self._acting, self._prefixes, self._instance = keeper, acting, prefixes, new_instance()
        self._forks = Forks(keeper, prefixes.backend)

    async def handle(self, ask: Any) -> msgspec.Struct:
        check(ask)  # first: a bad field must change nothing, and end nobody's daemon
        keeper = self._keeper
        match ask:
            case Ping():
                return Pong(daemon=NAME, pid=os.getpid(), instance=self._instance)
            case m.CreateSandbox():
                return info(await keeper.create(ask))
            case m.ExecAction():
                return await self._acting.exec(ask)
            case m.WriteFiles():
                return await self._acting.write_files(ask)
            case m.ReadPath():
                return await self._acting.read_path(ask)
            case m.FullCheckpoint():
                box, total, phases = await self._prefixes.checkpoint(ask)
                assert box.ready is not None
                return checkpoint_info(box.ready, box.ready_digest, total, phases)
            case m.FullRestore():
                box, back = await self._prefixes.restore(ask)
                return restore_info(box, back)
            case m.ListSandboxes():
                rows = tuple(info(box) for _, box in sorted(keeper.boxes.items()))
                return m.SandboxList(sandboxes=rows, instance=self._instance, pid=os.getpid(), waiting=len(keeper.pool))
            case m.ForkSandbox():
                forks, total = await self._forks.fork(ask)
                return m.Forked(forks=tuple(restore_info(box, back) for box, back in forks), total_ms=round(total, 3))
            case m.ListLineage():
                return await keeper.thread(self._lineages, ask.sandbox_id)
            case m.ListCheckpoints():
                return await keeper.thread(self._checkpoints, ask.sandbox_id)
            case m.DestroySandbox():
                watch = Stopwatch()
                await keeper.destroy(ask)
                return Done(ms=watch.ms(), detail="checkpoints kept" if ask.keep_checkpoints else "nothing kept")
            case m.InjectSandboxFault():
                pid, seen, ms = await self._acting.inject(ask)
                return FaultProof(fault=f"{ask.kind}-sandbox", target=ask.sandbox_id, pid=pid, seen=seen, ms=ms)
        raise BadMessage(f"envkeeper does not know {type(ask).__name__}")

    def _checkpoints(self, sandbox_id: str) -> m.CheckpointList:
        """Also of a sandbox that ended and kept them."""
        keeper = self._keeper
        store = keeper.store_of(sandbox_id) if keeper.ended(sandbox_id) else keeper.box(sandbox_id).store
        rows = tuple(checkpoint_info(row, "", 0.0, row.phases_ms) for row in store.all())
        pointer = store.ready()
        return m.CheckpointList(checkpoints=rows, ready=pointer.checkpoint_id if pointer else "")

    def _lineages(self, sandbox_id: str) -> m.Lineages:
        keeper = self._keeper
        names = [sandbox_id] if sandbox_id else sorted(keeper.boxes)
        if sandbox_id and not keeper.ended(sandbox_id):
            keeper.box(sandbox_id)
        return m.Lineages(births={name: Lineage(keeper.paths.checkpoints / name).births() for name in names})


def restore_info(box: Box, back: Back) -> m.RestoreInfo:
    made, restored = back.manifest, back.restored
    return m.RestoreInfo(
        sandbox_id=box.record.sandbox_id,
        incarnation=box.record.incarnation,
        checkpoint_id=made.checkpoint_id if made else "",
        boundary=made.boundary if made else 0,
        context_digest=made.context_digest if made else "",
        container_id=restored.life.container_id,
        total_ms=round(back.total_ms, 3),
        phases_ms=_rounded(restored.phases_ms),
        proof=restored.proof,
        path=back.path,
        notes=back.notes,
        clock_gap_s=back.aftermath.clock_gap_s,
        stale=back.aftermath.stale,
    )


def info(box: Box) -> m.SandboxInfo:
    record, ready = box.record, box.ready
    return m.SandboxInfo(
        sandbox_id=record.sandbox_id,
        incarnation=record.incarnation,
        state=str(record.state),
        boundary=record.boundary,
        container_id=record.container_id,
        pid=record.pid if box.pidfd >= 0 else 0,
        image=record.recipe.image_id,
        ready_boundary=ready.boundary if ready else -1,
        ready_checkpoint=ready.checkpoint_id if ready else "",
        context_digest=record.context_digest,
        user=record.recipe.user,
        allow=record.recipe.allow,
        labels=dict(record.recipe.labels),
        reason=record.reason,
    )


def checkpoint_info(row: Manifest, digest: str, total_ms: float, phases: dict[str, float]) -> m.CheckpointInfo:
    return m.CheckpointInfo(
        checkpoint_id=row.checkpoint_id,
        sandbox_id=row.sandbox_id,
        boundary=row.boundary,
        context_digest=row.context_digest,
        digest=digest,
        frozen_ms=row.frozen_ms,
        total_ms=round(total_ms, 3),
        nbytes=row.nbytes,
        phases_ms=_rounded(phases),
    )


def _rounded(phases: dict[str, float]) -> dict[str, float]:
    return {name: round(ms, 3) for name, ms in phases.items()}


async def _broken() -> None:
    """Ends with the exception of a callback of the event loop (a death that was seen), which the loop alone would only
    print: what is on record is then not what was seen."""
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()

    def handle(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        _loop.default_exception_handler(context)
        if "handle" in context and "exception" in context and not broken.done():
            broken.set_exception(context["exception"])

    loop.set_exception_handler(handle)
    await broken


@contextlib.contextmanager
def _docker_answers() -> Iterator[None]:
    """A Docker that answers 500 in this moment may answer in the next: the start is tried again (exit 3)."""
    try:
        yield
    except EngineFault as why:
        raise HostNotReady(why.message, remedy=why.remedy) from why


async def run(config: Config, paths: Paths, stop: asyncio.Event, prefix: Path = host.PREFIX) -> None:
    """The daemon until ``stop``. Raises HostUnfit before anything was created."""
    logger = log.setup(NAME)
    with _docker_answers():
        found = await asyncio.to_thread(host.inspect, config.envkeeper, paths, prefix)
        paths.make()
        only = OnlyOne(paths.run, NAME)
        keeper = Keeper(config.envkeeper, paths, found, logger)
        prefixes = Prefixes(keeper)
        await adopt(keeper, prefixes.backend)
        server = Server(paths.envkeeper_sock, m.Request, Service(keeper, Acting(keeper), prefixes).handle)
        await keeper.fill_pool()
    logger.info("ready", sandboxes=len(keeper.boxes), **found.versions)
    notify("READY=1")
    try:
        # The collector meets faults of Docker and of the disk, and goes on. What else it raises is a broken invariant,
        # like that of a request: the daemon ends, and adopts what runs when it is back.
        collecting = prefixes.collector.run_for_ever(_COLLECT_EVERY_S)
        await serve_until(stop, server.serve(), collecting, _broken(), feed_watchdog())
    finally:
        await keeper.close()
        del only
