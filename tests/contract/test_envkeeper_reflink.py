"""The upper layer on a file system that shares blocks (xfs) and on one that does not (tmpfs): the same tree comes back,
and only the first is cloned."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkeeper import upper
from tests.conformance.tree import differences, manifest

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root"),
    pytest.mark.skipif(shutil.which("mkfs.xfs") is None, reason="no mkfs.xfs (package xfsprogs)"),
]


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A mounted xfs with reflinks, on a loop device of its own."""
    image, point = tmp_path / "image", tmp_path / "xfs"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, point], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no loop device to mount xfs on: {done.stderr.strip()}")
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "tmpfs"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "belayer-test", point], check=True)
    yield point
    subprocess.run(["umount", point], check=True)


def round_trip(top: Path) -> upper.Captured:
    source, folder, target = top / "a", top / "ck", top / "b"
    for path in (source, folder, target):
        path.mkdir()
    (source / "big").write_bytes(os.urandom(5_000_001))
    (source / "small").write_bytes(b"s" * 100)
    os.link(source / "big", source / "again")
    with (source / "sparse").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(123_456_789)
        file.write(os.urandom(200_000))
    before = manifest(source)
    captured = upper.capture(source, folder)
    upper.write_index(captured, folder)
    # What is captured stands apart: the source goes on in its own blocks.
    with (source / "big").open("r+b") as file:
        file.write(b"later")
    upper.unpack(folder, target)
    assert differences(before, manifest(target)) == []
    with (target / "big").open("r+b") as file:
        file.write(b"restored")
    shutil.rmtree(target)
    target.mkdir()
    upper.unpack(folder, target)  # a second fork of the same checkpoint
    assert differences(before, manifest(target)) == []
    return captured


def test_blocks_are_shared_where_the_file_system_can(xfs: Path) -> None:
    assert upper.shares_blocks(xfs, xfs)
    captured = round_trip(xfs)
    assert captured.cloned >= 5_000_000
    subprocess.run(["sync", "-f", xfs], check=True)
    used = os.statvfs(xfs)
    subprocess.run(["rm", "-rf", xfs / "b"], check=True)
    subprocess.run(["sync", "-f", xfs], check=True)
    freed = (os.statvfs(xfs).f_bfree - used.f_bfree) * used.f_frsize
    assert freed < 2_000_000, "a restored copy of 5 MB holds hardly a block of its own"


def test_they_are_copied_where_it_cannot(plain: Path) -> None:
    assert not upper.shares_blocks(plain, plain)
    assert round_trip(plain).cloned == 0


def test_between_two_file_systems(xfs: Path, plain: Path) -> None:
    assert not upper.shares_blocks(xfs, plain)
    source, folder, target = xfs / "s", plain / "ck", xfs / "t"
    for path in (source, folder, target):
        path.mkdir()
    (source / "big").write_bytes(os.urandom(3_000_000))
    captured = upper.capture(source, folder)
    upper.write_index(captured, folder)
    upper.unpack(folder, target)
    assert captured.cloned == 0
    assert differences(manifest(source), manifest(target)) == []
