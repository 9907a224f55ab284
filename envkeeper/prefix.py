"""Prefixes (L_k, E_k) of sandboxes: full_checkpoint makes one READY, full_restore brings one back.

Publishing is serial per sandbox (READY never moves back by it) and outside the gate: actions go on beside it.

A restore takes the claim before it kills (of two restorers only the winner may), sees the old life dead before anything
new is made, and moves READY to what it brought back before the new life is on record: what lies after that boundary is
an abandoned attempt. When a checkpoint fails, its ancestors are tried, newest first, and the image last, as far as the
caller allows; never another branch, whose L_k would not be a beginning of the caller's log. What fails by the engine or
the host is no fault of a checkpoint: the same one is tried again, and no step of the trajectory is given up for it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial

import msgspec

from belayer.clock import Stopwatch, wall
from belayer.errors import BelayerError, ClaimTaken, HostUnfit, RestoreFailed, SandboxLost
from belayer.messages.sandbox import Birth, FullCheckpoint, FullRestore
from envkeeper.aftermath import Aftermath, judge
from envkeeper.backend import Backend, containers
from envkeeper.checkpoint import Draft, Subject
from envkeeper.claims import Claim
from envkeeper.collect import Collector
from envkeeper.core import Event, State
from envkeeper.engine import Engine
from envkeeper.failpoints import Point, reach
from envkeeper.keeper import Box, Keeper, alive
from envkeeper.lineage import Lineage, check_note
from envkeeper.passing import Hindered
from envkeeper.patience import PAUSES_S
from envkeeper.records import SandboxRecord
from envkeeper.restore import Fresh, Order, Restored
from envkeeper.store import Manifest, Store

ROOM = "free disk space below the checkpoint folder"


@dataclass(frozen=True, slots=True)
class Back:
    """``manifest`` is None when the life began at its image. ``path``: what was tried, the last step succeeded."""

    manifest: Manifest | None
    restored: Restored
    path: tuple[str, ...]
    notes: tuple[str, ...]
    total_ms: float
    aftermath: Aftermath


def aftermath_of(engine: Engine, manifest: Manifest | None, before: SandboxRecord) -> Aftermath:
    """Blocking. ``before``: what was lost, or forked. An image has no instant at which it was captured."""
    recipe, now = manifest.recipe if manifest else before.recipe, wall()
    return judge(
        recipe,
        captured_at=manifest.made_at if manifest else now,
        boundary=manifest.boundary if manifest else 0,
        lost_at=before.boundary,
        now=now,
        image_now=_image_now(engine, recipe.image),
    )


def _image_now(engine: Engine, name: str) -> str | None:
    """None when Docker does not say: the life is served already, and must not be taken back for a remark."""
    try:
        return engine.image_id(name) if name else ""
    except BelayerError:
        return None


class Prefixes:
    """Checkpoints and restores of the keeper's boxes. ``backend`` is swept by ``adopt`` at start."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.backend: Backend = containers(keeper.host, keeper.config, keeper.paths.checkpoints)
        self.collector = Collector(keeper)

    # ---- full_checkpoint ----

    async def checkpoint(self, ask: FullCheckpoint) -> tuple[Box, float, dict[str, float]]:
        """The box with its new READY, total milliseconds and those of the phases."""
        box = self._keeper.box(ask.sandbox_id)
        watch = Stopwatch()
        async with box.publishing:  # in order: READY never moves back
            await self.collector.expect(box)
            async with box.gate:
                draft = await self._capture(box, ask)
            # From here on actions run: what was captured is a private copy.
            try:
                async with self.collector.room_for(box, draft.folder):
                    manifest, digest, phases = await self._keeper.thread(self.backend.publish, draft, box.store)
            except BelayerError:
                await self._keeper.thread(box.store.discard, draft.folder)
                raise
            box.ready, box.ready_digest = manifest, digest
            self._keeper.log.info(
                "ready", sandbox=ask.sandbox_id, checkpoint=manifest.checkpoint_id, boundary=manifest.boundary
            )
            total = watch.ms()
            await self.collector.tidy(box)
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
            draft = await self._keeper.thread(self.backend.capture, subject, link, box.store)
        except BelayerError as why:
            self._keeper.go(box, Event.DIED if isinstance(why, SandboxLost) else Event.CAPTURE_FAILED, str(why))
            if box.record.state is State.LOST:
                self._keeper.save(box, durable=True)
                raise SandboxLost(f"the sandbox died during a checkpoint: {why.message}") from why
            raise
        self._keeper.go(box, Event.CAPTURED, f"frozen {draft.frozen_ms:.0f} ms")
        return draft

    # ---- full_restore ----

    async def restore(self, ask: FullRestore) -> tuple[Box, Back]:
        """Into a fresh container; the old life is fenced first. Of two at once one gets ClaimTaken."""
        keeper, box, note = self._keeper, self._keeper.box(ask.sandbox_id), check_note(ask.note)
        async with box.publishing:  # a captured prefix on its way to READY is worth waiting for
            trial = await keeper.thread(self._candidates, box, ask)
        watch = Stopwatch()
        if box.link is not None:
            # A checkpoint that cannot be restored must not cost a living sandbox.
            trial = await keeper.thread(self._verified, box, trial)
        record = box.record
        if ask.incarnation and ask.incarnation != record.incarnation:
            raise ClaimTaken(f"{ask.incarnation} is restored already, as {record.incarnation}")
        kind = "restored" if record.state is State.LOST and not ask.checkpoint_id else "rewound"
        keeper.go(box, Event.RESTORE, trial.first)
        claim: Claim | None = None
        back: Restored | None = None  # alive and proven, not yet served
        try:
            claim = await keeper.thread(
                box.store.claim, record.incarnation, trial.first, f"envkeeper {os.getpid()} at {keeper.paths.state}"
            )
            reach(Point.RESTORE_CLAIMED)
            keeper.save(box, durable=False)
            reach(Point.RESTORE_RECORDED)
            await keeper.fence(box)
            fenced = watch.ms()
            reach(Point.RESTORE_FENCED)
            lineage = Lineage(box.store.home)
            notes = (*lineage.notes(), note) if note else lineage.notes()
            manifest, served = await keeper.thread(self._bring_back, box, trial, claim, notes)
            back = served
            birth = _birth(record, manifest, kind, note)
            await keeper.thread(lineage.add, birth)
            await keeper.thread(self._move_ready, box, manifest)
            reach(Point.RESTORE_POINTED)
        except (BelayerError, OSError) as why:  # a full disk, above all
            if back is not None:
                os.close(back.pidfd)
            await keeper.unmake(box)
            keeper.go(box, Event.RESTORE_FAILED, str(why))
            keeper.save(box, durable=True)
            if claim is not None:
                box.store.claims.release(claim)
            if isinstance(why, BelayerError):
                raise
            raise RestoreFailed(f"{record.sandbox_id}: {why}", kept="the checkpoints", remedy=ROOM) from why
        served.phases_ms["fence"] = fenced
        if manifest is None or manifest.checkpoint_id != trial.first:
            keeper.log.warning("restored less than was asked for", sandbox=record.sandbox_id, tried=trial.path)
        self._serve(box, manifest, served, birth)
        keeper.chore(box.store.claims.spend, claim)
        aftermath = await keeper.thread(aftermath_of, keeper.host.engine, manifest, record)
        # After the last thing that the caller waits for: Docker's removal takes as much of the host as its start does.
        keeper.chore(keeper.host.engine.remove, record.container_id)
        keeper.chore(keeper.lives.remove, record.incarnation)
        for words in aftermath.stale:
            keeper.log.warning("stale after a restore", sandbox=record.sandbox_id, what=words)
        total = watch.ms()
        keeper.story.restored(box.record, served.phases_ms, trial.path, total)
        return box, Back(manifest, served, trial.path, notes, total, aftermath)

    def _move_ready(self, box: Box, manifest: Manifest | None) -> None:
        """In a thread."""
        if manifest is None:
            box.store.point_at_nothing()
        else:
            box.ready_digest = box.store.point(manifest.checkpoint_id)
        box.ready = manifest

    def _serve(self, box: Box, manifest: Manifest | None, back: Restored, birth: Birth) -> None:
        """On record, then served; READY is at this life's beginning already."""
        keeper, before = self._keeper, box.record
        box.record = msgspec.structs.replace(
            before,
            incarnation=birth.incarnation,
            lives=before.lives + 1,
            boundary=birth.boundary,
            context_digest=manifest.context_digest if manifest else "",
            recipe=manifest.recipe if manifest else before.recipe,
            making="",
        )
        box.injected = False
        keeper.live(box, back.life, back.pidfd, back.link)
        keeper.go(box, Event.PROVED, back.proof)
        keeper.save(box, durable=True)
        reach(Point.RESTORE_SERVED)

    def _candidates(self, box: Box, ask: FullRestore) -> _Trial:
        """In a thread. Raises RestoreFailed when nothing may be tried."""
        named = ask.checkpoint_id or (box.ready.checkpoint_id if box.ready else "")
        older = ask.allow_older if ask.allow_older is not None else not ask.checkpoint_id
        ids = [named] if named else []
        trial = _Trial(allow_base=ask.allow_base)
        for checkpoint_id in ids:
            try:
                manifest, _ = box.store.load(checkpoint_id)
            except RestoreFailed as why:
                if checkpoint_id != named and not box.store.folder(checkpoint_id).exists():
                    continue  # collected long ago
                trial.failed(checkpoint_id, why)
                ids += reversed(box.ready.ancestors) if older and box.ready and checkpoint_id == named else []
                continue
            trial.manifests.append(manifest)
            if older and checkpoint_id == named:
                ids += reversed(manifest.ancestors)
        if not named:
            trial.path += ("no READY checkpoint",)
        if not trial.manifests and not trial.allow_base:
            raise RestoreFailed(
                f"{box.record.sandbox_id}: {'; '.join(trial.path)}",
                remedy="name another checkpoint, allow its image (allow_base), or start a new sandbox",
            )
        return trial

    @staticmethod
    def _verified(box: Box, trial: _Trial) -> _Trial:
        while trial.manifests:
            try:
                box.store.verify(trial.manifests[0])
            except RestoreFailed as why:
                trial.failed(trial.manifests.pop(0).checkpoint_id, why)
            else:
                trial.verified = True
                return trial
        if trial.allow_base:
            return trial
        raise RestoreFailed(
            "; ".join(trial.path), kept="the sandbox lives on as it is", remedy="name another checkpoint"
        )

    def _bring_back(
        self, box: Box, trial: _Trial, claim: Claim, notes: tuple[str, ...]
    ) -> tuple[Manifest | None, Restored]:
        """In a thread. Candidates in order, then the image; each failure is named in ``trial.path``."""
        record, incarnation = box.record, next_incarnation(box.record)
        for manifest in trial.manifests:
            if claim.checkpoint_id != manifest.checkpoint_id:
                claim = box.store.claims.change(claim, checkpoint_id=manifest.checkpoint_id)
            back = self._try(box, trial, manifest, incarnation, notes)
            if back is not None:
                trial.path += (f"{manifest.checkpoint_id}: restored",)
                return manifest, back
        if not trial.allow_base:
            raise RestoreFailed(
                f"{record.sandbox_id}: {'; '.join(trial.path)}",
                kept="the checkpoints as they are",
                remedy="name another checkpoint, or allow its image (allow_base)",
            )
        self._clean(box)
        told = self._keeper.lives.make(incarnation, notes)
        fresh = Fresh(record.recipe, record.sandbox_id, incarnation, told)
        back = self.backend.fresh(fresh, self._keeper.config.restore_timeout_s, partial(self._making, box))
        trial.path += ("the image: begun again at boundary 0",)
        return None, back

    def _try(
        self, box: Box, trial: _Trial, manifest: Manifest, incarnation: str, notes: tuple[str, ...]
    ) -> Restored | None:
        """None when it cannot be restored. One that is whole on disk is tried twice for any reason, and for some
        seconds while the engine or the host hinders: an older one would cost the work between the two, and fare no
        better."""
        config, verified, left = self._keeper.config, trial.verified and manifest is trial.manifests[0], 1
        pauses = iter(PAUSES_S)
        while True:
            self._clean(box)
            told = self._keeper.lives.make(incarnation, notes)
            order = Order(manifest, box.store, box.record.sandbox_id, incarnation, told, verified)
            try:
                return self.backend.restore(order, config.restore_timeout_s, partial(self._making, box))
            except (HostUnfit, ClaimTaken):
                raise  # no other checkpoint would do better
            except BelayerError as why:
                failed = why
            trial.failed(manifest.checkpoint_id, failed)
            verified = verified or trial.is_whole(box.store, manifest)
            if not verified:
                return None
            if isinstance(failed, Hindered):
                pause = next(pauses, None) if failed.again else None
                if pause is None:
                    raise RestoreFailed(
                        f"{box.record.sandbox_id}: {'; '.join(trial.path)}",
                        kept=f"checkpoint {manifest.checkpoint_id}, which is whole: none before it was tried",
                        remedy=failed.remedy or "restore again later",
                    ) from failed
                time.sleep(pause)
            elif left:
                left -= 1
            else:
                return None

    def _clean(self, box: Box) -> None:
        """In a thread, before a life is made: what an attempt before it left may run. Never two of one sandbox."""
        if box.record.making:
            self._keeper.host.engine.remove(box.record.making)
            self._making(box, "")

    def _making(self, box: Box, container_id: str) -> None:
        """Called in the restorer's thread; nothing else changes the record of a sandbox in RESTORING."""
        box.record = msgspec.structs.replace(box.record, making=container_id)
        self._keeper.records.save(box.record, durable=False)


