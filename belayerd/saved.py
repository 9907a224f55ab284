"""The pair of a slot on file, for the next belayerd.

The file matters in this boot only: after a reboot no worker is left. So it lies in ``run``, which no disk fills up,
slows down or damages: a handover saves it a dozen times. Only the generation outlives a boot (routers of other hosts
have seen it); it goes to the disk at the disk's own pace, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from belayer import procs, statefile
from belayer.config import Slot
from belayer.paths import Paths
from belayerd.pair import Pair


class _Last(msgspec.Struct, frozen=True):
    generation: int


class SavedPair:
    def __init__(self, paths: Paths, slot: Slot, log: Any) -> None:
        self._path, self._disk = paths.slot_state(slot.name), paths.slot_generation(slot.name)
        self._slot, self._log = slot, log
        self._generation = 0
        self._newer = asyncio.Event()

    def load(self) -> Pair:
        """The saved pair, or a new one. Raises StateDamaged."""
        saved: Pair | None = statefile.load(self._path, Pair)
        last: _Last | None = statefile.load(self._disk, _Last)
        on_disk = last.generation if last else 0
        self._generation = max(saved.generation if saved else 0, on_disk)
        if self._generation > on_disk:  # the last life was killed between the two, or the disk took nothing
            self._newer.set()
        boot = procs.boot_id()
        if saved is not None and saved.boot_id == boot:
            return saved
        return Pair(slot=self._slot.name, boot_id=boot, generation=self._generation, spare=self._slot.spare)

    def save(self, pair: Pair) -> None:
        """Not fsynced: kill -9 keeps the page cache. Raises OSError: then nothing may be told that depends on it."""
        statefile.save(self._path, pair, durable=False)
        if pair.generation > self._generation:
            self._generation = pair.generation
            self._newer.set()

    async def keep(self) -> None:
        """For ever."""
        while True:
            await self._newer.wait()
            self._newer.clear()
            try:
                await asyncio.to_thread(statefile.save, self._disk, _Last(generation=self._generation))
            except OSError as why:
                self._log.warning("generation not on disk", path=str(self._disk), why=str(why))
