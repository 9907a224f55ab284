"""What an engine or a host says of itself is told as that, and never as a fault of the sandbox or the checkpoint."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from belayer.errors import BelayerError, CheckpointIncomplete, CheckpointRefused, RestoreFailed
from envkeeper import criu, passing
from envkeeper.criu import DumpCut, DumpPlan
from envkeeper.docker_api import ApiDumper, StaleContent
from envkeeper.patience import patiently

BUSY = os.strerror(errno.EBUSY).lower()
# As Docker 20.10 to 27 with containerd 1.4 to 1.7 and runc 1.0 to 1.2 say them.
ENGINES = [
    "Cannot checkpoint container c: ttrpc: closed: unknown",
    "Cannot checkpoint container c: rpc error: code = Unavailable desc = transport is closing: unavailable",
    'Cannot checkpoint container c: connection error: desc = "transport: error while dialing: dial unix '
    '/run/containerd/containerd.sock: connect: connection refused": unavailable',
    "Cannot checkpoint container c: context deadline exceeded: unknown",
    "Cannot checkpoint container c: failed to retrieve checkpoint data: content digest sha256:0: not found",
    "Cannot checkpoint container c: runc did not terminate successfully: exit status 1: signal: killed",
    "Container c is not running",
    "",
]
LEFT = [
    f"Cannot checkpoint container c: content sha256:{'0' * 64}: already exists",
    "Cannot checkpoint container c: ref moby/1/index locked for 3.2ms (since 2020-01-01 00:00:00): unavailable",
    'Cannot checkpoint container c: image "containerd.io/checkpoint/c:01-02-2006-15:04:05": already exists',
]
CRIU = "Cannot checkpoint container c: runc did not terminate sucessfully: criu failed: type NOTIFY errno 0\nlog file: "


@dataclass
class Watched:
    """A Moment that writes down what is asked of it."""

    seen: list[str] = field(default_factory=list)

    def start(self) -> None:
        self.seen.append("start")

    def begin(self) -> None:
        self.seen.append("begin")

    def end(self) -> None:
        self.seen.append("end")

    def hold(self) -> None:
        self.seen.append("hold")

    def cut(self) -> None:
        self.seen.append("cut")

    def thaw(self) -> None:
        self.seen.append("thaw")


def plan(images: Path) -> DumpPlan:
    return DumpPlan(os.getpid(), images, images, images, (), (), 1.0)


def told(folder: Path, said: str) -> tuple[BelayerError, list[str]]:
    moment = Watched()
    return ApiDumper._why(plan(folder), said, moment), moment.seen


@pytest.mark.parametrize("said", ENGINES)
def test_an_engine_that_failed_blames_no_sandbox(tmp_path: Path, said: str) -> None:
    """Nobody knows then whether the dump was over: its tasks are looked at before they run."""
    why, seen = told(tmp_path, said)
    assert type(why) is DumpCut
    assert (seen, bool(why.kept), bool(why.remedy)) == (["cut"], True, True)
    assert said[:300] in why.message


@pytest.mark.parametrize("said", LEFT)
def test_what_a_dump_left_in_containerd_is_asked_again(tmp_path: Path, said: str) -> None:
    why, seen = told(tmp_path, said)
    assert type(why) is StaleContent
    assert seen == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Error (criu/sk-inet.c:193): inet: Unsupported socket", CheckpointRefused),
        ("Error (compel/src/lib/infect.c:9): Can't mmap: Cannot allocate memory", CheckpointIncomplete),
        ("Error (criu/page-pipe.c:1): Can't make pipe for page-pipe: Too many open files", CheckpointIncomplete),
        ("Error (criu/util.c:1): Can't fork for tar: Resource temporarily unavailable", CheckpointIncomplete),
        ("Error (criu/cr-dump.c:1): Timeout reached. Try to interrupt: 1", CheckpointIncomplete),
        ("Error (criu/image.c:1): Can't write: No space left on device", CheckpointIncomplete),
    ],
)
def test_criu_is_short_of_something_or_names_the_sandbox(tmp_path: Path, line: str, kind: type[BelayerError]) -> None:
    """By either path, also where the want is in a later line than the failure."""
    (tmp_path / "dump.log").write_text(
        f"(00.1) pie: fine\n(00.2) Error (criu/x.c:1): it did not work\n(00.3) {line}\n(00.4) Error (c): it FAILED\n"
    )
    assert type(criu._why_failed(plan(tmp_path), "")) is kind
    why, seen = told(tmp_path, f"{CRIU}{tmp_path}/dump.log path= /x/dump.log: unknown")
    assert (type(why), seen) == (kind, [])


def test_what_lingers_and_what_lacks() -> None:
    removal = f'driver "overlay2" failed to remove root filesystem: unlinkat /var/lib/docker/overlay2/x/merged: {BUSY}'
    gone = (
        "Could not kill running container c, cannot remove - tried to kill container, but did not receive an exit event"
    )
    assert all(map(passing.lingers, (removal, gone, "Container c is not running")))
    assert not passing.lingers("you have no permission")
    full = passing.hindered("x", OSError(errno.ENOSPC, "full"))
    short = passing.hindered("x", OSError(errno.EMFILE, "many"))
    assert full is not None
    assert short is not None
    assert (full.again, short.again) == (False, True)
    assert passing.hindered("x", OSError(errno.EIO, "a bad sector is the checkpoint's own")) is None


def attempts(why: list[BelayerError]) -> tuple[int, int, str]:
    """(attempts, cleanings, what came of them) with three tries, of which those of ``why`` fail."""
    done = [0, 0]

    def attempt() -> str:
        done[0] += 1
        if why:
            raise why.pop(0)
        return "made"

    def clean() -> None:
        done[1] += 1

    try:
        said = patiently(attempt, clean, (0.0, 0.0))
    except BelayerError as error:
        said = error.message
    return done[0], done[1], said


def test_patience_is_for_what_hinders_and_has_an_end() -> None:
    assert attempts([]) == (1, 0, "made")
    assert attempts([passing.Hindered("a"), passing.Hindered("b")]) == (3, 2, "made")
    assert attempts([passing.Hindered(word) for word in "abcd"]) == (3, 2, "c")
    assert attempts([passing.Hindered("full", again=False)]) == (1, 0, "full")
    assert attempts([RestoreFailed("its own")]) == (1, 0, "its own")
