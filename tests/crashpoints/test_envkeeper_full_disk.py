"""The disk fills up at each phase (promise E2): everything of Belayer's lies on it, a failure has a name, READY is the
old or the new one, the sandbox goes on or is lost and comes back once there is room. Nothing ends the daemon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from belayer.errors import BelayerError
from belayer.messages.sandbox import CheckpointInfo, ExecAction, FullCheckpoint, FullRestore, Observation, RestoreInfo
from belayer.paths import Paths
from belayer.sandbox import Sandbox
from envkeeper.failpoints import Point
from envkeeper.store import Store
from tests.support.envhost import EnvHost
from tests.support.failpoints import Asking, Failpoints
from tests.support.ran import ran
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

CHECKPOINT = [
    *(Point.CAPTURE_BEGUN, Point.CAPTURE_COPYING, Point.CAPTURE_COPIED, Point.CAPTURE_THAWED),
    *(Point.PUBLISH_HASHED, Point.PUBLISH_MANIFEST, Point.PUBLISH_NAMED),
]
RESTORE = [
    Point.RESTORE_CLAIMED,
    Point.RESTORE_FENCED,
    Point.RESTORE_INSTALLED,
    Point.RESTORE_PROVED,
    Point.RESTORE_POINTED,
]


class Scene:
    """``disk``: a folder of the file system that fills up; ``words``: of the fault that it then is."""

    def __init__(self, root: Path, host: EnvHost, points: Failpoints, disk: Path, words: str) -> None:
        self.root, self.host, self.points, self.disk, self.words = root, host, points, disk, words
        self.box = host.create(name="box")
        self.box.exec("X=1; head -c 2000000 /dev/urandom > /data; sha256sum /data > /sum")
        self.box.checkpoint()

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not a byte is left."""
        balloon = self.disk / ".balloon"
        with balloon.open("wb") as file:
            for size in (1 << 20, 4096):
                with pytest.raises(OSError, match=self.words):
                    _write_for_ever(file.fileno(), bytes(size))
        try:
            yield
        finally:
            balloon.unlink()
            os.sync()  # until then some file systems count it

    def ready(self) -> str:
        pointer = Store(self.host.paths.checkpoints, "box").ready()
        assert pointer is not None
        return pointer.checkpoint_id

    def state(self) -> str:
        return self.host.info("box").state

    def ask(self, point: Point, ask: msgspec.Struct, reply: type[msgspec.Struct]) -> Asking:
        self.points.arm(point)
        asking = Asking(self.host.paths.envkeeper_sock, ask, reply, lambda: self.host.process.poll() is None)
        pid = self.host.process.pid
        self.points.wait(point, pid)
        with self.full():
            os.kill(pid, signal.SIGCONT)
            asking.end(dead=False)
        self.points.clear()
        assert self.host.process.poll() is None, (self.root / "envkeeper.log").read_text()[-2000:]
        return asking

    def named(self, asking: Asking) -> None:
        assert isinstance(asking.failed, BelayerError)
        assert self.words in str(asking.failed) or "no space left" in str(asking.failed), asking.failed

    def recover(self) -> None:
        """With room again: alive or restored, and another checkpoint is made."""
        self.box.close()
        self.box = Sandbox.attach("box", paths=self.host.paths)
        if self.state() == "lost":
            self.box.restore()
        assert self.box.exec('echo "$X"; sha256sum -c /sum').stdout == "1\n/data: OK\n"
        before = self.ready()
        self.box.checkpoint()
        assert self.ready() != before
        home = self.host.paths.checkpoints
        eventually(lambda: not os.listdir(home / "box" / "tmp"), what="nothing is half written")
        restores = home / ".restores"
        eventually(lambda: not [path for path in restores.iterdir() if path.is_dir()], what="no restore is left")
        eventually(lambda: len(self.host.containers()) == 1, what="one container is left")


def _write_for_ever(fd: int, data: bytes) -> None:
    while True:
        os.write(fd, data)


@contextmanager
def playing(root: Path, disk: Path, words: str) -> Iterator[Scene]:
    points = Failpoints(root / "points")
    host = EnvHost.start(root, "keep_checkpoints = 2\n", env=points.env)
    try:
        found = Scene(root, host, points, disk, words)
        yield found
        found.box.close()
    finally:
        host.stop()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        root = Path(folder) / "full"
        root.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "belayer-test", root], check=True)
        (root / "envkeeper.log").symlink_to(Path(folder) / "log")  # a daemon's log goes to journald, not here
        try:
            with playing(root, root, "No space left") as found:
                yield found
        finally:
            subprocess.run(["umount", "-l", root], check=True)