def _birth(record: SandboxRecord, manifest: Manifest | None, kind: str, note: str) -> Birth:
    return Birth(
        incarnation=next_incarnation(record),
        sandbox_id=record.sandbox_id,
        kind=kind if manifest else "base",
        at=round(wall(), 3),
        parent=manifest.incarnation if manifest else "",
        checkpoint_id=manifest.checkpoint_id if manifest else "",
        boundary=manifest.boundary if manifest else 0,
        left_boundary=record.boundary,
        note=note,
    )


def next_incarnation(record: SandboxRecord) -> str:
    return f"{record.sandbox_id}.{record.lives + 1}"


@dataclass(slots=True)
class _Trial:
    """What may be restored, in order, and what was tried so far."""

    allow_base: bool
    manifests: list[Manifest] = field(default_factory=list)
    path: tuple[str, ...] = ()
    verified: bool = False

    @property
    def first(self) -> str:
        return self.manifests[0].checkpoint_id if self.manifests else ""

    def is_whole(self, store: Store, manifest: Manifest) -> bool:
        try:
            store.verify(manifest)
        except RestoreFailed as why:
            self.failed(manifest.checkpoint_id, why)
            return False
        return True

    def failed(self, checkpoint_id: str, why: BelayerError) -> None:
        line = f"{checkpoint_id}: {why.message}"
        self.path += () if line in self.path else (line,)
