"""What a sandbox used, from its control groups and its upper layer: cgroup v1 and v2.

The group counts everything in the sandbox, services of earlier actions and page cache included; what the action's own
processes used is the agent's to tell.
"""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class Meter:
    """Of the sandbox that ``pid`` is in, from now on. Figures of what the kernel does not tell are 0."""

    def __init__(self, pid: int) -> None:
        self._cpu, self._memory, self._v2 = _groups(pid)
        self._peak_fd = -1
        self._reset_peak()
        self._before, self._kills_before = self._cpu_ns(), self._kills()

    def killed(self) -> int:
        """Processes of the sandbox that the kernel has killed for want of memory since the beginning."""
        return max(0, self._kills() - self._kills_before)

    def _kills(self) -> int:
        if self._memory is None:
            return 0
        name = "memory.events" if self._v2 else "memory.oom_control"
        try:
            rows = dict(line.split() for line in (self._memory / name).read_text().splitlines())
        except OSError:  # the group went with its sandbox
            return 0
        return int(rows.get("oom_kill", 0))

    def close(self) -> tuple[float, int]:
        """(CPU seconds, peak bytes) since the beginning."""
        seconds = max(0, self._cpu_ns() - self._before) / 1e9
        peak = self._peak()
        if self._peak_fd >= 0:
            os.close(self._peak_fd)
            self._peak_fd = -1
        return seconds, peak

    def _cpu_ns(self) -> int:
        if self._cpu is None:
            return 0
        try:
            if not self._v2:
                return int((self._cpu / "cpuacct.usage").read_text())
            rows = dict(line.split() for line in (self._cpu / "cpu.stat").read_text().splitlines())
            return int(rows["usage_usec"]) * 1000
        except OSError:  # the group went with its sandbox
            return 0

    def _reset_peak(self) -> None:
        if self._memory is None:
            return
        name, value = ("memory.peak", b"r") if self._v2 else ("memory.max_usage_in_bytes", b"0")
        try:
            self._peak_fd = os.open(self._memory / name, os.O_RDWR | os.O_CLOEXEC)
            # v2: the reset holds for this descriptor only, and kernels before 6.12 have none.
            os.write(self._peak_fd, value)
        except OSError:
            if self._peak_fd >= 0:
                os.close(self._peak_fd)
            self._peak_fd = -1

    def _peak(self) -> int:
        if self._peak_fd < 0:
            return 0
        try:
            return int(os.pread(self._peak_fd, 64, 0))
        except OSError:
            return 0


def _groups(pid: int) -> tuple[Path | None, Path | None, bool]:
    """(folder with CPU figures, folder with memory figures, cgroup v2?)."""
    try:
        found = groups(pid)
    except OSError:  # it has just died: the action's own end will tell. Or no descriptor is left: no reason to fail it.
        return None, None, False
    if "cpuacct" in found:
        return found["cpuacct"], found.get("memory"), False
    unified = found.get("")
    return unified, unified, True


def groups(pid: int) -> dict[str, Path]:
    """Folder of each controller's group that ``pid`` is in; of cgroup v2 under "". Raises OSError."""
    rows = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    found: dict[str, Path] = {}
    for _, controllers, path in rows:
        for name in controllers.split(","):
            found[name] = _ROOT / controllers / path.lstrip("/")
            if not found[name].is_dir():
                found[name] = _ROOT / name / path.lstrip("/")
    return found


def disk_bytes(upper: Path) -> int:
    """Bytes that an upper layer occupies. What vanishes meanwhile counts as nothing; hard links count once."""
    total, seen, folders = 0, set[int](), [str(upper)]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            if info.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
                if info.st_ino in seen:
                    continue
                seen.add(info.st_ino)
            total += info.st_blocks * 512
    return total
