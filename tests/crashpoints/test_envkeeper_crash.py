"""kill -9 at every numbered phase, of whoever is at work there (promises E2, E6, O1).

The daemon stops itself at a failpoint (tests/support/failpoints.py); the test kills, then continues or restarts it.
After each fault the same facts hold: READY is the old or the new one and whole, the sandbox runs or is declared lost
and can be restored, nothing is frozen, nothing is left: containers, mounts, folders, claims, processes.

One private Docker (dockerd and containerd are killed too) and mostly one sandbox for all of it.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from docker.errors import NotFound

from belayer.errors import BelayerError, SandboxLost
from belayer.messages.common import Done
from belayer.messages.sandbox import (
    CheckpointInfo,
    CreateSandbox,
    DestroySandbox,
    ExecAction,
    FullCheckpoint,
    FullRestore,
    ListSandboxes,
    Observation,
    RestoreInfo,
    SandboxInfo,
    SandboxList,
)
from belayer.procs import lives, state
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from envkeeper import freezer
from envkeeper.failpoints import Point
from envkeeper.marks import CLAIMS
from envkeeper.store import Store
from tests.support.envhost import EnvHost
from tests.support.failpoints import Asking, Failpoints, happened, holders
from tests.support.private_docker import PrivateDocker
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

IMAGE = "belayer-sandbox:base"
CREATE = [point for point in Point if point.startswith("create.")]
ACTION = [point for point in Point if point.startswith("action.")]
CAPTURE = [point for point in Point if point.startswith("capture.")]
PUBLISH = [point for point in Point if point.startswith("publish.")]
RESTORE = [point for point in Point if point.startswith("restore.")]
DESTROY = [point for point in Point if point.startswith("destroy.")]
FROZEN = [Point.CAPTURE_FROZEN, Point.CAPTURE_COPYING, Point.CAPTURE_DUMPED, Point.CAPTURE_COPIED]


class Scene:
    """The one sandbox, whatever became of it. Its shell holds X, the number of the last boundary that it was told."""

    def __init__(self, host: EnvHost, docker: PrivateDocker, points: Failpoints) -> None:
        self.host, self.docker, self.points = host, docker, points
        self.box = self._new()

    def mounts(self, end: str) -> list[str]:
        return [point for point in self.docker.mounts() if point.endswith(end)]

    def netns(self) -> list[str]:
        return [point for point in self.docker.mounts() if "/netns/" in point]

    def _new(self) -> Sandbox:
        box = self.host.create()
        box.exec("X=1; (while :; do sleep 0.05; done) & head -c 300000 /dev/urandom > /data; sha256sum /data > /sum")
        box.checkpoint()
        return box

    @property
    def store(self) -> Store:
        return Store(self.host.paths.checkpoints, self.box.sandbox_id)

    def info(self) -> SandboxInfo:
        return self.host.info(self.box.sandbox_id)

    def ready(self) -> str:
        pointer = self.store.ready()
        assert pointer is not None
        return pointer.checkpoint_id

    def begin(self, point: Point) -> Asking:
        """The request that leads to ``point``, under way."""
        box, sock = self.box, self.host.paths.envkeeper_sock
        name, life, k = box.sandbox_id, box.incarnation, box.boundary
        act = ExecAction(sandbox_id=name, incarnation=life, boundary=k, command="X=after")
        capture = FullCheckpoint(sandbox_id=name, incarnation=life, boundary=k, context_digest="new")
        asks: dict[str, tuple[msgspec.Struct, type[msgspec.Struct]]] = {
            "create": (CreateSandbox(name="half"), SandboxInfo),
            "action": (act, Observation),
            "capture": (capture, CheckpointInfo),
            "restore": (FullRestore(sandbox_id=name, incarnation=life), RestoreInfo),
            "destroy": (DestroySandbox(sandbox_id=name), Done),
        }
        asks["publish"] = asks["capture"]
        kind = point.split(".")[0]
        if kind == "restore":
            self.kill_container()
        self.points.arm(point)
        asking = Asking(sock, *asks[kind], lambda: self.host.process.poll() is None)
        self.points.wait(point, self.host.process.pid)
        return asking

    def resume(self) -> None:
        os.kill(self.host.process.pid, signal.SIGCONT)

    def kill_container(self) -> None:
        pid = self.info().pid
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.info().state == "lost", what="the death is seen")

    def whole(self, before: str) -> None:
        """What must hold after every fault. ``before``: READY before it."""
        self.points.clear()
        host = self.host
        info = self.settled()
        eventually(lambda: not os.listdir(self.store.home / "tmp"), what="nothing half-written or half-removed is left")
        manifest, _ = self.store.load(self.ready())
        self.store.verify(manifest)
        assert manifest.checkpoint_id == before or manifest.context_digest == "new"
        if info.state == "running":
            group = freezer.of_process(info.pid)
            assert not group.wants_frozen()
        self.use(info, manifest.context_digest)
        self.nothing_left(host)

    def settled(self) -> SandboxInfo:
        """The sandbox when no death is on its way to envkeeper any more: one that is said to run has a living PID 1.
        What a fault makes Docker kill later must be seen dead before this is asked."""

        def found() -> SandboxInfo | None:
            info = self.info()
            running = info.state == "running" and lives(info.pid)
            return info if running or info.state == "lost" else None

        info = eventually(found, what="the sandbox runs or is lost")
        assert info is not None
        return info

    def use(self, info: SandboxInfo, digest: str) -> None:
        """It acts, or comes back at READY; and can be checkpointed again."""
        self.box.close()
        self.box = Sandbox.attach(info.sandbox_id, paths=self.host.paths)
        if info.state == "lost":
            back = self.box.restore_info()
            assert back.context_digest == digest
        seen = self.box.exec('echo "$X"; sha256sum -c /sum; X=1')
        assert seen.stdout in ("1\n/data: OK\n", "after\n/data: OK\n")
        self.box.checkpoint()

    def mend(self) -> None:
        """Docker, its containerd, the daemon and the sandbox run again, whatever the last test did to them."""
        self.points.clear()
        self.docker.mend()
        process = self.host.process
        if process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            self.host.wait_ready()
        else:
            self.host.restart()
        listed = self.host.listed()
        if self.box.sandbox_id not in listed or self.info().state not in ("running", "lost"):
            self.box = self._new()
        elif self.info().state == "lost":
            self.box.close()
            self.box = Sandbox.attach(self.box.sandbox_id, paths=self.host.paths)
            self.box.restore()
        for name in listed:
            if name != self.box.sandbox_id and self.host.info(name).state != "destroyed":
                self.host.destroy(name)

    def nothing_left(self, host: EnvHost) -> None:
        info = self.info()
        home = host.paths.checkpoints
        eventually(lambda: host.containers() == [info.container_id], what="one container is left")
        eventually(lambda: len(self.mounts("/merged")) == 1, what="one root is mounted")
        eventually(lambda: len(self.netns()) <= 1, what="a first life has one; a restored one joins none of Docker's")
        eventually(lambda: [path.name for path in home.glob("[!.]*")] == [info.sandbox_id], what="one store is left")
        eventually(lambda: not os.listdir(home / info.sandbox_id / "tmp"), what="nothing of it is half written")
        eventually(lambda: not folders(home / ".restores"), what="no restore has left a thing")
        eventually(
            lambda: [p.name for p in (host.root / "run" / "lives").iterdir()] == [info.incarnation], what="lives"
        )
        mine = f"{info.container_id}*"
        eventually(lambda: sorted(path.suffix for path in CLAIMS.glob(mine)) == [".once", ".owner"], what="its marks")
        me = {host.process.pid, os.getpid()}
        eventually(lambda: not holders(host.root, me), what="no process of a dump or a restore is left")
        eventually(lambda: self._living() == [info.container_id], what="one life")

    def _living(self) -> list[str]:
        """Containers whose shim holds a process. A dockerd that is killed before it has seen a death forgets the empty
        shim, which no client of it can end: it says nothing about us."""
        return [container_id for container_id, pid in self.docker.shims().items() if held_by(pid)]


def folders(path: Path) -> list[str]:
    with os.scandir(path) as listing:
        return [entry.name for entry in listing if entry.is_dir(follow_symlinks=False)]


@pytest.fixture(scope="module")
def docker() -> Iterator[PrivateDocker]:
    with tempfile.TemporaryDirectory(prefix="bd-") as folder:
        found = PrivateDocker(Path(folder) / "d").start()
        try:
            found.take_image(IMAGE)
            yield found
        finally:
            found.stop()


@pytest.fixture(scope="module")
def stage(docker: PrivateDocker) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        points = Failpoints(Path(folder) / "points")
        host = EnvHost.start(Path(folder), "keep_checkpoints = 2\n", docker.url, points.env)
        try:
            found = Scene(host, docker, points)
            yield found
            found.box.close()
        finally:
            host.stop()


@pytest.fixture
def scene(stage: Scene) -> Iterator[Scene]:
    """The scene, working: what a test before has left broken fails that test alone. A daemon that ended by itself fails
    the test that it ended in, with its last words."""
    stage.mend()
    yield stage
    code = stage.host.process.poll()
    assert code in (None, -signal.SIGKILL), f"envkeeper ended by itself with {code}: {stage.host.tail()}"


def test_every_point_is_in_one_of_the_lists() -> None:
    assert sorted([*CREATE, *ACTION, *CAPTURE, *PUBLISH, *RESTORE, *DESTROY]) == sorted(Point)


@pytest.mark.parametrize("point", [*CREATE, *ACTION, *CAPTURE, *PUBLISH, *RESTORE])
def test_envkeeper_is_killed(scene: Scene, point: Point) -> None:
    before = scene.ready()
    asking = scene.begin(point)
    scene.host.kill()
    asking.end(dead=True)
    assert asking.answer is None, "nothing was told"
    scene.host.restart()
    if point in CREATE:
        eventually(lambda: scene.host.listed() == [scene.box.sandbox_id], what="what was half made is gone")
    if point is Point.PUBLISH_READY:
        assert scene.ready() != before
    scene.whole(before)


@pytest.mark.parametrize("point", DESTROY)
def test_envkeeper_is_killed_while_it_destroys(scene: Scene, point: Point) -> None:
    asking = scene.begin(point)
    scene.host.kill()
    asking.end(dead=True)
    scene.host.restart()
    scene.points.clear()
    eventually(lambda: scene.host.listed() == [], what="what was begun is done")
    eventually(lambda: scene.host.containers() == [], what="no container is left")
    eventually(lambda: list(scene.host.paths.checkpoints.glob("[!.]*")) == [], what="no store is left")
    scene.box = scene._new()
    scene.nothing_left(scene.host)


@pytest.mark.parametrize("point", [*CAPTURE, Point.PUBLISH_HASHED, Point.PUBLISH_RENAMED])
def test_the_container_is_killed_in_a_checkpoint(scene: Scene, point: Point) -> None:
    before = scene.ready()
    pid = scene.info().pid
    asking = scene.begin(point)
    os.kill(pid, signal.SIGKILL)
    scene.resume()
    asking.end(dead=False)
    eventually(lambda: scene.info().state == "lost", what="the death is seen")
    assert (asking.answer is not None) == (scene.ready() != before)
    assert asking.answer is not None or isinstance(asking.failed, SandboxLost), asking.failed
    scene.whole(before)


def test_the_container_is_killed_while_it_is_made(scene: Scene) -> None:
    before, served = scene.ready(), scene.info().pid
    asking = scene.begin(Point.CREATE_STARTED)
    (pid,) = eventually(lambda: living(scene) - {served}, what="its container runs")
    os.kill(pid, signal.SIGKILL)
    happened(lambda: not lives(pid), "it is dead")
    scene.resume()
    asking.end(dead=False)
    assert isinstance(asking.failed, SandboxLost), asking.failed
    eventually(lambda: scene.host.listed() == [scene.box.sandbox_id], what="nothing is left of it")
    scene.whole(before)


@pytest.mark.parametrize("point", [Point.RESTORE_STARTED, Point.RESTORE_VERIFIED, Point.RESTORE_PROVED])
def test_the_new_container_is_killed_in_a_restore(scene: Scene, point: Point) -> None:
    """Before its proof it is never served: the same checkpoint is tried again. After it, its death is like any."""
    before = scene.ready()
    asking = scene.begin(point)
    (pid,) = eventually(lambda: living(scene), what="the new container runs")
    os.kill(pid, signal.SIGKILL)
    happened(lambda: not lives(pid), "it is dead")
    scene.resume()
    asking.end(dead=False)
    assert isinstance(asking.answer, RestoreInfo), asking.failed
    assert [step.split(":")[0] for step in asking.answer.path] == [before] * (1 if point is Point.RESTORE_PROVED else 2)
    if point is Point.RESTORE_PROVED:
        eventually(lambda: scene.info().state == "lost", what="the death is seen")
    assert scene.ready() == before
    scene.whole(before)


def living(scene: Scene) -> set[int]:
    """PID 1 of every container that runs; Docker may not know of a death yet."""
    client, rows = scene.docker.client(), []
    try:
        for one in scene.host.containers():
            with suppress(NotFound):  # of an earlier life, removed meanwhile
                rows.append(client.inspect_container(one)["State"])
    finally:
        client.close()
    return {row["Pid"] for row in rows if row["Running"] and lives(row["Pid"])}


@pytest.mark.parametrize("point", FROZEN)
def test_criu_is_killed(scene: Scene, point: Point) -> None:
    before = scene.ready()
    asking = scene.begin(point)
    (criu,) = [pid for pid in held_by(scene.host.process.pid) if name_of(pid) == "criu"]
    os.kill(criu, signal.SIGKILL)
    happened(lambda: not lives(criu), "CRIU is dead")
    scene.resume()
    asking.end(dead=False)
    assert isinstance(asking.failed, BelayerError), "no checkpoint came of it"
    assert scene.ready() == before
    scene.whole(before)


def states(scene: Scene) -> dict[str, str]:
    listed = call_sync(scene.host.paths.envkeeper_sock, ListSandboxes(), SandboxList, 60.0)
    return {row.sandbox_id: row.state for row in listed.sandboxes}


def held_by(pid: int) -> list[int]:
    """Children of all threads of ``pid``; none when it has ended."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def name_of(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


