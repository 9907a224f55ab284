"""The fallback through Docker's own checkpoint API keeps the same promises: the same tests, another engine path
(promises E1-E6). On a private dockerd in experimental mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belayer.errors import (
    BelayerError,
    CheckpointIncomplete,
    CheckpointRefused,
    ErrorCode,
    RestoreFailed,
    SandboxLost,
)
from belayer.procs import lives
from belayer.sandbox import Sandbox
from envkeeper.docker_api import SETTINGS
from tests.e2e.test_envkeeper import (  # noqa: F401 - collected here, with the fixtures of this module
    kill,
    test_an_action_in_flight_is_lost_and_never_an_observation,
    test_racing_restorers_of_one_life_get_one_winner,
    test_rewind_of_a_living_sandbox_and_a_stale_client,
    test_the_daemon_is_killed_and_its_sandbox_is_served_again,
    test_three_generations_come_back_whole,
)
from tests.support.docker_proxy import DockerProxy, Wrong, answer
from tests.support.envhost import TREE, EnvHost
from tests.support.private_docker import PrivateDocker
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

BINARY = "/opt/belayer/criu/usr/sbin/criu"
CONFIG = 'engine_path = "docker_api"\ncheckpoint_timeout_s = 60\n'


@pytest.fixture(scope="module")
def docker() -> Iterator[PrivateDocker]:
    with tempfile.TemporaryDirectory(prefix="bl-api-", dir="/var/lib") as folder:
        made = PrivateDocker(Path(folder) / "d", extra={"experimental": True})
        try:
            made.start().take_image("belayer-sandbox:base")
            yield made
        finally:
            made.stop()


@contextmanager
def behind_a_proxy(docker: PrivateDocker) -> Iterator[tuple[EnvHost, DockerProxy]]:
    """An envkeeper whose way to Docker the test can disturb."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        proxy = DockerProxy(Path(folder) / "d.sock", docker.root / "d.sock")
        try:
            host = EnvHost.start(Path(folder), CONFIG, proxy.url)
            try:
                yield host, proxy
            finally:
                host.stop()
        finally:
            proxy.close()


@pytest.fixture(scope="module")
def host(docker: PrivateDocker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("api"), CONFIG, docker.url)
    yield found
    found.stop()
    for path in (SETTINGS, SETTINGS.with_name("docker-api.conf")):
        path.unlink(missing_ok=True)


def counts(box: Sandbox) -> None:
    seen = box.exec('a=$(wc -l </n); until [ "$(wc -l </n)" -gt "$a" ]; do sleep 0.01; done; echo "$X"')
    assert seen.stdout == "41\n"


def test_what_the_paper_way_loses_comes_back_too(host: EnvHost, docker: PrivateDocker, box: Sandbox) -> None:
    """Locks, loopback TCP, a large deleted file: settings that Docker's API cannot ask for reach its CRIU as well; and
    what the engine leaks is swept."""
    box.exec(
        'python3 -c "import socket, fcntl, os, time\n'
        "lock = open('/lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "s = socket.create_server(('127.0.0.1', 7000)); c = socket.create_connection(('127.0.0.1', 7000))\n"
        "p = s.accept()[0]\n"
        "gone = open('/gone', 'w+b'); gone.write(bytes(3 << 20)); gone.flush(); os.unlink('/gone')\n"
        "open('/up', 'w')\n"
        "n = 0\n"
        "while True:\n"
        " n += 1; c.send(b'%d ' % n); p.recv(99); gone.seek(0, 2); print(n, file=open('/n', 'a')); time.sleep(0.01)"
        '" & until [ -s /n ]; do sleep 0.02; done; X=41'
    )
    box.checkpoint()
    counts(box)
    kill(host, box)
    box.restore()
    counts(box)
    assert box.exec("flock -n /lock true").exit_code == 1
    leaked = docker.root / "tmp"
    eventually(lambda: not list(leaked.glob("ctrd-checkpoint*")), what="what the engine leaked is swept")


