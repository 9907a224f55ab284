"""The newer engine (Docker 28, containerd 2.1), whose own restore of a container with a network namespace fails: ours
works there, with no network and in the namespace of a holder (promises E1-E6).

The engine is unpacked once by setup/docker28.sh; where its packages cannot be fetched, these tests fail and say so.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.sandbox import Sandbox
from tests.e2e.test_envkeeper import (  # noqa: F401 - collected here, with the fixtures of this module
    kill,
    test_racing_restorers_of_one_life_get_one_winner,
    test_rewind_of_a_living_sandbox_and_a_stale_client,
    test_the_daemon_is_killed_and_its_sandbox_is_served_again,
    test_three_generations_come_back_whole,
)
from tests.support.envhost import TREE, EnvHost
from tests.support.private_docker import PrivateDocker

pytestmark = pytest.mark.docker

ALLOWED = "127.0.0.1:9"  # some rule: it is the holder's namespace that is wanted here, not what it lets through
CONFIG = f'bridge = "none"\negress = ["{ALLOWED}"]\n'  # the private dockerd has no bridge


@pytest.fixture(scope="module")
def docker() -> Iterator[PrivateDocker]:
    done = subprocess.run([str(TREE / "setup/docker28.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"no Docker 28 on this machine: {done.stderr or done.stdout}"
    with tempfile.TemporaryDirectory(prefix="bl-28-", dir="/var/lib") as folder:
        made = PrivateDocker(Path(folder) / "d", binaries=Path("/opt/belayer/docker28/bin"))
        try:
            made.start().take_image("belayer-sandbox:base")
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def host(docker: PrivateDocker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("d28"), CONFIG, docker.url)
    yield found
    found.stop()


def test_it_is_that_engine(docker: PrivateDocker) -> None:
    client = docker.client()
    try:
        assert int(client.version()["Version"].split(".")[0]) >= 28
    finally:
        client.close()


def test_in_the_namespace_of_a_holder(host: EnvHost) -> None:
    made = Sandbox.create(allow=(ALLOWED,), paths=host.paths)
    try:
        made.exec(
            "X=41; python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & readlink /proc/self/ns/net >/ns; "
            "until (: </dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.02; done"
        )
        for generation in range(1, 4):
            made.exec(f"G={generation}")
            made.checkpoint()
            kill(host, made)
            made.restore()
            seen = made.exec(
                'echo "$X $G"; [ "$(readlink /proc/self/ns/net)" = "$(cat /ns)" ] && echo same; '
                "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').status)\""
            )
            assert seen.stdout == f"41 {generation}\nsame\n200\n", seen.stderr
    finally:
        made.destroy()