DOCKER_AT = [
    Point.CREATE_RECORDED,
    Point.CAPTURE_DUMPED,
    *(Point.RESTORE_CLAIMED, Point.RESTORE_CREATED, Point.RESTORE_ARMED, Point.RESTORE_STARTED),
]


@pytest.mark.parametrize("point", DOCKER_AT)
def test_dockerd_is_killed(scene: Scene, point: Point) -> None:
    """Docker is away when the phase goes on: a named failure, and all is well when it is back."""
    before = scene.ready()
    asking = scene.begin(point)
    scene.docker.kill_dockerd()
    scene.resume()
    asking.end(dead=False)
    assert asking.failed is not None or point in (Point.CAPTURE_DUMPED, *RESTORE[-4:]), asking.answer
    scene.docker.start_dockerd()
    if point in CREATE:
        assert states(scene).get("half", "destroyed") == "destroyed", "what is left of it goes when Docker is back"
    scene.host.kill()
    scene.host.restart()
    scene.whole(before)


@pytest.mark.parametrize("point", [Point.CAPTURE_FROZEN, Point.RESTORE_STARTED])
def test_containerd_is_killed(scene: Scene, point: Point) -> None:
    before = scene.ready()
    asking = scene.begin(point)
    scene.docker.kill_containerd()
    scene.docker.start_containerd()
    scene.docker.wait_runs(IMAGE)
    scene.resume()
    asking.end(dead=False)
    scene.whole(before)


