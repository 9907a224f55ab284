"""Faults inside a checkpoint: the sandbox runs on, the previous READY stays, nothing is left behind (promise E2)."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from belayer.errors import BelayerError, CheckpointIncomplete, RestoreFailed, SandboxLost
from belayer.sandbox import Sandbox
from envkeeper import freezer
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

HEAVY = 'X=5; python3 -c \'import time; b=bytearray(300 << 20); open("/up","w"); time.sleep(9000)\' &'


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[EnvHost]:
    found = EnvHost.start(root)
    yield found
    found.stop()


@pytest.fixture
def box(host: EnvHost) -> Iterator[Sandbox]:
    made = host.create(memory_mb=1500)
    yield made
    try:
        made.destroy()
    except BelayerError:
        made.close()


class Capture:
    """A checkpoint in a thread of its own, and what came of it."""

    def __init__(self, host: EnvHost, box: Sandbox) -> None:
        self.other = Sandbox.attach(box.sandbox_id, paths=host.paths)
        self.failed: BelayerError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.other.checkpoint()
        except BelayerError as why:
            self.failed = why
        finally:
            self.other.close()

    def over(self) -> bool:
        return not self._thread.is_alive()

    def end(self) -> BelayerError | None:
        self._thread.join(300)
        assert not self._thread.is_alive()
        return self.failed


def heavy(host: EnvHost, box: Sandbox) -> freezer.Freezer:
    """Enough memory that a test can act while it is being dumped."""
    box.exec(HEAVY)
    assert box.exec("until [ -e /up ]; do sleep 0.01; done", timeout_s=60).exit_code == 0
    return freezer.of_process(host.info(box.sandbox_id).pid)


def begun(host: EnvHost, box: Sandbox, group: freezer.Freezer) -> Capture:
    """A checkpoint that is frozen. On a busy host it may be over before anybody has looked at it."""
    capture = Capture(host, box)
    eventually(lambda: group.wants_frozen() or capture.over(), what="the sandbox is frozen", every=0.0005)
    return capture


def criu_below(pid: int) -> list[int]:
    """Children of its threads, read from /proc: a program that looked for them would come when the dump is over."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return [child for child in found if name_of(child) == "criu"]


def name_of(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def leftovers(host: EnvHost, box: Sandbox) -> list[Path]:
    return list((host.paths.checkpoints / box.sandbox_id / "tmp").iterdir())


def test_criu_is_killed_in_the_middle_of_a_dump(host: EnvHost, box: Sandbox) -> None:
    group = heavy(host, box)
    first, failed = box.checkpoint(), None
    for _ in range(30):
        capture = begun(host, box, group)
        for pid in criu_below(host.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        failed = capture.end()
        if failed is not None:
            break
        first = box.checkpoint()  # the kill came too late for that dump
    assert isinstance(failed, CheckpointIncomplete | SandboxLost), failed
    assert "CRIU ended" in str(failed)
    assert not group.wants_frozen()
    eventually(lambda: leftovers(host, box) == [], what="nothing of it is left")
    assert host.info(box.sandbox_id).ready_checkpoint == first.checkpoint_id
    if isinstance(failed, SandboxLost):
        # Killed while its helper was inside a process: that one may not be itself, and is not served again.
        assert "may not be itself" in str(failed)
        assert box.restore()[0] == first.boundary
    assert box.exec("echo $X").stdout == "5\n"
    assert box.checkpoint().checkpoint_id != first.checkpoint_id


def test_the_sandbox_dies_in_the_middle_of_a_dump(host: EnvHost, box: Sandbox) -> None:
    group = heavy(host, box)
    first = box.checkpoint()
    box.exec("X=6")
    capture = begun(host, box, group)
    pid = host.info(box.sandbox_id).pid
    os.kill(pid, signal.SIGKILL)
    failed = capture.end()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="PID 1 is gone")
    eventually(lambda: host.info(box.sandbox_id).state == "lost", what="the death is seen")
    eventually(lambda: leftovers(host, box) == [], what="nothing of it is left")
    if failed is None:
        # The kill took effect after the last byte was captured: then that prefix is whole, and is the one restored.
        assert box.restore()[0] == box.boundary
        assert box.exec("echo $X").stdout == "6\n"
        return
    assert isinstance(failed, SandboxLost | CheckpointIncomplete), failed
    assert host.info(box.sandbox_id).ready_checkpoint == first.checkpoint_id
    assert box.restore()[0] == first.boundary
    assert box.exec("echo $X").stdout == "5\n"


def test_the_disk_is_full(host: EnvHost) -> None:
    """A store of 20 MB: refused with the remedy, READY stays, and there is room again afterwards."""
    box = host.create(name="full", memory_mb=1500)
    home = host.paths.checkpoints / "full"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=0700", "belayer-test", home], check=True)
    try:
        for name in ("tmp", "ck", "claims"):
            (home / name).mkdir(mode=0o700)
        first = box.checkpoint()
        heavy(host, box)
        with pytest.raises(CheckpointIncomplete, match=r"No space left|CRIU") as caught:
            box.checkpoint()
        assert "previous" in str(caught.value)
        assert leftovers(host, box) == []
        assert host.info("full").ready_checkpoint == first.checkpoint_id
        assert box.exec("echo $X").stdout == "5\n"
        free = os.statvfs(home)
        assert free.f_bavail * free.f_frsize > 10 << 20
        box.destroy()
    finally:
        subprocess.run(["umount", "-l", home], check=True)


@pytest.mark.parametrize("name", ["upper.pack", "criu/core-1.img", "criu/pstree.img"])
def test_a_changed_byte_is_found_and_nothing_is_served(host: EnvHost, box: Sandbox, name: str) -> None:
    box.exec("X=7")
    first = box.checkpoint()
    box.exec("echo some > /file")
    second = box.checkpoint()
    path = host.paths.checkpoints / box.sandbox_id / "ck" / second.checkpoint_id / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    proof = box.kill()
    assert "dead" in proof.seen
    with pytest.raises(RestoreFailed, match=second.checkpoint_id):
        box.restore_info(allow_older=False)
    assert host.info(box.sandbox_id).state == "lost"
    eventually(lambda: len(host.containers()) <= 1, what="the half-made container is removed")
    back = box.restore_info()  # the right to restore was given back
    assert (back.checkpoint_id, back.boundary, back.context_digest) == (first.checkpoint_id, 1, first.context_digest)
    assert [step.split(":")[0] for step in back.path] == [second.checkpoint_id, first.checkpoint_id]
    assert box.exec("echo $X; ls /file 2>/dev/null").stdout == "7\n"


def test_an_unreadable_checkpoint_costs_no_living_sandbox(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=8")
    with pytest.raises(RestoreFailed, match="no READY"):
        box.restore()
    with pytest.raises(RestoreFailed, match="cannot be read"):
        box.restore("k9-00000000")
    assert box.exec("echo $X").stdout == "8\n"
