"""Look at every process of a frozen sandbox and refuse by name what would be lost, wrong, or hang the dump.

CRIU itself fails loudly on most things it cannot dump. This scan is for those where it does not (a process started by
`docker exec` is silently left out, a lock on a mapped file is silently lost), where it hangs (a stopped task is never
seized while its group is frozen), and where its words help nobody. ``judge`` is pure; ``scan`` reads /proc.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envkeeper.mounts import Mount

_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "user", "time", "cgroup")
_CAP_SYS_RESOURCE = 24

# Programs that the dump itself ends, also on the source: CRIU interrupts a poll that waits, and they take EINTR there
# for the end of their input. Found by the conformance run.
_ENDS_AT_EINTR = frozenset({"script"})


@dataclass(frozen=True, slots=True)
class Descriptor:
    """``link``: what /proc/PID/fd/N points to. ``alive``: a file whose name was deleted but that has another one.
    ``flags``: as of open(2), only for pipes. ``locked``: has POSIX record locks."""

    number: int
    link: str
    alive: bool = False
    flags: int = 0
    locked: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One process as seen from the host. ``spaces``: its namespaces, in the order of ``_NAMESPACES``. ``mapped``:
    paths of the files that it maps, known only when it holds locks."""

    pid: int
    parent: int
    state: str
    name: str
    tracer: int = 0
    descriptors: tuple[Descriptor, ...] = ()
    spaces: tuple[str, ...] = ()
    uids: tuple[int, ...] = (0,)
    mapped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Finding:
    """``kind`` is stable and for machines; ``text`` names the process and the remedy."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def judge(
    init: int,
    tasks: Sequence[Task],
    foreign_mounts: Sequence[Mount] = (),
    *,
    limits: bool = True,
    relocks: bool = False,
) -> list[Finding]:
    """Reasons against a checkpoint, empty when there is none. ``init``: the host's pid of PID 1. ``limits``: the host
    lets us read the limits of another user's process (CAP_SYS_RESOURCE). ``relocks``: a restore here takes record locks
    again once all is mapped."""
    known = {task.pid: task for task in tasks}
    home = known[init].spaces if init in known else ()
    out = []
    for task in tasks:
        if task.state in ("Z", "X"):
            continue  # a zombie is dumped as one; it holds nothing
        who = f"pid {task.pid} ({task.name})"
        if not _descends(task.pid, init, known):
            out.append(Finding("foreign_process", f"{who} was not started by the agent (docker exec?): end it first"))
        if task.tracer:
            out.append(Finding("traced", f"{who} is traced by pid {task.tracer}: end the tracer first"))
        elif task.state in ("T", "t"):
            out.append(Finding("stopped", f"{who} is stopped: continue or end it first"))
        if home and task.spaces and task.spaces != home:
            other = [n for n, a, b in zip(_NAMESPACES, task.spaces, home, strict=False) if a != b]
            out.append(Finding("nested_namespace", f"{who} lives in its own {'/'.join(other)} namespace"))
        if not limits and set(task.uids) != {0}:
            out.append(
                Finding("other_user", f"{who} runs as uid {task.uids[0]}: this host lacks CAP_SYS_RESOURCE to dump it")
            )
        if task.name in _ENDS_AT_EINTR:
            out.append(Finding("ends_at_dump", f"{who} ends when a dump interrupts its poll: end it, or use tmux"))
        out += _of_descriptors(task, who, relocks=relocks)
    out += [
        Finding("foreign_mount", f"{mount.point} is a {mount.kind} mount made inside the sandbox: unmount it first")
        for mount in foreign_mounts
    ]
    return out


def _of_descriptors(task: Task, who: str, *, relocks: bool) -> list[Finding]:
    out = []
    links = [descriptor.link for descriptor in task.descriptors]
    if any("io_uring" in link for link in links):
        out.append(Finding("io_uring", f"io_uring in {who}: run it without (its rings are in no dump)"))
    if any("fanotify" in link for link in links):
        out.append(Finding("fanotify", f"{who} watches whole mounts (fanotify): run it without"))
    locked = sorted({d.link for d in task.descriptors if d.locked and d.link in task.mapped and not relocks})
    for path in locked:
        # CRIU takes the locks and then maps the file, closing the descriptor that it mapped through: and with any
        # close of a file a process loses all its POSIX locks on it (fcntl(2)).
        words = f"{who} holds a record lock on {path} and maps it (SQLite in WAL mode does): close it first"
        out.append(Finding("lock_on_mapped_file", words))
    return out


def half_pipes(tasks: Iterable[Task], init: int) -> dict[str, str]:
    """Pipes of which the sandbox holds only one end -> who holds it. The other end is closed, or it is outside: PID 1's
    own three, which the new container brings again, are left out."""
    ends: dict[str, set[bool]] = {}
    holders: dict[str, str] = {}
    ours: set[str] = set()
    for task in tasks:
        for descriptor in task.descriptors:
            if not descriptor.link.startswith("pipe:"):
                continue
            if task.pid == init and descriptor.number < 3:
                ours.add(descriptor.link)
            mode = descriptor.flags & os.O_ACCMODE
            ends.setdefault(descriptor.link, set()).update(
                {True, False} if mode == os.O_RDWR else {mode == os.O_WRONLY}
            )
            holders.setdefault(descriptor.link, f"pid {task.pid} ({task.name}) by descriptor {descriptor.number}")
    return {link: holders[link] for link, seen in ends.items() if len(seen) == 1 and link not in ours}


def parents_of_unlinked(tasks: Iterable[Task]) -> set[str]:
    """Folders in which CRIU makes a name for an open file whose own was deleted while another one keeps it alive."""
    return {os.path.dirname(descriptor.link) for task in tasks for descriptor in task.descriptors if descriptor.alive}


def may_read_limits() -> bool:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_SYS_RESOURCE & 1)


def _descends(pid: int, init: int, known: dict[int, Task]) -> bool:
    seen = set()
    while pid != init:
        if pid in seen or pid not in known:
            return False
        seen.add(pid)
        pid = known[pid].parent
    return True


def scan(pids: Sequence[int], *, locks: bool = True) -> list[Task]:
    """The processes of ``pids`` that still exist. Without ``locks`` none is looked for: /proc/locks stops every lock of
    the host for a moment, and waits ten milliseconds for that; all of it frozen time."""
    lockers = _lockers() if locks else set()
    return [task for pid in pids if (task := _read(pid, locks=pid in lockers)) is not None]


def _lockers() -> set[int]:
    """Pids that hold POSIX record locks: proc(5) locks."""
    rows = (row.split() for row in Path("/proc/locks").read_text().splitlines())
    return {int(row[4]) for row in rows if len(row) > 5 and row[1] == "POSIX" and row[4].isdigit()}


def _read(pid: int, *, locks: bool) -> Task | None:
    base = f"/proc/{pid}"  # strings: Path objects cost as much as the reads, and all of this is frozen time
    try:
        stat = _text(f"{base}/stat")
        status = _text(f"{base}/status")
        waits = _text(f"{base}/wchan")
        mapped = _mapped(base) if locks else frozenset()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name = stat[stat.index("(") + 1 : stat.rindex(")")]
    fields = stat[stat.rindex(")") + 2 :].split()
    rows = dict(row.split(":", 1) for row in status.splitlines() if ":" in row)
    return Task(
        pid=pid,
        parent=int(fields[1]),
        # In a frozen v1 group a stopped task shows as "D" like any other; only where it waits tells.
        state="T" if "signal_stop" in waits else fields[0],
        name=name,
        tracer=int(rows.get("TracerPid", "0")),
        descriptors=_descriptors(base, locks=locks),
        spaces=tuple(_link(f"{base}/ns/{kind}") for kind in _NAMESPACES),
        uids=tuple(int(uid) for uid in rows.get("Uid", "0").split()),
        mapped=mapped,
    )


def _text(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return file.readall().decode(errors="surrogateescape")


def _mapped(base: str) -> frozenset[str]:
    rows = (row.split(None, 5) for row in _text(f"{base}/maps").splitlines())
    return frozenset(row[5] for row in rows if len(row) > 5 and row[5].startswith("/"))


def _descriptors(base: str, *, locks: bool) -> tuple[Descriptor, ...]:
    """All but plain open files, which CRIU carries: unless they are deleted and alive, or locked."""
    try:
        names = os.listdir(f"{base}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(found for name in names if (found := _descriptor(base, name, locks=locks)) is not None)


def _descriptor(base: str, name: str, *, locks: bool) -> Descriptor | None:
    link = _link(f"{base}/fd/{name}")
    if link.startswith("pipe:"):
        return Descriptor(int(name), link, flags=int(_info(base, name, "flags") or "0", 8))
    if not link.startswith("/"):
        return Descriptor(int(name), link) if link else None
    if link.endswith(" (deleted)"):
        return Descriptor(int(name), link.removesuffix(" (deleted)"), alive=True) if _has_links(base, name) else None
    if locks and "POSIX" in _info(base, name, "lock"):
        return Descriptor(int(name), link, locked=True)
    return None


def _has_links(base: str, name: str) -> bool:
    try:
        return os.stat(f"{base}/fd/{name}").st_nlink > 0
    except OSError:  # the process ended in this moment
        return False


def _info(base: str, name: str, key: str) -> str:
    try:
        rows = _text(f"{base}/fdinfo/{name}").splitlines()
    except OSError:
        return ""
    return " ".join(row.split(":", 1)[1].strip() for row in rows if row.startswith(f"{key}:"))


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:  # the process ended between the listing and here, or has no such namespace any more
        return ""