def test_a_hung_docker_dump_is_ended_and_the_sandbox_goes_on(
    docker: PrivateDocker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp_path = tmp_path_factory.mktemp("h")
    hang, said = tmp_path / "hang", tmp_path / "said"
    criu = tmp_path / "criu"
    criu.write_text(
        f'#!/bin/sh\n[ "$1" = swrk ] && [ -e {hang} ] && {{ echo $$ >{said}; kill -STOP $$; }}\nexec {BINARY} "$@"\n'
    )
    criu.chmod(0o755)
    host = EnvHost.start(tmp_path, f'{CONFIG.replace("= 60", "= 15")}criu = "{criu}"\n', docker.url)
    try:
        box = host.create()
        box.exec("X=41; (i=0; while :; do i=$((i+1)); echo $i >>/n; sleep 0.01; done) &")
        box.checkpoint()
        hang.touch()
        with pytest.raises((CheckpointIncomplete, SandboxLost), match="was not over after 15 s") as told:
            box.checkpoint()
        eventually(lambda: not lives(int(said.read_text())), what="it was stopped, and is gone")
        hang.unlink()
        if told.type is SandboxLost:  # a process that ended in that moment is a doubt; then the one before it is good
            box.restore()
        seen = state_of(docker, host, box)
        assert (seen["Running"], seen["Paused"]) == (True, False)
        counts(box)
    finally:
        host.stop()


def test_images_of_one_path_are_refused_by_the_other(host: EnvHost, docker: PrivateDocker, box: Sandbox) -> None:
    box.exec("X=41")
    made = box.checkpoint()
    kill(host, box)
    config = host.paths.config
    by_api = config.read_text()
    host.kill()
    config.write_text(by_api.replace('"docker_api"', '"fast"'))
    host.restart()
    with pytest.raises(
        RestoreFailed, match=r'dumped by the engine path docker_api, and envkeeper.engine_path is "fast"'
    ):
        box.restore(made.checkpoint_id)
    host.kill()
    config.write_text(by_api)
    host.restart()
    assert box.restore(made.checkpoint_id)[0] == 1
    assert box.exec("echo $X").stdout == "41\n"


def test_without_experimental_mode_it_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path = tmp_path_factory.mktemp("x")
    with tempfile.TemporaryDirectory(prefix="bl-api-", dir="/var/lib") as folder:
        plain = PrivateDocker(Path(folder) / "d")
        try:
            plain.start().take_image("belayer-sandbox:base")
            (tmp_path / "belayer.toml").write_text(f'[envkeeper]\ndocker = "{plain.url}"\n{CONFIG}')
            done = subprocess.run(
                [sys.executable, "-m", "envkeeper"],
                cwd=TREE,
                env={**os.environ, "BELAYER_ROOT": str(tmp_path)},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        finally:
            plain.stop()
    assert done.returncode == 2
    assert 'engine_path = "docker_api" needs an experimental dockerd; set "experimental": true' in done.stderr


@pytest.mark.parametrize("wrong", [Wrong.CUT, Wrong.CUT_ANSWER, Wrong.REFUSE])
def test_docker_fails_at_each_request_of_a_checkpoint(docker: PrivateDocker, wrong: Wrong) -> None:
    """The daemon lives, the sandbox is not left paused, and READY is the old or the new one."""
    with behind_a_proxy(docker) as (host, proxy):
        box = host.create()
        box.exec("X=41")
        box.checkpoint()
        failed: BelayerError | None = None
        for at in range(1, 20):
            proxy.arm(at, wrong)
            failed = None
            try:
                box.checkpoint()
            except BelayerError as why:
                failed = why
            hit = proxy.hit
            proxy.clear()
            host.wait_ready()
            assert failed is None or failed.code is not ErrorCode.BROKEN, failed
            if isinstance(failed, SandboxLost):
                box.restore()
            assert box.exec("echo $X").stdout == "41\n", f"{wrong} at {at} ({hit})"
            if not hit:
                break
        assert failed is None, failed
        assert at > 4
        box.destroy()


def test_what_containerd_has_not_collected_yet_is_no_fault_of_the_sandbox(docker: PrivateDocker) -> None:
    """On a busy host a dump meets the blob of the one before. Asked again it works, and where it stays in the way the
    sandbox is not called one that cannot be dumped."""
    says = answer("500 Internal Server Error", b'{"message": "content sha256:%s: already exists"}' % (b"6" * 64))
    asked: list[str] = []

    def in_the_way(line: str) -> bytes | None:
        if not line.partition(" HTTP/")[0].endswith("/checkpoints"):
            return None
        asked.append(line)
        return says if len(asked) <= times else None

    with behind_a_proxy(docker) as (host, proxy):
        box = host.create()
        box.exec("X=41")
        times = 2
        proxy.before = in_the_way
        ready = box.checkpoint()
        assert len(asked) == times + 1
        times = 1000
        with pytest.raises(CheckpointIncomplete, match="what the dump before this one left") as told:
            box.checkpoint()
        assert f"content rm sha256:{'6' * 64}" in told.value.remedy
        assert box.exec("echo $X").stdout == "41\n"
        times = 0
        assert box.checkpoint().checkpoint_id != ready.checkpoint_id


# What is said in place of Docker's answer, and what is made of it. The sandbox is at fault where CRIU says so.
SAID = [
    ("ttrpc: closed: unknown", CheckpointIncomplete),
    ("rpc error: code = Unavailable desc = transport is closing: unavailable", CheckpointIncomplete),
    ("context deadline exceeded: unknown", CheckpointIncomplete),
    ("failed to retrieve checkpoint data: content digest sha256:0: not found", CheckpointIncomplete),
    ("runc did not terminate sucessfully: criu failed: type NOTIFY errno 0: unknown", CheckpointRefused),
]


def test_what_the_engine_says_of_itself_is_no_fault_of_the_sandbox(docker: PrivateDocker) -> None:
    """It runs on, thawed; also where Docker's mark of the pause stays, which the next checkpoint takes away."""
    said = ""
    asked: list[str] = []

    def instead(line: str) -> bytes | None:
        path = line.partition(" HTTP/")[0]
        if path.endswith("/unpause") and len(asked) < deaf:
            asked.append(path)
            return answer("500 Internal Server Error", b'{"message": "on purpose"}')
        if not said or not path.endswith("/checkpoints"):
            return None
        return answer("500 Internal Server Error", json.dumps({"message": f"Cannot checkpoint c: {said}"}).encode())

    with behind_a_proxy(docker) as (host, proxy):
        box = host.create()
        box.exec("X=41; (i=0; while :; do i=$((i+1)); echo $i >>/n; sleep 0.01; done) &")
        ready, deaf = box.checkpoint(), 0
        proxy.before = instead
        for said, kind in SAID:
            with pytest.raises(kind) as told:
                box.checkpoint()
            assert said in told.value.message
            assert "READY" in told.value.kept
            counts(box)
        said, deaf = "", 2
        with pytest.raises(CheckpointIncomplete, match="Docker did not unpause"):
            box.checkpoint()
        assert len(asked) == 2
        assert state_of(docker, host, box)["Paused"], "its mark is there"
        counts(box)
        assert host.info(box.sandbox_id).ready_checkpoint == ready.checkpoint_id
        assert box.checkpoint().checkpoint_id != ready.checkpoint_id
        assert not state_of(docker, host, box)["Paused"]
        counts(box)


def state_of(docker: PrivateDocker, host: EnvHost, box: Sandbox) -> dict[str, object]:
    client = docker.client()
    try:
        seen: dict[str, object] = client.inspect_container(host.info(box.sandbox_id).container_id)["State"]
    finally:
        client.close()
    return seen
