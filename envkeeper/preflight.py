"""Look at every process of a frozen sandbox and refuse by name what would be lost, wrong, or hang the dump.

CRIU itself fails loudly on most things it cannot dump. This scan is for those where it does not (a process started by
`docker exec` is silently left out), where it hangs (a stopped task is never seized while its group is frozen), and
where its words help nobody. ``judge`` is pure; ``scan`` reads /proc.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envkeeper.mounts import Mount

_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user")


@dataclass(frozen=True, slots=True)
class Task:
    """One process as seen from the host. ``spaces``: its namespaces, in the order of ``_NAMESPACES``."""

    pid: int
    parent: int
    state: str
    name: str
    tracer: int = 0
    descriptors: tuple[str, ...] = ()
    spaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """``kind`` is stable and for machines; ``text`` names the process and the remedy."""

    kind: str
    text: str


def judge(init: int, tasks: Sequence[Task], foreign_mounts: Sequence[Mount] = ()) -> list[Finding]:
    """Reasons against a checkpoint, empty when there is none. ``init``: the host's pid of PID 1."""
    known = {task.pid: task for task in tasks}
    home = known[init].spaces if init in known else ()
    out = []
    for task in tasks:
        who = f"pid {task.pid} ({task.name})"
        if task.state in ("Z", "X"):
            continue  # a zombie is dumped as one; it holds nothing
        if not _descends(task.pid, init, known):
            out.append(Finding("foreign_process", f"{who} was not started by the agent (docker exec?): end it first"))
        if task.tracer:
            out.append(Finding("traced", f"{who} is traced by pid {task.tracer}: end the tracer first"))
        elif task.state in ("T", "t"):
            out.append(Finding("stopped", f"{who} is stopped: continue or end it first"))
        if any("io_uring" in link for link in task.descriptors):
            out.append(Finding("io_uring", f"io_uring in {who}: run it without (its rings are in no dump)"))
        if home and task.spaces and task.spaces != home:
            other = [n for n, a, b in zip(_NAMESPACES, task.spaces, home, strict=False) if a != b]
            out.append(Finding("nested_namespace", f"{who} lives in its own {'/'.join(other)} namespace"))
    out += [
        Finding("foreign_mount", f"{mount.point} is a {mount.kind} mount made inside the sandbox: unmount it first")
        for mount in foreign_mounts
    ]
    return out


def _descends(pid: int, init: int, known: dict[int, Task]) -> bool:
    seen = set()
    while pid != init:
        if pid in seen or pid not in known:
            return False
        seen.add(pid)
        pid = known[pid].parent
    return True


def scan(pids: Sequence[int]) -> list[Task]:
    """The processes of ``pids`` that still exist."""
    return [task for pid in pids if (task := _read(pid)) is not None]


def _read(pid: int) -> Task | None:
    base = Path("/proc") / str(pid)
    try:
        stat = (base / "stat").read_text()
        status = (base / "status").read_text()
        waits = (base / "wchan").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    fields = stat[stat.rindex(")") + 2 :].split()
    tracer = next((int(row.split()[1]) for row in status.splitlines() if row.startswith("TracerPid:")), 0)
    return Task(
        pid=pid,
        parent=int(fields[1]),
        # In a frozen v1 group a stopped task shows as "D" like any other; only where it waits tells.
        state="T" if "signal_stop" in waits else fields[0],
        name=name,
        tracer=tracer,
        descriptors=_links(base / "fd", anonymous=True),
        spaces=tuple(_link(base / "ns" / kind) for kind in _NAMESPACES),
    )


def _links(folder: Path, *, anonymous: bool) -> tuple[str, ...]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return ()
    links = (_link(folder / name) for name in names)
    return tuple(link for link in links if not anonymous or link.startswith("anon_inode:"))


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the process ended between the listing and here, or has no such namespace any more
        return ""
