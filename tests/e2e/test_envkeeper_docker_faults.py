"""Docker fails at each request that envkeeper makes, in every way a peer can fail: the daemon lives, the caller gets a
typed error or what it asked for, and all is well when Docker is (promises E4, E5, O1).

One envkeeper for all of it, never started again: whatever ends it fails every test that follows.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import docker
import pytest

from belayer.errors import BelayerError, ErrorCode, HostUnfit, RestoreFailed, SandboxLost
from belayer.sandbox import Sandbox
from envkeeper import marks
from envkeeper.host import owner_of
from tests.support.docker_proxy import DockerProxy, Wrong, answer
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

ONCE = [wrong for wrong in Wrong if wrong is not Wrong.AWAY]
# Of the answers that are none, each kind of unreadable once more where a fault is dear: all are read at one border.
FEW = [Wrong.CUT, Wrong.REFUSE, Wrong.CUT_ANSWER, Wrong.WRONG_JSON, Wrong.AWAY]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bl-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[DockerProxy]:
    made = DockerProxy(folder / "d.sock")
    yield made
    made.close()


@pytest.fixture(scope="module")
def host(folder: Path, proxy: DockerProxy) -> Iterator[EnvHost]:
    found = EnvHost.start(folder, "", proxy.url)
    yield found
    proxy.clear()
    found.stop()


@pytest.fixture(autouse=True)
def _lives(host: EnvHost, proxy: DockerProxy) -> Iterator[None]:
    host.wait_ready()
    pid = host.process.pid
    yield
    proxy.clear()
    host.wait_ready()
    assert host.process.pid == pid


def at_each_request(proxy: DockerProxy, wrong: Wrong, ask: Callable[[], object], after: Callable[[bool], None]) -> int:
    """``ask`` with its first, second, ... request going ``wrong``, until it makes no more of them; how many it made.
    ``after`` is told whether it was answered."""
    for at in count(1):
        proxy.arm(at, wrong)
        failed = None
        try:
            ask()
        except BelayerError as why:
            failed = why
        hit, answered = proxy.hit, failed is None
        assert failed is None or failed.code is not ErrorCode.BROKEN, f"{wrong} at {at} ({hit}): {failed}"
        proxy.clear()
        after(answered)
        if not hit:
            assert answered
            return at - 1
    raise AssertionError


def running(host: EnvHost, sandbox_id: str) -> list[str]:
    """Asked past the proxy."""
    client = docker.APIClient("unix:///var/run/docker.sock")
    try:
        labels = [f"belayer={owner_of(host.paths)}", f"belayer.sandbox={sandbox_id}"]
        return [row["Id"] for row in client.containers(filters={"label": labels})]
    finally:
        client.close()


def lose(host: EnvHost, box: Sandbox) -> None:
    os.kill(host.info(box.sandbox_id).pid, signal.SIGKILL)
    eventually(lambda: host.info(box.sandbox_id).state == "lost", what="the death is seen")


@pytest.mark.parametrize("wrong", Wrong)
def test_create(host: EnvHost, proxy: DockerProxy, wrong: Wrong) -> None:
    numbers = count()

    def after(answered: bool) -> None:
        if answered:
            box = Sandbox.attach(f"{wrong}{at[0]}", paths=host.paths)
            assert box.exec("echo here").stdout == "here\n"
            box.destroy()

    at = [0]

    def ask() -> None:
        at[0] = next(numbers)
        host.create(name=f"{wrong}{at[0]}").close()

    assert at_each_request(proxy, wrong, ask, after) >= 4


@pytest.mark.parametrize("wrong", FEW)
def test_restore(host: EnvHost, proxy: DockerProxy, box: Sandbox, wrong: Wrong) -> None:
    """Lost, or back; never two lives, and a restore that failed may be asked for again."""
    box.exec("X=41")
    box.checkpoint()

    def after(answered: bool) -> None:
        if not answered:
            assert host.info(box.sandbox_id).state == "lost"
            box.restore()
        assert box.exec("echo $X").stdout == "41\n"
        eventually(lambda: len(running(host, box.sandbox_id)) == 1, what="one life")

    def ask() -> None:
        box.restore()

    lose(host, box)

    def again(answered: bool) -> None:
        after(answered)
        lose(host, box)

    assert at_each_request(proxy, wrong, ask, again) >= 5


@pytest.mark.parametrize("wrong", FEW)
def test_fork(host: EnvHost, proxy: DockerProxy, box: Sandbox, wrong: Wrong) -> None:
    box.checkpoint()
    made: list[Sandbox] = []

    def ask() -> None:
        made.extend(box.fork(1))

    def after(_answered: bool) -> None:
        while made:
            made.pop().destroy()

    assert at_each_request(proxy, wrong, ask, after) >= 5


@pytest.mark.parametrize("wrong", ONCE)
def test_destroy(host: EnvHost, proxy: DockerProxy, wrong: Wrong) -> None:
    """Told once, it is destroyed: what Docker would not remove is removed later."""
    names = count()
    name = [""]

    def make() -> None:
        name[0] = f"{wrong}-d{next(names)}"
        host.create(name=name[0]).close()

    def ask() -> None:
        host.destroy(name[0])

    def after(_answered: bool) -> None:
        assert not [row for row in host.listed() if row == name[0] and host.info(row).state != "destroyed"]
        eventually(lambda: running(host, name[0]) == [], what="it does not run")
        make()

    make()
    assert at_each_request(proxy, wrong, ask, after) >= 1
    host.destroy(name[0])


@pytest.mark.parametrize("wrong", Wrong)
def test_a_sandbox_lost_in_an_action_is_lost_whatever_docker_says(
    host: EnvHost, proxy: DockerProxy, box: Sandbox, wrong: Wrong
) -> None:
    """Docker is asked why it died, for people: what it answers, or not, never takes the place of SandboxLost."""
    seen: list[BelayerError] = []

    def act() -> None:
        try:
            box.exec("touch /begun; sleep 1000")
        except BelayerError as why:
            seen.append(why)

    thread = threading.Thread(target=act)
    thread.start()
    pid = host.info(box.sandbox_id).pid
    eventually(Path(f"/proc/{pid}/root/begun").exists, what="the action runs")
    proxy.arm(1, wrong)
    os.kill(pid, signal.SIGKILL)
    thread.join(120)
    assert not thread.is_alive()
    assert isinstance(seen[0], SandboxLost), seen
    assert "no checkpoint" in str(seen[0])
    assert proxy.hit


def test_checkpoints_and_actions_ask_docker_nothing(host: EnvHost, proxy: DockerProxy, box: Sandbox) -> None:
    proxy.arm(1, Wrong.AWAY)
    box.exec("X=1")
    box.checkpoint()
    assert box.exec("echo $X").stdout == "1\n"
    # The collector lists containers now and then, and removes what is left of tests before this one.
    mine = host.info(box.sandbox_id).container_id
    others = [row for row in proxy.seen if row.startswith("DELETE") and mine not in row]
    assert [row for row in proxy.seen if "/containers/json" not in row and row not in others] == []


def test_many_at_once_while_docker_is_away(host: EnvHost, proxy: DockerProxy) -> None:
    """Each in a thread that has never spoken to Docker before."""
    boxes = [host.create() for _ in range(6)]
    for box in boxes:
        box.checkpoint()
        lose(host, box)
    proxy.arm(1, Wrong.AWAY)
    proxy.drop()
    failed: list[BelayerError] = []

    def restore(box: Sandbox) -> None:
        try:
            box.restore()
        except BelayerError as why:
            failed.append(why)

    threads = [threading.Thread(target=restore, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [why.code for why in failed] == [ErrorCode.HOST_UNFIT] * 6, failed
    assert proxy.hit
    proxy.clear()
    for box in boxes:
        box.restore()
        assert box.exec("echo here").stdout == "here\n"
        box.destroy()


def test_docker_that_is_started_again_between_two_requests_is_not_noticed(
    host: EnvHost, proxy: DockerProxy, box: Sandbox
) -> None:
    proxy.drop()
    other = host.create()
    other.destroy()
    assert box.exec("echo here").stdout == "here\n"


GONE = answer("404 Not Found", b'{"message": "No such container: on purpose"}')
BUSY = answer("409 Conflict", b'{"message": "removal of container on purpose is already in progress"}')
DIED = answer("500 Internal Server Error", b'{"message": "Container on purpose is not running"}')
HELD = answer(
    "500 Internal Server Error",
    b'{"message": "driver \\"overlay2\\" failed to remove root filesystem: unlinkat /m: device or resource busy"}',
)
LATE = answer("500 Internal Server Error", b'{"message": "tried to kill container, but did not receive an exit event"}')


@pytest.mark.parametrize(
    ("said", "times"),
    [(GONE, 1), (BUSY, 1), (DIED, 4), (HELD, 3), (LATE, 2)],
    ids=["gone", "busy", "died", "held", "late"],
)
def test_a_container_that_goes_by_itself_while_it_is_removed(
    host: EnvHost, proxy: DockerProxy, box: Sandbox, said: bytes, times: int
) -> None:
    """Docker's words for it: no such container, somebody else removes it, it died under Docker's own hands, its root is
    mounted a moment longer, its death is told late."""
    left = [said] * times

    def before(line: str) -> bytes | None:
        return left.pop() if left and line.startswith("DELETE") else None

    proxy.before = before
    try:
        box.destroy()
    finally:
        proxy.before = lambda _line: None
    assert left == [], "each was said"
    assert box.sandbox_id not in host.listed()


def test_a_container_that_vanishes_between_look_and_removal(host: EnvHost, proxy: DockerProxy, box: Sandbox) -> None:
    """Somebody else removes it in that very moment, for real: in a restore, and in a destroy."""
    box.exec("X=1")
    box.checkpoint()
    client, seen = docker.APIClient("unix:///var/run/docker.sock"), list[str]()

    def before(line: str) -> None:
        if line.startswith("DELETE"):
            name = line.split("/containers/")[1].split("?")[0].split()[0]
            client.remove_container(name, force=True, v=True)
            seen.append(name)

    proxy.before = before
    try:
        lose(host, box)
        old = host.info(box.sandbox_id).container_id
        box.restore()
        assert box.exec("echo $X").stdout == "1\n"
        eventually(lambda: old in seen, what="the container of the old life was removed before us")
        (new,) = running(host, box.sandbox_id)
        box.destroy()
        assert {old, new} <= set(seen)
    finally:
        proxy.before = lambda _line: None
        client.close()
    eventually(lambda: running(host, box.sandbox_id) == [], what="it does not run")
    names = tuple(seen)
    eventually(
        lambda: not [one for one in marks.CLAIMS.iterdir() if one.name.startswith(names)], what="no mark is left"
    )


# What Docker tells of itself when a host is too busy for it.
SLOW = answer("500 Internal Server Error", b'{"message": "failed to start shim: context deadline exceeded: unknown"}')


class Starts:
    """The first ``times`` starts of containers are answered so; ``asked`` counts them all."""

    def __init__(self, proxy: DockerProxy, times: int, said: bytes = SLOW) -> None:
        self.proxy, self.times, self.said, self.asked = proxy, times, said, 0

    def __enter__(self) -> Starts:
        self.proxy.before = self._before
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.before = lambda _line: None

    def _before(self, line: str) -> bytes | None:
        if not line.partition("?")[0].partition(" HTTP/")[0].endswith("/start"):
            return None
        self.asked += 1
        return self.said if self.asked <= self.times else None


def test_a_create_that_the_engine_hinders_is_tried_again_and_has_an_end(host: EnvHost, proxy: DockerProxy) -> None:
    with Starts(proxy, 2) as starts:
        box = host.create(name="hindered")
    assert starts.asked == 3
    assert box.exec("echo here").stdout == "here\n"
    eventually(lambda: running(host, "hindered") == [host.info("hindered").container_id], what="one container")
    box.destroy()
    with Starts(proxy, 1000) as starts, pytest.raises(HostUnfit, match="context deadline exceeded"):
        host.create(name="hindered")
    assert starts.asked == 3
    assert "hindered" not in host.listed()


def test_a_restore_that_the_engine_hinders_costs_no_step(host: EnvHost, proxy: DockerProxy, box: Sandbox) -> None:
    """The newest checkpoint is whole: it is tried again, and when that has no end, nothing older comes in its place."""
    box.exec("X=1")
    old = box.checkpoint()
    box.exec("X=2")
    new = box.checkpoint()
    lose(host, box)
    with Starts(proxy, 3) as starts:
        back = box.restore_info()
    assert starts.asked == 4
    assert (back.checkpoint_id, back.boundary) == (new.checkpoint_id, 2), back.path
    assert "context deadline exceeded" in back.path[0]
    assert box.exec("echo $X").stdout == "2\n"
    lose(host, box)
    with Starts(proxy, 1000), pytest.raises(RestoreFailed, match="context deadline exceeded") as told:
        box.restore()
    assert new.checkpoint_id in told.value.kept
    assert old.checkpoint_id not in told.value.message
    assert host.info(box.sandbox_id).state == "lost"
    assert box.restore()[0] == 2, "asked again later, it works"
    assert box.exec("echo $X").stdout == "2\n"
    eventually(lambda: len(running(host, box.sandbox_id)) == 1, what="one life")


def test_a_restore_that_criu_refuses_falls_back_to_the_one_before(
    host: EnvHost, proxy: DockerProxy, box: Sandbox
) -> None:
    """The control: what CRIU says is about the checkpoint. It is tried twice, and the path tells what was done."""
    said = b'{"message": "OCI runtime create failed: criu failed: type NOTIFY errno 0: unknown"}'
    box.exec("X=1")
    old = box.checkpoint()
    box.exec("X=2")
    box.checkpoint()
    lose(host, box)
    with Starts(proxy, 2, answer("500 Internal Server Error", said)) as starts:
        back = box.restore_info()
    assert starts.asked == 3
    assert (back.checkpoint_id, back.boundary) == (old.checkpoint_id, 1), back.path
    assert "criu failed" in back.path[0]
    assert box.exec("echo $X").stdout == "1\n"


def test_forks_that_the_engine_hinders_are_tried_again(host: EnvHost, proxy: DockerProxy, box: Sandbox) -> None:
    box.exec("X=41")
    box.checkpoint()
    with Starts(proxy, 2) as starts:
        forks = box.fork(3)
    assert starts.asked == 5
    for fork in forks:
        assert fork.exec("echo $X").stdout == "41\n"
        eventually(lambda name=fork.sandbox_id: len(running(host, name)) == 1, what="one life")  # type: ignore[misc]
        fork.destroy()


def test_what_docker_was_left_with_is_removed_without_another_start(host: EnvHost) -> None:
    """Containers whose making was answered by nothing, or whose removal failed, in all the tests above."""
    eventually(lambda: (host.listed(), host.containers()) == ([], []), within=300, what="nothing is left", every=0.5)
