"""Fork one checkpoint into N sandboxes: an explicit act, unlike a restore, so no right is consumed (promise E6).

The forks share the checkpoint's files by hard links (no copy, and none depends on the other's life) and restore from
there side by side; its hashes are compared once, beside the restores, and nobody is served before they are in. Each has
its own name, incarnation, notes and lineage from the first moment; the host name stays that of the source, because the
restored processes know it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from functools import partial

import msgspec

from belayer.clock import Stopwatch, wall
from belayer.errors import RestoreFailed, SandboxUnknown
from belayer.messages.sandbox import Birth, ForkSandbox
from envkeeper import restore
from envkeeper.backend import Backend
from envkeeper.core import Event, State
from envkeeper.keeper import Box, Keeper
from envkeeper.lineage import Lineage
from envkeeper.patience import patiently
from envkeeper.prefix import ROOM, Back, aftermath_of
from envkeeper.records import SandboxRecord
from envkeeper.store import Manifest, Store


class Forks:
    """``backend`` is that of the prefixes."""

    def __init__(self, keeper: Keeper, backend: Backend) -> None:
        self._keeper, self._backend = keeper, backend
        self._few = asyncio.Semaphore(2 * (os.cpu_count() or 1))  # more at once only lengthen each

    async def fork(self, ask: ForkSandbox) -> tuple[list[tuple[Box, Back]], float]:
        """All of them or none. Raises Refused, SandboxUnknown, RestoreFailed."""
        keeper, watch = self._keeper, Stopwatch()
        names = self._names(ask)
        source = await self._source(ask.sandbox_id)
        pointer = source.ready() if not ask.checkpoint_id else None
        wanted = ask.checkpoint_id or (pointer.checkpoint_id if pointer else "")
        if not wanted:
            raise RestoreFailed(f"{ask.sandbox_id} has no READY checkpoint", remedy="checkpoint it first")
        manifest, digest = await keeper.thread(source.load, wanted)
        births = _up_to(Lineage(source.home).births(), manifest.incarnation)
        boxes = [self._box(name, ask.sandbox_id, manifest, digest) for name in names]
        hashes = asyncio.ensure_future(keeper.thread(source.verify, manifest))
        done = await asyncio.gather(
            *(self._one(box, source, manifest, births, ask.note, hashes) for box in boxes), return_exceptions=True
        )
        await asyncio.wait([hashes])
        # What is wrong with its files says more than what a restore made of them.
        failed = next((why for why in (hashes.exception(), *done) if isinstance(why, BaseException)), None)
        if failed is not None:
            for box in boxes:
                await self._undo(box)
            if isinstance(failed, OSError):
                raise RestoreFailed(f"a fork of {wanted}: {failed}", kept="the checkpoint", remedy=ROOM) from failed
            raise failed
        return [(box, back) for box, back in zip(boxes, done, strict=True) if isinstance(back, Back)], watch.ms()

    def _names(self, ask: ForkSandbox) -> tuple[str, ...]:
        names = ask.names or tuple(f"{ask.sandbox_id[:38]}-f{secrets.token_hex(4)}" for _ in range(ask.count))
        for name in names:
            self._keeper.check_name(name)
        return names

    async def _source(self, sandbox_id: str) -> Store:
        keeper = self._keeper
        if keeper.ended(sandbox_id):
            return keeper.store_of(sandbox_id)
        if sandbox_id not in keeper.boxes:
            raise SandboxUnknown(f"no sandbox {sandbox_id}, and no checkpoints of one that ended")
        box = keeper.box(sandbox_id)
        async with box.publishing:  # a captured prefix on its way to READY is worth waiting for
            return box.store

    def _box(self, name: str, source: str, manifest: Manifest, digest: str) -> Box:
        record = SandboxRecord(
            sandbox_id=name,
            state=State.CREATING,
            incarnation=f"{name}.1",
            lives=1,
            recipe=manifest.recipe,
            boundary=manifest.boundary,
            context_digest=manifest.context_digest,
            forked_from=source,
        )
        box = Box(record, self._keeper.store_of(name), ready=manifest, ready_digest=digest)
        self._keeper.boxes[name] = box
        return box

    async def _one(
        self,
        box: Box,
        source: Store,
        manifest: Manifest,
        births: tuple[Birth, ...],
        note: str,
        hashes: asyncio.Future[None],
    ) -> Back:
        keeper, record = self._keeper, box.record
        birth = Birth(
            incarnation=record.incarnation,
            sandbox_id=record.sandbox_id,
            kind="forked",
            at=round(wall(), 3),
            parent=manifest.incarnation,
            checkpoint_id=manifest.checkpoint_id,
            boundary=manifest.boundary,
            left_boundary=manifest.boundary,
            note=note,
        )
        async with self._few:
            watch = Stopwatch()
            # On record before anything of it exists: a killed envkeeper removes a half-made fork.
            await keeper.thread(partial(keeper.save, box, durable=True))
            await keeper.thread(box.store.take_from, source, manifest.checkpoint_id)
            lineage = Lineage(box.store.home)
            await keeper.thread(lineage.add, *births, birth)
            notes = lineage.notes()
            told = await keeper.thread(keeper.lives.make, record.incarnation, notes)
            order = restore.Order(manifest, box.store, record.sandbox_id, record.incarnation, told, verified=True)
            back = await keeper.thread(self._restore, box, order, hashes)
        keeper.live(box, back.life, back.pidfd, back.link)
        await asyncio.shield(hashes)
        box.record = msgspec.structs.replace(box.record, making="")
        keeper.go(box, Event.CREATED, back.proof)
        await keeper.thread(partial(keeper.save, box, durable=True))
        aftermath = await keeper.thread(aftermath_of, keeper.host.engine, manifest, record)
        return Back(manifest, back, (f"{manifest.checkpoint_id}: restored",), notes, watch.ms(), aftermath)

    def _restore(self, box: Box, order: restore.Order, hashes: asyncio.Future[None]) -> restore.Restored:
        """In a thread. One of many that the engine hinders for a moment must not cost all of them."""

        def clean() -> None:
            if hashes.done() and hashes.exception() is not None:
                raise RestoreFailed(f"checkpoint {order.manifest.checkpoint_id} is not whole")
            if box.record.making:
                self._keeper.host.engine.remove(box.record.making)
                self._making(box, "")

        limit, made = self._keeper.config.restore_timeout_s, partial(self._making, box)
        return patiently(lambda: self._backend.restore(order, limit, made), clean)

    def _making(self, box: Box, container_id: str) -> None:
        box.record = msgspec.structs.replace(box.record, making=container_id)
        self._keeper.records.save(box.record, durable=False)

    async def _undo(self, box: Box) -> None:
        keeper = self._keeper
        if box.record.state is State.CREATING:
            keeper.go(box, Event.CREATE_FAILED, "a fork of its group failed")
        elif box.record.state is not State.DESTROYED:
            keeper.go(box, Event.DESTROY)
        await keeper.fence(box)
        await keeper.finish(box)


def _up_to(births: tuple[Birth, ...], incarnation: str) -> tuple[Birth, ...]:
    """Those that lead to ``incarnation``: what came after it is another branch."""
    at = next((n for n, birth in enumerate(births) if birth.incarnation == incarnation), len(births) - 1)
    return births[: at + 1]
