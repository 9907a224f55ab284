"""Garbage collection of all stores of this host: what ``budget`` plans is done here, and room is made or refused.

Three occasions: before a capture (is there any use in freezing?), between a capture and its publication (its size is
known now: room, or a refusal by name that leaves READY as it was), and now and then (expiry).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belayer.clock import wall
from belayer.errors import BelayerError, CheckpointIncomplete
from envkeeper import strays
from envkeeper.budget import Entry, Limits, Plan, plan
from envkeeper.keeper import Box, Keeper
from envkeeper.store import Store

_MIB = 1 << 20


class Collector:
    """``limits`` in bytes and seconds, from the configuration."""

    def __init__(self, keeper: Keeper) -> None:
        config = keeper.config
        high = config.disk_budget_mb * _MIB
        self.limits = Limits(
            high=high,
            low=config.disk_low_mb * _MIB or high * 4 // 5,
            ttl_s=config.checkpoint_ttl_s,
            keep=config.keep_checkpoints,
        )
        self._keeper, self._root = keeper, keeper.paths.checkpoints
        self._coming: dict[str, int] = {}  # bytes on their way to READY, by sandbox
        self._one = asyncio.Lock()

    async def expect(self, box: Box) -> None:
        """Refuse before the freeze what surely could not be kept: as large as the last one. Raises
        CheckpointIncomplete."""
        if self.limits.high:
            async with self._one:
                await self._make_room(box, box.ready.nbytes if box.ready else 0)

    @asynccontextmanager
    async def room_for(self, box: Box, folder: Path) -> AsyncIterator[None]:
        """Room for the captured ``folder`` while it is published. Raises CheckpointIncomplete."""
        if not self.limits.high:
            yield
            return
        size = await self._keeper.thread(size_of, folder)
        async with self._one:
            await self._make_room(box, size)
            self._coming[box.record.sandbox_id] = size
        try:
            yield
        finally:
            del self._coming[box.record.sandbox_id]

    async def tidy(self, box: Box) -> None:
        """After a publication: the sandbox's own oldest beyond ``keep_checkpoints``; all of them with a budget."""
        async with self._one:
            if self.limits.high:
                await self.collect()
            else:
                entries = await self._keeper.thread(self._entries_of, box.store, True)
                await self._delete(plan(entries, wall(), Limits(keep=self.limits.keep)))

    async def run_for_ever(self, every_s: float) -> None:
        while True:
            try:
                await self._keeper.finish_all()
                await strays.sweep(self._keeper)
                if not await self._keeper.thread(self._keeper.records.refill):
                    self._keeper.log.error("the disk is full; only what is written already is safe")
                async with self._one:
                    await self.collect()
            except (BelayerError, OSError) as why:
                self._keeper.log.error("garbage collection failed; tried again later", why=str(why))
            await asyncio.sleep(every_s)

    async def collect(self, incoming: int = 0) -> Plan:
        live = {box.record.sandbox_id for box in self._keeper.boxes.values()}
        entries = await self._keeper.thread(self._entries, live)
        found = plan(entries, wall(), self.limits, incoming + sum(self._coming.values()))
        await self._delete(found)
        return found

    async def _make_room(self, box: Box, size: int) -> None:
        found = await self.collect(size)
        if found.fits:
            return
        raise CheckpointIncomplete(
            f"the disk budget of {self.limits.high // _MIB} MiB cannot be met: {-(-size // _MIB)} MiB are to come, "
            f"{-(-(found.used + sum(self._coming.values())) // _MIB)} MiB belong to READY checkpoints of living "
            "sandboxes and to restores that are under way",
            kept="the sandbox runs on and the previous checkpoint stays READY",
            remedy="destroy sandboxes that are done, or raise envkeeper.disk_budget_mb",
        )

    async def _delete(self, found: Plan) -> None:
        for entry in found.delete:
            store = Store(self._root, entry.sandbox_id, make=False)
            gone = await self._keeper.thread(_remove, store, entry.checkpoint_id)
            self._keeper.log.info(
                "checkpoint removed" if gone else "checkpoint kept: it was claimed or gone meanwhile",
                sandbox=entry.sandbox_id,
                checkpoint=entry.checkpoint_id,
            )
            if gone and entry.ready:  # of a sandbox that ended; with its last state its store is over
                await self._keeper.thread(_drop_if_empty, store)

    def _entries(self, live: set[str]) -> list[Entry]:
        paths = [path for path in sorted(self._root.iterdir()) if is_store(path)]
        stores = [Store(self._root, path.name, make=False) for path in paths]
        return [entry for store in stores for entry in self._entries_of(store, store.sandbox_id in live)]

    @staticmethod
    def _entries_of(store: Store, live: bool) -> list[Entry]:
        try:
            pointer = store.ready()
            ready = pointer.checkpoint_id if pointer else ""
            return [
                Entry(
                    sandbox_id=store.sandbox_id,
                    checkpoint_id=row.checkpoint_id,
                    nbytes=row.nbytes,
                    made_at=row.made_at,
                    ready=row.checkpoint_id == ready,
                    live=live,
                    claimed=store.protects(row.checkpoint_id),
                )
                for row in store.all()
            ]
        except CheckpointIncomplete:
            return []  # nobody knows which one is READY: none is removed
        except FileNotFoundError:
            return []  # its sandbox is destroyed in this moment


def is_store(path: Path) -> bool:
    return not path.name.startswith(".") and (path / "ck").is_dir()


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _remove(store: Store, checkpoint_id: str) -> bool:
    try:
        return store.remove(checkpoint_id)
    except FileNotFoundError:  # its sandbox was destroyed meanwhile, and the whole store with it
        return False


def _drop_if_empty(store: Store) -> None:
    with suppress(FileNotFoundError):  # somebody else was first
        if not store.all():
            store.destroy()
