"""What a CRIU that was killed in the middle of a dump may have left in the tasks of a sandbox.

It works by having the tasks themselves run code: it overwrites the beginning of their first executable mapping for a
moment, maps a helper into them, and stops them. Killed between two of these, it leaves a task that looks alive and is
not itself any more. So each task is looked at, frozen, before the sandbox goes on: any doubt means that it is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envkeeper import preflight

_PAGE = 4096
_HELPER = "CRIUMFD"  # the name of the memory that CRIU maps into a task


def look(before: Sequence[int], now: Sequence[int]) -> list[str]:
    """Reasons for doubt, empty when there is none. ``now``: the processes of the frozen group; ``before``: those that
    must be among them, since they had no chance to end by themselves."""
    found = [f"pid {pid} ended in the moment in which the dump was cut off" for pid in before if pid not in now]
    for task in preflight.scan(now, locks=False):
        if task.state in ("Z", "X"):
            continue
        if task.tracer:
            found.append(f"pid {task.pid} ({task.name}) is still traced by pid {task.tracer}")
        elif task.state in ("T", "t"):
            found.append(f"pid {task.pid} ({task.name}) stands still")
        found += [f"pid {task.pid} ({task.name}) {said}" for said in _memory(task.pid)]
    return found


def _memory(pid: int) -> list[str]:
    base = Path("/proc") / str(pid)
    try:
        rows = [line.split(maxsplit=5) for line in (base / "maps").read_text().splitlines()]
        said = [f"holds CRIU's helper at {row[0]}" for row in rows if _HELPER in row[-1]]
        first = next((row for row in rows if "x" in row[1] and row[4] != "0"), None)
        if first is not None and not _as_in_its_file(base, first):
            said.append(f"runs code at {first[0]} that is not what its file holds")
    except (FileNotFoundError, ProcessLookupError):
        return ["ended while it was looked at"]
    return said


def _as_in_its_file(base: Path, row: list[str]) -> bool:
    start, end = (int(part, 16) for part in row[0].split("-"))
    with (base / "mem").open("rb", buffering=0) as memory:
        memory.seek(start)
        seen = memory.read(_PAGE)
    with (base / "map_files" / f"{start:x}-{end:x}").open("rb") as file:
        file.seek(int(row[2], 16))
        kept = file.read(_PAGE)
    return seen[: len(kept)] == kept  # the last page of a file ends early
