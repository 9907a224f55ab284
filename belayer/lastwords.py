"""Why a process ended: its own words, and how the kernel says that it ended.

Words are left by the process itself, in a file, before it ends on an exception; the first stay, since what fails next
fails of it. How it ended (status, signal) is known to its parent alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple

_LONGEST = 400  # characters: an alert and a line of a status hold it
_VMSTAT, _KMSG = Path("/proc/vmstat"), Path("/dev/kmsg")


def words_of(why: BaseException) -> str:
    """Type and text in one line, as ``HostUnfit: no such model``. A text of several lines begins with a headline that
    says nothing, so all of it is taken, up to a length."""
    text = " ".join(str(why).split())
    said = f"{type(why).__name__}: {text}" if text else type(why).__name__
    return said if len(said) <= _LONGEST else said[: _LONGEST - 3] + "..."


def leave(path: Path, words: str) -> None:
    """Leave ``words`` unless others were left before. A disk that takes nothing must not hide what the log gets."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        beside.write_text(words)
        beside.chmod(0o600)
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
        beside.unlink()


def read(path: Path) -> str:
    """What was left, or ""."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


class Kills(NamedTuple):
    """Processes that the kernel's OOM killer has ended: in a control group (cgroup2), on the host."""

    group: int
    host: int


def oom_kills(cgroup: str) -> Kills:
    """``cgroup``: folder of a version 2 group, "" for none. Without a memory controller its count is 0."""
    group = _count(Path(cgroup) / "memory.events") if cgroup else 0
    return Kills(group, _count(_VMSTAT))


def _count(path: Path) -> int:
    try:
        rows = path.read_text().splitlines()
    except OSError:  # no such controller, or the group is gone
        return 0
    return next((int(row.split()[1]) for row in rows if row.startswith("oom_kill ")), 0)


def how(code: int, pid: int, before: Kills, after: Kills) -> str:
    """``code``: as os.waitstatus_to_exitcode gives it. ``before``, ``after``: counts at its start and at its end."""
    if code >= 0:
        return f"ended with status {code}"
    said = f"killed by signal {-code} ({signal_name(-code)})"
    if -code != signal.SIGKILL or after.host == before.host:
        return said
    if after.group > before.group:
        return f"{said} of the kernel's OOM killer: its control group had no memory left"
    named = _named_by_kernel(pid)
    if named is None:
        count = after.host - before.host
        return f"{said}; out of memory? the kernel's OOM killer has ended {count} process(es) here since it was started"
    return f"{said} of the kernel's OOM killer: no memory was left for it" if named else said


def _named_by_kernel(pid: int) -> bool | None:
    """Whether the kernel's log names this process as one that the OOM killer has ended. None: it may not be read."""
    try:
        fd = os.open(_KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    word = f"illed process {pid} (".encode()
    try:
        while True:
            try:
                if word in os.read(fd, 8192):  # one record
                    return True
            except BrokenPipeError:  # that record was overwritten meanwhile
                continue
            except BlockingIOError:
                return False
    except OSError:
        return None
    finally:
        os.close(fd)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
