"""Prefixes (L_k, E_k) of sandboxes: full_checkpoint makes one READY, full_restore brings one back.

Publishing is serial per sandbox (READY never moves back) and outside the gate: actions go on beside it.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import msgspec

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, ClaimTaken, RestoreFailed, SandboxLost
from belayer.messages.sandbox import FullCheckpoint, FullRestore
from envkeeper import restore, upper
from envkeeper.checkpoint import Checkpointer, Draft, Subject
from envkeeper.core import Event, State
from envkeeper.keeper import Box, Keeper, alive
from envkeeper.store import Manifest, Store


class Prefixes:
    """Checkpoints and restores of the keeper's boxes. ``restorer`` is swept by ``adopt`` at start."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        host, checkpoints, limit = keeper.host, keeper.paths.checkpoints, keeper.config.checkpoint_timeout_s
        self.restorer = restore.Restorer(host.engine, checkpoints / ".restores", host.search)
        reflink = upper.shares_blocks(Path(host.versions["data_root"]), checkpoints)
        self._checkpointer = Checkpointer(host.criu, host.versions, limit, reflink=reflink)

    async def checkpoint(self, ask: FullCheckpoint) -> tuple[Box, float, dict[str, float]]:
        """The box with its new READY, total milliseconds and those of the phases."""
        box = self._keeper.box(ask.sandbox_id)
        watch = Stopwatch()
        async with box.publishing:  # in order: READY never moves back
            async with box.gate:
                draft = await self._capture(box, ask)
            # From here on actions run: what was captured is a private copy.
            manifest, digest, phases = await self._keeper.thread(self._checkpointer.publish, draft, box.store)
            box.ready, box.ready_digest = manifest, digest
            self._keeper.log.info(
                "ready", sandbox=ask.sandbox_id, checkpoint=manifest.checkpoint_id, boundary=manifest.boundary
            )
            total = watch.ms()
            await self._keeper.thread(_prune, box.store, self._keeper.config.keep_checkpoints)
        return box, total, phases

    async def _capture(self, box: Box, ask: FullCheckpoint) -> Draft:
        self._keeper.current(box, ask.incarnation, ask.boundary)
        self._keeper.go(box, Event.CAPTURE)
        link, record, life = alive(box), box.record, box.life
        assert life is not None
        subject = Subject(
            record.sandbox_id, record.incarnation, record.boundary, ask.context_digest, life, record.recipe
        )
        try:
            draft = await self._keeper.thread(self._checkpointer.capture, subject, link, box.store)
        except BelayerError as why:
            self._keeper.go(box, Event.DIED if isinstance(why, SandboxLost) else Event.CAPTURE_FAILED, str(why))
            if box.record.state is State.LOST:
                self._keeper.save(box, durable=True)
                raise SandboxLost(f"the sandbox died during a checkpoint: {why.message}") from why
            raise
        self._keeper.go(box, Event.CAPTURED, f"frozen {draft.frozen_ms:.0f} ms")
        return draft

    async def restore(self, ask: FullRestore) -> tuple[Box, Manifest, restore.Restored, float]:
        """Into a fresh container; the old life is fenced first. Of two at once one gets ClaimTaken."""
        box = self._keeper.box(ask.sandbox_id)
        async with box.publishing:  # a captured prefix on its way to READY is worth waiting for
            wanted = ask.checkpoint_id or (box.ready.checkpoint_id if box.ready else "")
        if not wanted:
            raise RestoreFailed(f"{ask.sandbox_id} has no READY checkpoint", remedy="start a new sandbox")
        watch = Stopwatch()
        # Before anything is touched: a checkpoint that cannot be read must not cost a living sandbox.
        manifest, _ = await self._keeper.thread(box.store.load, wanted)
        record = box.record
        if ask.incarnation and ask.incarnation != record.incarnation:
            raise ClaimTaken(f"{ask.incarnation} is restored already, as {record.incarnation}")
        self._keeper.go(box, Event.RESTORE, wanted)
        incarnation = f"{record.sandbox_id}.{record.lives + 1}"
        claim = None
        try:
            claim = box.store.claim(record.incarnation, wanted, f"envkeeper {os.getpid()}")
            self._keeper.save(box, durable=False)
            await self._keeper.fence(box)
            fenced = watch.ms()
            back = await self._keeper.thread(
                self.restorer.run,
                manifest,
                box.store,
                incarnation,
                self._keeper.config.restore_timeout_s,
                partial(self._making, box),
            )
        except BelayerError as why:
            self._keeper.go(box, Event.RESTORE_FAILED, str(why))
            self._keeper.save(box, durable=True, making="")
            if claim is not None:
                box.store.claims.release(claim)
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
        self._keeper.live(box, back.life, back.pidfd, back.link)
        self._keeper.go(box, Event.PROVED, back.proof)
        self._keeper.save(box, durable=True)
        box.store.claims.change(claim, spent=True)
        self._keeper.chore(self._keeper.host.engine.remove, old)
        return box, manifest, back, watch.ms()

    def _making(self, box: Box, container_id: str) -> None:
        """Called in the restorer's thread; nothing else changes the record of a sandbox in RESTORING."""
        box.record = msgspec.structs.replace(box.record, making=container_id)
        self._keeper.records.save(box.record, durable=False)


def _prune(store: Store, keep: int) -> None:
    pointer = store.ready()
    spare = [row.checkpoint_id for row in store.all() if not pointer or row.checkpoint_id != pointer.checkpoint_id]
    for name in spare[: max(0, len(spare) + 1 - keep)]:
        store.remove(name)