@pytest.fixture(scope="module")
def quota() -> Iterator[Scene]:
    """Checkpoints lie where there is room, and no more of it is ours (EDQUOT). Of the quotas of file systems this is
    the one that kernels without CONFIG_QFMT_V2 have."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        image, top, root = (Path(folder) / name for name in ("disk", "top", "root"))
        top.mkdir()
        root.mkdir()
        store = Paths(root).make().checkpoints
        store.mkdir(mode=0o700, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(600 << 20)
        subprocess.run(["mkfs.btrfs", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, top], check=True)
        try:
            for words in (f"quota enable {top}", f"subvolume create {top}/ours", f"qgroup limit 64M {top}/ours"):
                ran("btrfs", *words.split())
            (top / "ours").chmod(0o700)
            subprocess.run(["mount", "--bind", top / "ours", store], check=True)
            try:
                with playing(root, store, "Disk quota exceeded") as found:
                    yield found
            finally:
                subprocess.run(["umount", "-l", store], check=True)
        finally:
            subprocess.run(["umount", "-l", top], check=True)


NO_QUOTA = shutil.which("mkfs.btrfs") is None or "\tbtrfs\n" not in Path("/proc/filesystems").read_text()
WITH_QUOTA = pytest.mark.skipif(
    NO_QUOTA, reason="no file system with quotas: btrfs-progs or btrfs in the kernel is missing"
)


def in_a_checkpoint(scene: Scene, point: Point) -> None:
    before, box = scene.ready(), scene.box
    ask = FullCheckpoint(sandbox_id="box", incarnation=box.incarnation, boundary=box.boundary, context_digest="L")
    asking = scene.ask(point, ask, CheckpointInfo)
    assert scene.state() == "running"
    if asking.answer is None:
        scene.named(asking)
        assert scene.ready() == before
    else:
        assert scene.ready() != before, "nothing was left to write"
    scene.recover()


def in_a_restore(scene: Scene, point: Point) -> None:
    before = scene.ready()
    assert "dead" in scene.box.kill().seen
    eventually(lambda: scene.state() == "lost", what="the death is seen")
    asking = scene.ask(point, FullRestore(sandbox_id="box"), RestoreInfo)
    if asking.answer is None:
        scene.named(asking)
        assert scene.state() == "lost"
    else:
        assert scene.state() == "running"
    assert scene.ready() == before
    scene.recover()


@pytest.mark.parametrize("point", CHECKPOINT)
def test_in_a_checkpoint(scene: Scene, point: Point) -> None:
    in_a_checkpoint(scene, point)


@pytest.mark.parametrize("point", RESTORE)
def test_in_a_restore(scene: Scene, point: Point) -> None:
    in_a_restore(scene, point)


@WITH_QUOTA
@pytest.mark.parametrize("point", [Point.CAPTURE_FROZEN, Point.CAPTURE_COPIED, Point.PUBLISH_HASHED])
def test_a_quota_is_met_in_a_checkpoint(quota: Scene, point: Point) -> None:
    in_a_checkpoint(quota, point)


@WITH_QUOTA
def test_a_quota_is_met_in_a_restore(quota: Scene) -> None:
    in_a_restore(quota, Point.RESTORE_CLAIMED)


def test_a_claim_that_could_not_be_written_is_held_by_nobody(scene: Scene) -> None:
    """The right to restore is a file, and the disk may be full when it is made."""
    before = scene.ready()
    assert "dead" in scene.box.kill().seen
    eventually(lambda: scene.state() == "lost", what="the death is seen")
    with scene.full(), pytest.raises(BelayerError, match="pace"):
        scene.box.restore()
    assert (scene.state(), scene.ready()) == ("lost", before)
    scene.recover()


def test_an_action_is_recorded_from_the_reserve(scene: Scene) -> None:
    box = scene.box
    ask = ExecAction(sandbox_id="box", incarnation=box.incarnation, boundary=box.boundary, command="echo out; X=1")
    asking = scene.ask(Point.ACTION_ENDED, ask, Observation)
    assert isinstance(asking.answer, Observation), asking.failed
    assert asking.answer.stdout == "out\n"
    scene.host.kill()
    scene.host.restart()
    assert scene.host.info("box").boundary == asking.answer.boundary
    scene.recover()


def test_a_new_sandbox_is_refused_and_nothing_is_left_of_it(scene: Scene) -> None:
    with scene.full(), pytest.raises(BelayerError, match="pace"):
        scene.host.create(name="another")
    assert scene.host.listed() == ["box"]
    scene.recover()
