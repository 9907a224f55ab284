"""What a sandbox can do to its host through its own files, and what it can see of checkpoints: nothing (E7, E8)."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from belayer.errors import BelayerError
from belayer.sandbox import Sandbox
from envkeeper import upper
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

# Many files, the longest names, a tree deeper than any path may be long, and everything that could lead a careless copy
# out of its folder or leave something dangerous in it.
HOSTILE = r"""
import os, stat, sys
canary, count = sys.argv[1], int(sys.argv[2])
os.mkdir("/evil"); os.chdir("/evil")
for n in range(0, count, 1000):
    os.mkdir(f"many{n}")
    for k in range(n, n + 1000):
        os.close(os.open(f"many{n}/{k}", os.O_CREAT | os.O_WRONLY))
for letter in ("a", "\u00e4", "\udcff", "\n"):
    raw = os.fsencode(letter); name = raw * (255 // len(raw))
    with open(name, "wb") as file: file.write(name)
os.symlink("/", "root"); os.symlink("/etc/shadow", "shadow"); os.symlink(canary, "canary")
os.symlink("../../../../../../../../../../" + canary.lstrip("/"), "up"); os.symlink("loop", "loop")
os.symlink("/evil/gone/" + "x" * 200, "broken")
os.mkdir("real"); os.symlink(canary, "real/folder"); os.mkfifo("real/fifo")
with open("suid", "w") as file: file.write("#!/bin/sh\nid\n")
os.chmod("suid", 0o6755); os.mkdir("sticky", 0o1777); os.chmod("sticky", 0o1777)
for name, kind in (("mem", stat.S_IFCHR), ("disk", stat.S_IFBLK)):
    try: os.mknod(name, kind | 0o666, os.makedev(1, 1) if name == "mem" else os.makedev(254, 0))
    except PermissionError: print("no", name)
for _ in range(60):
    os.mkdir("d" * 100); os.chdir("d" * 100)
with open("bottom", "w") as file: file.write("6000 bytes down")
"""
SEE = r"""
import hashlib, os
digest, seen = hashlib.sha256(), 0
def walk(fd):
    global seen
    for entry in sorted(os.scandir(fd), key=lambda e: os.fsencode(e.name)):
        info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
        link = os.readlink(entry.name, dir_fd=fd) if entry.is_symlink() else ""
        size = info.st_size if entry.is_file(follow_symlinks=False) else 0
        digest.update(os.fsencode(repr((entry.name, info.st_mode, info.st_uid, size, info.st_rdev, link)))); seen += 1
        if entry.is_dir(follow_symlinks=False):
            below = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
            walk(below); os.close(below)
walk(os.open("/evil", os.O_RDONLY))
print(seen, digest.hexdigest())
"""
COUNT = 100_000


@pytest.fixture(scope="module")
def host() -> Iterator[EnvHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        found = EnvHost.start(Path(folder))
        yield found
        found.stop()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A folder of the host that hostile links point at; untouched afterwards."""
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "file").write_text("of the host")
    before = [(path.name, path.lstat().st_mtime_ns, path.lstat().st_mode) for path in [folder, *folder.iterdir()]]
    yield folder
    after = [(path.name, path.lstat().st_mtime_ns, path.lstat().st_mode) for path in [folder, *folder.iterdir()]]
    assert after == before


def run(box: Sandbox, program: str, *args: object) -> str:
    words = " ".join(map(str, args))
    seen = box.exec(f"python3 - {words} <<'E'\n{program}\nE\n", timeout_s=600)
    assert seen.exit_code == 0, seen.stderr
    return seen.stdout


def test_a_hostile_layer_comes_back_whole_and_touches_nothing(host: EnvHost, canary: Path) -> None:
    shadow = hashlib.sha256(Path("/etc/shadow").read_bytes()).hexdigest()
    box = host.create(memory_mb=800)
    try:
        run(box, HOSTILE, canary, COUNT)
        before = run(box, SEE)
        assert int(before.split()[0]) > COUNT
        made = box.checkpoint()
        inside = [path for path in (host.paths.checkpoints / box.sandbox_id).rglob("*")]
        assert len(inside) < 200, "a packed layer: its files are no files of the host"
        assert not [path for path in inside if path.is_symlink() or path.lstat().st_mode & 0o7077]
        assert "dead" in box.kill().seen
        assert box.restore_info().checkpoint_id == made.checkpoint_id
        assert run(box, SEE) == before
    finally:
        box.destroy()
    assert hashlib.sha256(Path("/etc/shadow").read_bytes()).hexdigest() == shadow
    eventually(lambda: not list(host.paths.checkpoints.glob("[!.]*")), what="its checkpoints are gone")


