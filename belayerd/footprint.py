"""What each worker's memory costs: read from the kernel, not reckoned.

``smaps_rollup`` walks the page tables of a process, tens of milliseconds for a gigabyte: so rarely, in a thread, and
never on the path of anything.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from belayer.messages.control import SlotView, WorkerView

EVERY_S = 15.0


class Footprint(msgspec.Struct, frozen=True):
    """KiB, as proc(5) gives them."""

    rss: int
    pss: int
    private: int


def look(pid: int) -> Footprint | None:
    """None when there is no such process, or it is not ours to look at."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    found = {}
    for line in text.splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0])
    return Footprint(found["Rss"], found["Pss"], found["Private_Clean"] + found["Private_Dirty"])


class Footprints:
    """The last look at every worker."""

    def __init__(self) -> None:
        self._seen: dict[int, Footprint] = {}

    async def refresh(self, slots: tuple[SlotView, ...]) -> None:
        pids = [worker.pid for slot in slots for worker in slot.workers]
        found = {pid: await asyncio.to_thread(look, pid) for pid in pids}
        self._seen = {pid: seen for pid, seen in found.items() if seen is not None}

    def fill(self, slot: SlotView) -> SlotView:
        return msgspec.structs.replace(slot, workers=tuple(self._filled(worker) for worker in slot.workers))

    def _filled(self, worker: WorkerView) -> WorkerView:
        seen = self._seen.get(worker.pid)
        if seen is None:
            return worker
        return msgspec.structs.replace(
            worker, mapped_mb=seen.rss / 1024, pss_mb=seen.pss / 1024, private_mb=seen.private / 1024
        )
