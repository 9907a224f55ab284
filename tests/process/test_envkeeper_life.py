"""Pools, egress, and what is left of them after a crash: nothing that has no record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import docker
import pytest

from belayer.errors import BelayerError, Refused, SandboxLost
from belayer.messages.sandbox import ListSandboxes, SandboxList
from belayer.procs import lives
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from envkeeper.host import owner_of
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

GATE = "172.29.71.1"  # the host, as sandboxes with egress see it


@pytest.fixture(scope="module")
def client() -> Iterator[docker.APIClient]:
    found = docker.APIClient(timeout=300)
    yield found
    found.close()


@pytest.fixture(scope="module")
def network(client: docker.APIClient) -> Iterator[str]:
    """A bridge of the test's own."""
    pools = docker.types.IPAMConfig(pool_configs=[docker.types.IPAMPool(subnet="172.29.71.0/24", gateway=GATE)])
    name = f"belayer-test-{os.getpid()}"
    client.create_network(name, driver="bridge", ipam=pools)
    yield name
    client.remove_network(name)


def rows(client: docker.APIClient, host: EnvHost, role: str = "") -> list[dict[str, Any]]:
    label = f"belayer={owner_of(host.paths)}"
    found = client.containers(all=True, filters={"label": [label, *([f"belayer.role={role}"] if role else [])]})
    return list(found)


def ended(pid: int) -> bool:
    return not lives(pid)


def full(host: EnvHost) -> bool:
    """By the daemon's own count: a container runs a while before it can be given away."""
    listed = call_sync(host.paths.envkeeper_sock, ListSandboxes(), SandboxList, 60.0)
    return listed.waiting == 2


def waiting(client: docker.APIClient, host: EnvHost) -> list[str]:
    return [row["Id"] for row in rows(client, host) if row["Labels"]["belayer.sandbox"].startswith("pool-")
            and row["State"] == "running"]  # fmt: skip


# ---- pools ----