def row(path: bytes, kind: str, link: bytes = b"", mode: int = 0o100644) -> list[object]:
    return [path, kind, mode, 0, 0, 1, 1, 0, 0, link, {}, []]


@pytest.mark.parametrize("path", [b"out/evil", b"../evil", b"/evil", b"a/../../evil", b"out", b"."])
def test_an_index_that_leads_out_of_the_layer_is_refused(tmp_path: Path, canary: Path, path: bytes) -> None:
    """Not even a changed archive can write elsewhere: neither by a name nor through a link that it made before."""
    folder, layer = tmp_path / "ck", tmp_path / "layer"
    folder.mkdir()
    layer.mkdir()
    rows = [row(b"", "dir", mode=0o40755), row(b"out", "link", os.fsencode(canary)), row(b"a", "dir", mode=0o40755)]
    (folder / upper.PACK).write_bytes(b"")
    (folder / upper.INDEX).write_bytes(msgpack.packb([*rows, row(path, "file")], use_bin_type=True))
    with pytest.raises((BelayerError, OSError)):
        upper.unpack(folder, layer)
    assert not (tmp_path / "evil").exists()
    assert [entry.name for entry in canary.iterdir()] == ["file"]


MARKER = "marker-of-another-sandbox"
SEARCH = r"""
set +e
cat /proc/self/mountinfo | awk '{print $4}'
for path in "$@"; do cat "$path" "/run/belayer/../../../$path" "/proc/1/root/$path" 2>/dev/null; done
cat /run/belayer/../* /.belayer/../* 2>/dev/null | head -c 100000
for disk in 254:0 8:0 259:0; do
    rm -f /d; mknod /d b ${disk%:*} ${disk#*:} 2>/dev/null && dd if=/d bs=1M count=8 2>/dev/null
done
mkdir -p /m; mount -t ext4 /d /m 2>&1; mount --bind /run/belayer /m 2>&1; mount -o remount,rw /run/belayer 2>&1
nsenter -t 1 -m ls / 2>&1; unshare -m true 2>&1
echo x > /run/belayer/incarnation; echo x > /.belayer/agent
"""


def test_no_checkpoint_can_be_read_from_a_sandbox(host: EnvHost) -> None:
    secret, thief = host.create(), host.create()
    try:
        secret.exec(f"KEY={MARKER}; echo {MARKER} > /secret")
        made = secret.checkpoint()
        home = host.paths.checkpoints / secret.sandbox_id / "ck" / made.checkpoint_id
        names = [path for path in home.rglob("*") if path.is_file()]
        assert MARKER.encode() in (home / "upper.pack").read_bytes(), "there is something to find"
        words = " ".join(map(str, names))
        seen = thief.exec(f"set -- {words}\n{SEARCH}", timeout_s=240)
        assert MARKER not in seen.stdout
        assert not seen.truncated
        assert seen.stderr.count("Read-only file system") == 2, seen.stderr
        assert str(host.paths.checkpoints) not in seen.stdout, "nothing of the store is mounted"
        assert thief.exec("ls -A /m").stdout == ""
    finally:
        secret.destroy()
        thief.destroy()
    eventually(lambda: not home.exists(), what="the end of a sandbox removes its checkpoints")


def test_everything_of_the_store_and_the_scratch_is_closed(host: EnvHost) -> None:
    box = host.create()
    try:
        box.checkpoint()
        for top in (host.paths.state, host.paths.run / "lives", Path("/run/belayer-runtime")):
            assert top.stat().st_mode & 0o077 == 0, top
        store = host.paths.checkpoints
        eventually(lambda: len(list(store.glob("[!.]*"))) == 1, what="those of other tests are gone")
        for path in store.rglob("*"):
            assert path.lstat().st_mode & 0o077 == 0, path
    finally:
        box.destroy()
