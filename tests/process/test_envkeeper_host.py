"""Hosts that cannot keep sandboxes: one sentence with the remedy, exit 2, nothing created. Crashes inside a capture."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from belayer.errors import HostUnfit
from belayer.messages.sandbox import CheckpointInfo, FullCheckpoint
from belayer.paths import Paths
from envkeeper import freezer
from tests.support.docker_proxy import DockerProxy, answer
from tests.support.envhost import TREE, EnvHost
from tests.support.failpoints import Asking
from tests.support.wait import eventually

pytestmark = pytest.mark.docker


def start(root: Path, config: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    Paths(root).config.parent.mkdir(exist_ok=True)
    Paths(root).config.write_text(f"[envkeeper]\n{config}\n")
    env = {**os.environ, "BELAYER_ROOT": str(root)}
    command = [sys.executable, "-m", "envkeeper", *arguments]
    return subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def short() -> Iterator[Path]:
    """A root whose path fits into a socket's address."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        yield Path(folder)


@pytest.fixture
def old_criu(tmp_path: Path) -> Path:
    path = tmp_path / "criu-old"
    path.write_text("#!/bin/sh\necho 'Version: 4.1.1'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('criu = "/nowhere/criu"', "no CRIU at /nowhere/criu; run `make setup`"),
        ('criu = "OLD"', "CRIU 4.1.1 .* is too old for this kernel: 4.2 is needed"),
        ('image = "belayer-none:such"', "no image belayer-none:such in this Docker; run `make setup`"),
        ('runtime = "nosuch"', "Docker does not know the runtime nosuch; add .*daemon.json"),
        ("memory_mb = 0", "memory_mb"),
        ("enabled = false", "envkeeper.enabled is false: this host keeps no sandboxes"),
        ('image = "NOPE:1:2"', "NOPE:1:2"),
        ("nonsense = 1", "nonsense"),
    ],
)
def test_an_unfit_host_is_named_and_nothing_is_created(short: Path, old_criu: Path, config: str, says: str) -> None:
    unfit(start(short, config.replace("OLD", str(old_criu))), short, 2, says)


def test_without_docker_it_is_tried_again(short: Path) -> None:
    """3, not 2: systemd starts a daemon again that found no dockerd, and leaves one alone that cannot run here."""
    says = "Docker does not answer at unix:///nowhere.sock; start dockerd"
    unfit(start(short, 'docker = "unix:///nowhere.sock"'), short, 3, says)
    unit = (TREE / "systemd" / "envkeeper.service").read_text()
    assert "RestartPreventExitStatus=2\n" in unit


def test_a_docker_that_answers_500_is_asked_again(short: Path) -> None:
    """Of a host that is too busy it says nothing that would last."""
    says = answer("500 Internal Server Error", b'{"message": "on purpose"}')
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        proxy = DockerProxy(Path(folder) / "d.sock")
        proxy.before = lambda line: says if "/info" in line else None
        try:
            ended = start(short, f'docker = "{proxy.url}"')
        finally:
            proxy.close()
    unfit(ended, short, 3, "Docker refused for its version: on purpose; see the log of dockerd")


def unfit(ended: subprocess.CompletedProcess[str], short: Path, code: int, says: str) -> None:
    assert ended.returncode == code, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert ended.stdout == ""
    assert re.search(says, ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr
    assert sorted(path.name for path in short.iterdir()) == ["belayer.toml"]


def test_the_doctor_really_dumps_and_restores(short: Path) -> None:
    ended = start(short, "", "--doctor")
    assert ended.returncode == 0, ended.stderr
    assert "proven by nonce" in ended.stdout


@pytest.fixture
def host(short: Path) -> Iterator[EnvHost]:
    found = EnvHost.start(short)
    yield found
    found.stop()


def test_a_second_daemon_of_one_root_is_refused(host: EnvHost) -> None:
    ended = start(host.root, "")
    assert ended.returncode == 2
    assert "already runs" in ended.stderr
    host.wait_ready()


def frozen_or_over(group: freezer.Freezer, asking: Asking) -> bool:
    return group.is_frozen() or asking.over()


def test_a_daemon_killed_while_its_sandbox_is_frozen(host: EnvHost) -> None:
    """O1: nothing stays frozen, the half-written checkpoint is gone, the previous one is READY, the shell is there."""
    box = host.create(memory_mb=1500)
    box.exec('X=5; python3 -c \'import time; b=bytearray(300 << 20); open("/up","w"); time.sleep(9000)\' &')
    assert box.exec("until [ -e /up ]; do sleep 0.01; done", timeout_s=60).exit_code == 0
    box.checkpoint()
    group = freezer.of_process(host.info(box.sandbox_id).pid)
    ask = FullCheckpoint(
        sandbox_id=box.sandbox_id, incarnation=box.incarnation, boundary=box.boundary, context_digest=""
    )

    frozen_after_the_kill, before = False, ""
    for _ in range(30):  # on a busy host the dump may be over before the kill
        before = host.info(box.sandbox_id).ready_checkpoint
        asking = Asking(host.paths.envkeeper_sock, ask, CheckpointInfo)
        eventually(partial(frozen_or_over, group, asking), what="the sandbox is frozen", every=0.001)
        host.kill()
        frozen_after_the_kill = group.wants_frozen()
        asking.end(dead=True)
        host.restart()
        if frozen_after_the_kill:
            break
    assert frozen_after_the_kill, "no kill hit a freeze"
    assert not group.wants_frozen()
    assert host.info(box.sandbox_id).ready_checkpoint == before
    assert list((host.paths.checkpoints / box.sandbox_id / "tmp").iterdir()) == []
    assert box.exec("echo $X").stdout == "5\n"
    assert box.checkpoint().boundary == box.boundary
    proof = box.kill()
    assert "dead" in proof.seen
    assert box.restore()[0] == box.boundary
    assert box.exec("echo $X").stdout == "5\n"


def test_a_stopped_daemon_leaves_its_sandboxes_running(host: EnvHost) -> None:
    box = host.create()
    box.exec("X=5")
    pid = host.info(box.sandbox_id).pid
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(120) == 0
    assert Path(f"/proc/{pid}").exists()
    host.restart()
    assert box.exec("echo $X").stdout == "5\n"


def test_a_container_that_docker_cannot_remove_keeps_nobody_waiting(short: Path) -> None:
    """Not the other sandboxes, and not the next start of envkeeper, which tries it again."""
    held = b'{"message": "driver failed to remove root filesystem: unlinkat /m: device or resource busy"}'
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        proxy = DockerProxy(Path(folder) / "d.sock")
        host = EnvHost.start(short, "", proxy.url)
        try:
            box = host.create(name="good")
            box.exec("X=41")
            host.create(name="stuck").close()
            stuck = host.info("stuck").container_id
            hits: list[str] = []

            def before(line: str) -> bytes | None:
                if not line.startswith("DELETE") or stuck not in line:
                    return None
                hits.append(line)
                return answer("500 Internal Server Error", held)

            proxy.before = before
            with pytest.raises(HostUnfit, match="resource busy"):
                host.destroy("stuck")
            host.kill()
            seen = len(hits)
            host.restart()
            assert len(hits) > seen, "its next life has tried, too"
            assert box.exec("echo $X").stdout == "41\n"
            assert host.info("stuck").state == "destroyed"
            proxy.before = lambda _line: None
            host.kill()
            host.restart()
            assert host.listed() == ["good"]
            assert host.containers() == [host.info("good").container_id]
            box.destroy()
        finally:
            proxy.before = lambda _line: None  # its containers are removed through it
            host.stop()
            proxy.close()