def test_a_pool_is_taken_from_refilled_and_never_left_behind(
    client: docker.APIClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = EnvHost.start(tmp_path_factory.mktemp("pool"), "pool = 2\n")
    try:
        eventually(partial(full, host), what="the pool is full")
        first = set(waiting(client, host))
        assert len(first) == 2
        assert host.listed() == []
        box = host.create(name="taken")
        taken = host.info("taken").container_id
        assert taken in first
        assert box.exec("X=1; hostname; tr -d ' ' < /run/belayer/incarnation").stdout == "sandbox\ntaken.1\n"
        box.checkpoint()
        box.kill()
        box.restore()
        assert box.exec('echo "$X"; tr -d " " < /run/belayer/incarnation').stdout == "1\ntaken.2\n"
        other = host.create(name="other", memory_mb=123)  # not what the pool is made of
        assert host.info("other").container_id not in first
        eventually(partial(full, host), what="the pool is full again")
        assert len(set(waiting(client, host)) - {taken}) == 2

        # One that died while it waited is never handed out.
        for found in set(waiting(client, host)) - {taken}:
            pid = client.inspect_container(found)["State"]["Pid"]
            os.kill(pid, signal.SIGKILL)
            eventually(partial(ended, pid), what="it is dead")
        third = host.create(name="third")
        assert third.exec("echo alive").stdout == "alive\n"

        # kill -9: what had no name is removed at the next start, what had one is served on.
        eventually(partial(full, host), what="the pool is full a third time")
        old = set(waiting(client, host)) - {host.info("third").container_id}
        host.kill()
        host.restart()
        eventually(lambda: not old & {row["Id"] for row in rows(client, host)}, what="they are gone")
        assert third.exec("echo again").stdout == "again\n"
        eventually(partial(full, host), what="a new pool")

        # A daemon that ends takes its pool along, and nothing else.
        host.process.terminate()
        assert host.process.wait(120) == 0
        left = {row["Id"] for row in rows(client, host) if row["State"] == "running"}
        host.restart()
        assert left == {host.info(name).container_id for name in ("taken", "other", "third")}
        other.close()
    finally:
        host.stop()


# ---- egress ----


@pytest.fixture(scope="module")
def host(network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    config = f'bridge = "{network}"\negress = ["172.29.71.0/24:1-65535", "10.9.9.9:53/udp"]\n'
    found = EnvHost.start(tmp_path_factory.mktemp("egress"), config)
    yield found
    found.stop()


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Two servers on the host's side of the bridge."""
    code = (
        "import socket, sys\n"
        f"socks = [socket.create_server(('{GATE}', 0)) for _ in range(2)]\n"
        "print(*(s.getsockname()[1] for s in socks), flush=True)\n"
        "import select\n"
        "while True:\n"
        "    for s in select.select(socks, [], [])[0]:\n"
        "        c, _ = s.accept(); c.sendall(b'hello'); c.close()\n"
    )
    served = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    one, two = map(int, served.stdout.readline().split())
    yield one, two
    served.kill()
    served.wait()
    served.stdout.close()


def reach(box: Sandbox, port: int, address: str = GATE) -> str:
    code = f"import socket; s = socket.create_connection(('{address}', {port}), 60); print(s.recv(9))"
    seen = box.exec(["python3", "-c", code])
    return seen.stdout.strip() or seen.stderr.strip().splitlines()[-1].split(":")[0]


def test_egress_is_what_was_allowed_and_nothing_else_in_every_life(
    host: EnvHost, client: docker.APIClient, ports: tuple[int, int]
) -> None:
    allowed, other = ports
    box = host.create(name="out", allow=[f"{GATE}:{allowed}", "10.9.9.9:53/udp"])  # type: ignore[arg-type]
    quiet = host.create(name="quiet")
    try:
        for life in (1, 2):
            assert reach(box, allowed) == "b'hello'", life
            assert reach(box, other) == "ConnectionRefusedError", life
            assert reach(quiet, allowed) == "OSError", life  # network is unreachable
            seen = box.exec("cat /etc/resolv.conf; hostname; grep CapBnd /proc/self/status")
            assert "10.9.9.9" in seen.stdout or "127.0.0.11" in seen.stdout
            bounding = int(seen.stdout.split()[-1], 16)
            assert not bounding & (1 << 12 | 1 << 13), "neither NET_ADMIN nor NET_RAW"
            if life == 1:
                holders = rows(client, host, "holder")
                box.checkpoint()
                box.kill()
                box.restore()
                assert [row["Id"] for row in rows(client, host, "holder")] == [row["Id"] for row in holders]
        box.destroy()
        assert rows(client, host, "holder") == []
    finally:
        quiet.destroy()


def test_what_the_operator_did_not_name_is_refused(host: EnvHost, client: docker.APIClient) -> None:
    for asked in ("8.8.8.8:53/udp", "0.0.0.0/0:443", "172.29.0.0/16:80", "example.org:80"):
        with pytest.raises(Refused):
            host.create(allow=[asked])  # type: ignore[arg-type]
    assert rows(client, host, "holder") == []


def test_a_sandbox_whose_holder_died_is_lost_and_comes_back_with_another(
    host: EnvHost, client: docker.APIClient, ports: tuple[int, int]
) -> None:
    box = host.create(name="held", allow=[f"{GATE}:{ports[0]}"])  # type: ignore[arg-type]
    try:
        box.exec("X=1")
        box.checkpoint()
        (holder,) = rows(client, host, "holder")
        os.kill(client.inspect_container(holder["Id"])["State"]["Pid"], signal.SIGKILL)
        eventually(lambda: host.info("held").state == "lost", what="the sandbox is lost")
        with pytest.raises(SandboxLost):
            box.exec("true")
        box.restore()
        assert box.exec("echo $X").stdout == "1\n"
        assert reach(box, ports[0]) == "b'hello'"
        assert reach(box, ports[1]) == "ConnectionRefusedError"
        assert [row["Id"] for row in rows(client, host, "holder")] != [holder["Id"]]
    finally:
        box.destroy()


def test_a_killed_daemon_keeps_holders_of_records_and_removes_others(
    host: EnvHost, client: docker.APIClient, ports: tuple[int, int]
) -> None:
    box = host.create(name="kept", allow=[f"{GATE}:{ports[0]}"])  # type: ignore[arg-type]
    (holder,) = rows(client, host, "holder")
    stray = client.create_container(
        "belayer-sandbox:base", ["sleep", "99"],
        labels={"belayer": owner_of(host.paths), "belayer.role": "holder", "belayer.sandbox": "gone"},
    )["Id"]  # fmt: skip
    host.kill()
    host.restart()
    assert [row["Id"] for row in rows(client, host, "holder")] == [holder["Id"]]
    with pytest.raises(docker.errors.NotFound):
        client.inspect_container(stray)
    assert reach(box, ports[0]) == "b'hello'"
    box.destroy()
    assert rows(client, host) == []


def test_labels_and_limits_are_on_the_container(host: EnvHost, client: docker.APIClient) -> None:
    box = Sandbox.create(
        paths=host.paths, memory_mb=77, cpus=0.5, pids=33, labels={"run": "r1"}, hostname="box", env={"K": "v"}
    )
    try:
        seen = client.inspect_container(host.info(box.sandbox_id).container_id)
        limits = seen["HostConfig"]
        assert (limits["Memory"], limits["MemorySwap"], limits["PidsLimit"]) == (77 << 20, 77 << 20, 33)
        assert limits["CpuQuota"] / limits["CpuPeriod"] == 0.5
        assert seen["Config"]["Labels"]["run"] == host.info(box.sandbox_id).labels["run"] == "r1"
        assert box.exec('hostname; echo "$K"').stdout == "box\nv\n"
        died = box.exec(["python3", "-c", "x = bytearray(200 << 20)"])
        assert (died.exit_code, died.signal) == (137, 9)
        assert box.exec("echo lives").stdout == "lives\n"
    finally:
        try:
            box.destroy()
        except BelayerError:
            box.close()
