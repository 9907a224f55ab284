"""A client's mistake costs that client an answer, and nobody else anything (promise O1)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from belayer.errors import BelayerError, DaemonUnreachable, Refused
from belayer.messages.common import Ping, Pong
from belayer.messages.sandbox import (
    CheckpointInfo,
    CreateSandbox,
    ExecAction,
    Forked,
    ForkSandbox,
    FullRestore,
    Observation,
    PathContent,
    ReadPath,
    RestoreInfo,
    SandboxInfo,
)
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from envkeeper.failpoints import Point
from tests.support.envhost import EnvHost
from tests.support.failpoints import Failpoints
from tests.support.wait import eventually

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Failpoints:
    return Failpoints(tmp_path_factory.mktemp("points") / "armed")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, points: Failpoints) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("asking"), env=points.env)
    yield found
    found.stop()


def test_an_empty_sequence_is_no_program(host: EnvHost) -> None:
    """An empty script would have been taken for it, and made a boundary."""
    box = host.create()
    with pytest.raises(Refused, match="names no program"):
        box.exec([])
    assert (box.exec("true").boundary, box.boundary) == (1, 1)
    box.destroy()


def bad(box: Sandbox) -> list[tuple[msgspec.Struct, type[msgspec.Struct], str]]:
    act = ExecAction(sandbox_id=box.sandbox_id, incarnation=box.incarnation, boundary=0, command="true")
    read = ReadPath(sandbox_id=box.sandbox_id, incarnation=box.incarnation, path="/etc/passwd")
    create = [
        (CreateSandbox(name="bad", cpus=math.nan), "cpus"),
        (CreateSandbox(name="bad", cpus=math.inf), "cpus"),
        (CreateSandbox(name="bad", memory_mb=1 << 60), "memory_mb"),
        (CreateSandbox(name="bad", pids=-1), "pids"),
        (CreateSandbox(name="bad", disk_mb=-1), "disk_mb"),
        (CreateSandbox(name="bad", env={"": "v"}), "env"),
        (CreateSandbox(name="bad", hostname="no host"), "hostname"),
        (CreateSandbox(name="bad", labels={"belayer": "stranger"}), "labels"),
    ]
    acts = [
        *((replace(act, timeout_s=value), "timeout_s") for value in (-1.0, math.nan, math.inf, 1e300)),
        *((replace(act, max_output=value), "max_output") for value in (-5, 1 << 60)),
    ]
    fork = [
        (ForkSandbox(sandbox_id=box.sandbox_id, count=-1), "count"),
        (ForkSandbox(sandbox_id=box.sandbox_id, count=1 << 62), "count"),
        (ForkSandbox(sandbox_id=box.sandbox_id, names=("q", "q")), "names"),
        (ForkSandbox(sandbox_id=box.sandbox_id, checkpoint_id="../x\0"), "checkpoint_id"),
    ]
    return [
        *((ask, SandboxInfo, word) for ask, word in create),
        *((ask, Observation, word) for ask, word in acts),
        *((ask, Forked, word) for ask, word in fork),
        (FullRestore(sandbox_id=box.sandbox_id, checkpoint_id="a\0b"), RestoreInfo, "checkpoint_id"),
        (replace(read, offset=-1), PathContent, "offset"),
        (replace(read, most=-1), PathContent, "most"),
    ]


def test_bad_requests_end_nobodys_daemon(host: EnvHost, box: Sandbox) -> None:
    neighbour, seen = host.create("neighbour"), list[Observation]()
    # It ends when it is told to, after all of the bad requests: it was in flight beside each of them.
    thread = threading.Thread(
        target=lambda: seen.append(neighbour.exec("touch /begun; while [ ! -e /go ]; do sleep 0.05; done; echo whole"))
    )
    thread.start()
    upper = Path(f"/proc/{host.info('neighbour').pid}/root")
    try:
        eventually((upper / "begun").exists, what="the neighbour's action runs")
        for ask, kind, word in bad(box):
            with pytest.raises(Refused, match=word):
                call_sync(host.paths.envkeeper_sock, ask, kind, 60)
    finally:
        (upper / "go").touch()
        thread.join(120)
    assert [row.stdout for row in seen] == ["whole\n"]
    assert call_sync(host.paths.envkeeper_sock, Ping(), Pong).pid == host.process.pid
    assert host.process.poll() is None
    kept = {path.name for path in host.paths.checkpoints.iterdir() if not path.name.startswith(".")}
    assert kept == {box.sandbox_id, "neighbour"}
    assert box.exec("echo on").boundary == 1
    neighbour.destroy()


def test_the_client_refuses_what_is_no_time(box: Sandbox) -> None:
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(Refused, match="timeout_s"):
            box.exec("true", timeout_s=value)
    assert box.exec("true").boundary == 1


def test_a_checkpoint_whose_envkeeper_is_killed_ends_with_a_typed_error(
    host: EnvHost, box: Sandbox, points: Failpoints
) -> None:
    box.exec("echo one > /f")
    old, failed = box.checkpoint(), list[BelayerError]()
    box.exec("echo two > /f")

    def ask() -> None:
        try:
            box.checkpoint()
        except BelayerError as why:
            failed.append(why)

    thread = threading.Thread(target=ask)
    points.arm(Point.CAPTURE_DUMPED)
    thread.start()
    points.wait(Point.CAPTURE_DUMPED, host.process.pid)
    host.kill()
    thread.join(120)  # not yet back: nothing but the death of the daemon ends the call
    assert not thread.is_alive()
    points.clear()
    host.restart()
    assert [type(why) for why in failed] == [DaemonUnreachable]
    assert "checkpoint" in failed[0].message
    assert "READY" in failed[0].kept
    assert box.checkpoints().ready == old.checkpoint_id
    made: CheckpointInfo = box.checkpoint()
    assert made.boundary == 2