@pytest.mark.parametrize(
    "point", [Point.ACTION_ENDED, Point.CAPTURE_FROZEN, Point.RESTORE_STARTED, Point.RESTORE_SERVED]
)
def test_the_shim_is_killed(scene: Scene, point: Point) -> None:
    """containerd ends what a dead shim held, some moments later: the sandbox is lost, and comes back. In a restore that
    moment may lie before the proof (tried again), or behind it (restored, and lost at once)."""
    before = scene.ready()
    asking = scene.begin(point)
    shims = scene.docker.shims().values()
    held = [pid for shim in shims for pid in held_by(shim)]
    for pid in shims:
        with suppress(ProcessLookupError):  # the one of a life before, which goes by itself
            os.kill(pid, signal.SIGKILL)
    happened(lambda: not scene.docker.shims(), "the shims are dead")
    scene.resume()
    asking.end(dead=False)
    happened(lambda: all(not lives(pid) for pid in held), "containerd has ended what they held")
    if point is not Point.RESTORE_STARTED:
        eventually(lambda: scene.info().state == "lost", what="the death is seen")
    scene.whole(before)


def test_a_zombie_is_no_life(scene: Scene) -> None:
    """PID 1 is dead and nobody has reaped it: Docker still says that it runs, and much of its /proc is gone."""
    before, info = scene.ready(), scene.info()
    shim = scene.docker.shims()[info.container_id]
    scene.host.kill()
    os.kill(shim, signal.SIGSTOP)
    try:
        os.kill(info.pid, signal.SIGKILL)
        happened(lambda: state(info.pid) == "Z", "it is a zombie")
        scene.host.restart()
        assert scene.info().state == "lost"
    finally:
        os.kill(shim, signal.SIGCONT)
    scene.whole(before)
