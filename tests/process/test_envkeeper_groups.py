"""Freezer classes on real control groups of both kinds, with real processes; also a task that cannot come to rest.

Docker on this kind of host uses cgroup v1; the v2 hierarchy is beside it (mounted by the test where it is not), so the
v2 path is run on a group of the test's own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from belayer.errors import CheckpointIncomplete
from belayer.procs import state
from envkeeper.freezer import Freezer
from tests.support.wait import eventually, remove_group

COUNT = "import time\nn = 0\nwhile True:\n n += 1; print(n, flush=True); time.sleep(0.002)"


def _mounted(kind: str, option: str = "") -> str:
    """Where a hierarchy of ``kind`` (cgroup, cgroup2) with the controller ``option`` is mounted; "" when nowhere."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] == kind and option in ("", *right.split()[2].split(",")):
            return left.split()[4]
    return ""


@pytest.fixture(params=["v1", "v2"])
def group(request: pytest.FixtureRequest) -> Iterator[Freezer]:
    v2 = request.param == "v2"
    with tempfile.TemporaryDirectory(prefix="bl-cg-") as scratch:
        top = _mounted("cgroup2") if v2 else _mounted("cgroup", "freezer")
        if not top:
            kind = ["cgroup2", "none"] if v2 else ["cgroup", "none", "-o", "freezer"]
            subprocess.run(["mount", "-t", *kind[:2], scratch, *kind[2:]], check=True)
        folder = Path(top or scratch) / f"belayer-test-{os.getpid()}"
        folder.mkdir()
        made = Freezer(folder, v2=v2)
        try:
            yield made
        finally:
            made.thaw()
            remove_group(folder)
            if not top:
                subprocess.run(["umount", scratch], check=True)


def _longer(path: Path, size: int) -> bool:
    return path.stat().st_size > size


@contextlib.contextmanager
def started(out: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    with out.open("wb") as file:
        child = subprocess.Popen([sys.executable, "-c", COUNT], stdout=file)
    try:
        yield out, child
    finally:
        child.kill()
        child.wait(120)


@pytest.fixture
def counter(group: Freezer, tmp_path: Path) -> Iterator[Path]:
    """A process of the group that writes ever larger numbers to a file."""
    with started(tmp_path / "n") as (out, child):
        (group.folder / "cgroup.procs").write_text(str(child.pid))
        eventually(lambda: out.stat().st_size > 10, what="it counts")
        yield out
        group.thaw()


def test_what_is_frozen_stands_still_and_goes_on(group: Freezer, counter: Path) -> None:
    for _ in range(2):
        group.freeze()
        assert group.is_frozen()
        assert group.wants_frozen()
        seen = counter.read_bytes()
        with started(counter.with_name("control")) as (control, _):  # unfrozen, the same has counted on by then
            eventually(lambda: control.stat().st_size > 100, what="the control counts")
        assert counter.read_bytes() == seen
        group.thaw()
        assert not group.wants_frozen()
        eventually(partial(_longer, counter, len(seen)), what="it counts again")
    group.thaw()  # once more does no harm


def test_a_frozen_task_takes_a_kill_after_the_thaw(group: Freezer, counter: Path) -> None:
    group.freeze()
    (pid,) = group.pids()
    os.kill(pid, 9)
    group.thaw()
    eventually(lambda: not group.pids(), what="it is dead")
    eventually(lambda: state(pid) == "Z", what="a zombie, which nobody has waited for")


def test_a_group_that_is_gone_is_no_error(group: Freezer) -> None:
    gone = Freezer(group.folder / "never", v2=group.v2)
    gone.thaw()
    gone.hold()
    assert not gone.wants_frozen()
    assert gone.pids() == []


def opened(pid: int) -> str:
    """The file that is its standard input, as that of dd is what it reads."""
    try:
        return os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return ""


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file on a file system of its own, and a control group in which reading it takes hours."""
    top = _mounted("cgroup", "blkio")
    if not top:
        pytest.skip("this host has no blkio hierarchy (cgroup v1) to slow a disk down with")
    image, point = tmp_path / "disk", tmp_path / "m"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, point], check=True)
    limits = Path(top) / f"belayer-test-{os.getpid()}"
    limits.mkdir()
    try:
        (point / "file").write_bytes(os.urandom(1 << 20))
        os.sync()
        device = point.stat().st_dev
        (limits / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} 1")
        yield point / "file", limits
    finally:
        remove_group(limits)
        subprocess.run(["umount", point], check=True)


def test_a_task_that_never_parks_is_named_and_the_group_thawed(group: Freezer, slow_disk: tuple[Path, Path]) -> None:
    file, limits = slow_disk
    read = f"echo $$ >{limits}/cgroup.procs; echo $$ >{group.folder}/cgroup.procs; exec dd if={file} of=/dev/null"
    child = subprocess.Popen(["sh", "-c", f"{read} bs=64k count=1 iflag=direct 2>/dev/null"])
    try:
        waited: list[bool] = []  # long: every start of a program waits for a disk for a moment

        def waits() -> bool:
            waited.append(state(child.pid) == "D" and opened(child.pid) == str(file))
            return len(waited) > 30 and all(waited[-30:])

        eventually(waits, what="it waits for the disk, uninterruptibly")
        with pytest.raises(CheckpointIncomplete, match=r"did not freeze within 0.3 s"):
            group.freeze(deadline_s=0.3)
        assert not group.wants_frozen()
        assert child.poll() is None
    finally:
        device = file.stat().st_dev
        (limits / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} 0")
        assert child.wait(120) == 0  # and it goes on when the disk does
