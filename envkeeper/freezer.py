"""Freeze and thaw the control group of one sandbox: cgroup v1 freezer or cgroup v2 ``cgroup.freeze``.

We freeze by hand because CRIU polls the state in steps of 100 ms, and because a group that CRIU finds frozen is left
frozen by it: the moment of the thaw stays ours (kernel: freezer-subsystem.rst, cgroup-v2.rst).
"""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

from belayer.clock import monotonic
from belayer.errors import CheckpointIncomplete, HostUnfit


class Freezer:
    """The freezer of one control group; ``folder`` is what CRIU is told as ``freeze_cgroup``."""

    def __init__(self, folder: Path, *, v2: bool) -> None:
        self.folder, self.v2 = folder, v2

    def freeze(self, deadline_s: float = 5.0) -> None:
        """Every task of the group is frozen when this returns. Raises CheckpointIncomplete (after a thaw) when one
        does not come to rest in time, for example in an uninterruptible sleep."""
        self._write(frozen=True)
        end = monotonic() + deadline_s
        while not self.is_frozen():
            if monotonic() > end:
                self.thaw()
                raise CheckpointIncomplete(
                    f"the sandbox did not freeze within {deadline_s:g} s: a task waits in the kernel",
                    kept="the sandbox runs on",
                    remedy="checkpoint again later; the host's disk may be busy",
                )
            select.select([], [], [], 0.0002)

    def hold(self) -> None:
        """Ask for the freeze without waiting for it: a task that is let go of now stops before it runs."""
        self._ask(frozen=True)

    def thaw(self) -> None:
        """Let the group run; nothing to do when it is gone (its sandbox is dead)."""
        self._ask(frozen=False)

    def is_frozen(self) -> bool:
        if self.v2:
            return "frozen 1" in (self.folder / "cgroup.events").read_text()
        return (self.folder / "freezer.state").read_text().strip() == "FROZEN"

    def wants_frozen(self) -> bool:
        """Frozen or on the way to it: a daemon that died between the two leaves this behind."""
        try:
            if self.v2:
                return (self.folder / "cgroup.freeze").read_text().strip() == "1"
            return (self.folder / "freezer.state").read_text().strip() != "THAWED"
        except FileNotFoundError:
            return False

    def pids(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]
        except OSError:  # the group is gone, or being removed (ENODEV)
            return []

    def _ask(self, *, frozen: bool) -> None:
        try:
            self._write(frozen=frozen)
        except OSError as why:
            if why.errno not in (errno.ENOENT, errno.ENODEV):  # gone, or being removed: it is dead
                raise

    def _write(self, *, frozen: bool) -> None:
        name, value = (
            ("cgroup.freeze", "1" if frozen else "0")
            if self.v2
            else (
                "freezer.state",
                "FROZEN" if frozen else "THAWED",
            )
        )
        # Unbuffered and in one write: a control file takes exactly one value.
        fd = os.open(self.folder / name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


def of_process(pid: int) -> Freezer:
    """The freezer of the group that ``pid`` is in. Raises HostUnfit when the host has none mounted, FileNotFoundError
    when ``pid`` has ended: a zombie is listed in the root group (cgroup v1), which holds every process of the host."""
    rows = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    for _, controllers, path in rows:
        if "freezer" in controllers.split(","):
            if path == "/":
                raise FileNotFoundError(f"process {pid} is in no control group of its own")
            return Freezer(Path("/sys/fs/cgroup/freezer") / path.lstrip("/"), v2=False)
    for number, controllers, path in rows:
        folder = Path("/sys/fs/cgroup") / path.lstrip("/")
        if number == "0" and not controllers and (folder / "cgroup.freeze").exists():
            return Freezer(folder, v2=True)
    raise HostUnfit(
        "no cgroup freezer is mounted below /sys/fs/cgroup", remedy="mount cgroup v2 or the v1 freezer there"
    )
