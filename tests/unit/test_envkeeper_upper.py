"""The raw copy of an upper layer is exact: every kind of node, attribute, hole, link and nanosecond."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from belayer.errors import RestoreFailed
from envkeeper import upper

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts and trusted attributes need root")

Row = tuple[object, ...]


def manifest(top: Path) -> dict[str, Row]:
    """Written apart from the code under test: what an lstat, a read and the attributes say of every name."""
    out: dict[str, Row] = {}
    inodes: dict[int, str] = {}
    for folder, names, files in os.walk(top):
        for path in [Path(folder), *(Path(folder) / name for name in sorted(names + files))]:
            info = path.lstat()
            kind = stat.S_IFMT(info.st_mode)
            whiteout = kind == stat.S_IFCHR and info.st_rdev == 0
            name = str(path.relative_to(top))
            same = name if whiteout or kind == stat.S_IFDIR else inodes.setdefault(info.st_ino, name)
            body = hashlib.sha256(path.read_bytes()).hexdigest() if kind == stat.S_IFREG else ""
            link = os.readlink(path) if kind == stat.S_IFLNK else ""
            attrs = tuple(
                (attr, os.getxattr(path, attr, follow_symlinks=False))
                for attr in sorted(os.listxattr(path, follow_symlinks=False))
            )
            size = info.st_size if kind == stat.S_IFREG else 0
            owner = (info.st_mode, info.st_uid, info.st_gid)
            out[name] = (*owner, size, info.st_mtime_ns, info.st_rdev, same, body, link, attrs)
    return out


def capability() -> bytes:
    # struct vfs_cap_data, revision 2, effective, CAP_NET_RAW permitted (linux/capability.h)
    return struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)


def fill(top: Path) -> None:
    (top / "d/e").mkdir(parents=True)
    (top / "d/e").chmod(0o1777)
    os.chown(top / "d", 12, 34)
    (top / "empty").touch()
    (top / "small").write_bytes(os.urandom(100))
    (top / "edge").write_bytes(os.urandom(65536))
    (top / "large").write_bytes(os.urandom(1_000_001))
    (top / "setuid").write_bytes(b"#!")
    (top / "setuid").chmod(0o4755)
    os.setxattr(top / "setuid", "security.capability", capability())
    os.setxattr(top / "small", "user.k", b"\x00v")
    os.setxattr(top / "d/e", "trusted.overlay.opaque", b"y")
    os.setxattr(top, "trusted.overlay.impure", b"y")
    os.link(top / "large", top / "d/again")
    os.link(top / "d/again", top / "d/e/thrice")
    os.symlink("../nowhere", top / "d/soft")
    os.mknod(top / "gone", stat.S_IFCHR | 0o000, 0)
    os.link(top / "gone", top / "d/gone")  # as newer kernels do with whiteouts
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mkfifo(top / "pipe", 0o640)
    with socket.socket(socket.AF_UNIX) as sock:
        here = Path.cwd()
        os.chdir(top)  # sun_path is short
        sock.bind("sock")
        os.chdir(here)
    with (top / "sparse").open("wb") as file:
        file.truncate(64 << 20)
        for at in (0, 5_000_000, (64 << 20) - 3):
            file.seek(at)
            file.write(b"abc")
    with (top / "hole").open("wb") as file:
        file.truncate(300_000)
    (top / os.fsdecode(b"odd\n\xff\t name")).write_bytes(b"odd")
    for at, path in enumerate(sorted(top.rglob("*"), reverse=True)):
        os.utime(path, ns=(1_000_000_000 + at, 1_234_567_890_123_456_789 - at), follow_symlinks=False)
    os.utime(top, ns=(5, 987_654_321_000_000_007))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    folders = (tmp_path / "from", tmp_path / "ck", tmp_path / "to")
    for folder in folders:
        folder.mkdir()
    fill(folders[0])
    return folders


def test_everything_comes_back(pair: tuple[Path, Path, Path]) -> None:
    source, folder, target = pair
    (target / "left/over").mkdir(parents=True)
    os.symlink("/etc", target / "trap")
    before = manifest(source)
    captured = upper.capture(source, folder)
    upper.write_index(captured, folder)
    assert upper.unpack(folder, target) == len(captured.entries)
    assert manifest(target) == before
    assert (target / "sparse").stat().st_blocks * 512 < 1 << 20
    assert (target / "hole").stat().st_blocks == 0
    assert captured.nbytes < 2_000_000


def test_a_second_copy_of_the_copy_is_the_same(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    source, folder, target = pair
    before = manifest(source)
    upper.write_index(upper.capture(source, folder), folder)
    upper.unpack(folder, target)
    again = tmp_path / "ck2"
    again.mkdir()
    upper.write_index(upper.capture(target, again), again)
    upper.unpack(again, target)
    assert manifest(target) == before


def test_writes_through_a_mapping_are_in_the_copy(tmp_path: Path) -> None:
    import mmap

    source, folder, target = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path in (source, folder, target):
        path.mkdir()
    (source / "m").write_bytes(bytes(200_000))
    with (source / "m").open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[100_000:100_003] = b"hey"  # dirty, not synced
        upper.write_index(upper.capture(source, folder), folder)
    upper.unpack(folder, target)
    assert (target / "m").read_bytes()[100_000:100_003] == b"hey"


def test_a_tree_deeper_than_a_path_may_be_long(tmp_path: Path) -> None:
    """Six hundred folders, with a file and a hard link at both ends, and siblings on the way down."""
    source, folder, target = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path in (source, folder, target):
        path.mkdir()
    (source / "top").write_text("top")
    at = os.open(source, os.O_RDONLY)
    for level in range(600):
        for name in ("d" * 9, "eee") if level % 200 == 199 else ("d" * 9,):
            os.mkdir(name, dir_fd=at)
        below = os.open("d" * 9, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, 0o640, dir_fd=at))
    os.link(source / "top", "linked", dst_dir_fd=at)
    os.close(at)
    upper.write_index(upper.capture(source, folder), folder)
    assert upper.unpack(folder, target) == len(upper.read_index(folder)) == 600 + 3 + 4
    at = os.open(target, os.O_RDONLY)
    for _ in range(600):
        below = os.open("d" * 9, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    assert sorted(os.listdir(at)) == ["bottom", "linked"]
    assert os.stat("linked", dir_fd=at).st_ino == (target / "top").stat().st_ino
    os.close(at)
    for tree in (source, target):  # pytest's own clean-up cannot
        subprocess.run(["rm", "-rf", tree], check=True)


@pytest.mark.parametrize("path", [b"../up", b"/etc/passwd", b"a/../../b"])
def test_an_index_that_points_outside_is_refused(tmp_path: Path, path: bytes) -> None:
    entry = upper.Entry(path=path, kind="file", mode=0o100644, uid=0, gid=0, mtime_ns=0, atime_ns=0)
    upper.write_index(upper.Captured([entry], 0, 0), tmp_path)
    with pytest.raises(RestoreFailed, match="outside"):
        upper.read_index(tmp_path)


def test_a_torn_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / upper.INDEX).write_bytes(b"\x93\xc4")
    with pytest.raises(RestoreFailed, match="no index"):
        upper.read_index(tmp_path)
