"""Each thing that a checkpoint could not keep is refused by its name: by Docker's own words, and seen from inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import docker
import pytest

from belayer.errors import HostUnfit, Refused
from belayer.sandbox import Sandbox
from envkeeper import admission
from envkeeper.engine import AGENT_IN_SANDBOX, BOUND, Engine
from envkeeper.mounts import Mount
from tests.support.envhost import EnvHost

pytestmark = pytest.mark.docker

IMAGE = "belayer-sandbox:base"
HOST = "unix:///var/run/docker.sock"
BASE: dict[str, Any] = {"network_mode": "none", "runtime": "belayer", "ipc_mode": "private"}

# name -> (kinds that must be found, host_config, container config)
CASES: dict[str, tuple[set[str], dict[str, Any], dict[str, Any]]] = {
    "nothing wrong": (set(), {}, {}),
    "writable bind": ({"writable_bind"}, {"binds": ["/srv:/srv:rw"]}, {}),
    "read-only bind": ({"bind"}, {"binds": ["/srv:/srv:ro"]}, {}),
    "docker.sock": ({"docker_socket"}, {"binds": ["/var/run/docker.sock:/s:ro"]}, {}),
    "named volume": ({"volume"}, {"binds": ["belayer-test-volume:/v"]}, {}),
    "anonymous volume": ({"volume"}, {}, {"volumes": ["/v"]}),
    "tmpfs": ({"tmpfs"}, {"tmpfs": {"/t": ""}}, {}),
    "device": ({"device"}, {"devices": ["/dev/zero:/dev/x"]}, {}),
    "device rule": ({"device"}, {"device_cgroup_rules": ["c 1:5 rwm"]}, {}),
    "privileged": ({"privileged"}, {"privileged": True}, {}),
    "capability": ({"capability"}, {"cap_add": ["NET_ADMIN"]}, {}),
    "terminal": ({"tty"}, {}, {"tty": True}),
    "open stdin": ({"stdin"}, {}, {"stdin_open": True}),
    "host pid": ({"host_pid"}, {"pid_mode": "host"}, {}),
    "host ipc": ({"host_ipc"}, {"ipc_mode": "host"}, {}),
    "shareable ipc": ({"shared_ipc"}, {"ipc_mode": "shareable"}, {}),
    "host uts": ({"host_uts"}, {"uts_mode": "host"}, {}),
    "host network": ({"host_net"}, {"network_mode": "host"}, {}),
    "a network of its own": ({"network"}, {"network_mode": "bridge"}, {}),
    "auto-remove": ({"auto_remove"}, {"auto_remove": True}, {}),
    "restart policy": ({"restart_policy"}, {"restart_policy": {"Name": "always"}}, {}),
    "health check": ({"health_check"}, {}, {"healthcheck": {"test": ["CMD", "true"]}}),
    "docker-init": ({"init"}, {"init": True}, {}),
    "read-only root": ({"read_only_root"}, {"read_only": True}, {}),
    "no filter": ({"seccomp"}, {"security_opt": ["seccomp=unconfined"]}, {}),
    "another runtime": ({"runtime"}, {"runtime": "runc"}, {}),
    "several at once": ({"tty", "auto_remove", "host_pid"}, {"auto_remove": True, "pid_mode": "host"}, {"tty": True}),
}

# What runs here and must be seen from inside whatever the configuration says.
RUNNING: dict[str, tuple[set[str], dict[str, Any]]] = {
    "host pid": ({"host_pid"}, {"pid_mode": "host"}),
    "host network": ({"host_net"}, {"network_mode": "host"}),
    "host ipc": ({"host_ipc"}, {"ipc_mode": "host"}),
    "host uts": ({"host_uts"}, {"uts_mode": "host"}),
    "no filter": ({"seccomp"}, {"security_opt": ["seccomp=unconfined", "no-new-privileges:true"]}),
    "setuid programs": ({"new_privileges"}, {"security_opt": []}),
    "capability": ({"capability"}, {"cap_add": ["NET_ADMIN"]}),
    "tmpfs": ({"tmpfs"}, {"tmpfs": {"/t": ""}}),
    "writable bind": ({"mount"}, {"binds": ["/srv:/srv:rw"]}),
}


@pytest.fixture(scope="module")
def client() -> Iterator[docker.APIClient]:
    found = docker.APIClient(base_url=HOST)
    yield found
    found.close()


def make(client: docker.APIClient, host: dict[str, Any], config: dict[str, Any]) -> str:
    given = client.create_host_config(**{**BASE, **host})
    command = ["sleep", "60"]
    return str(client.create_container(IMAGE, command, host_config=given, **config)["Id"])


def kinds(found: list[admission.Finding]) -> set[str]:
    return {finding.kind for finding in found}


@pytest.mark.parametrize("name", CASES)
def test_each_is_refused_by_its_name(client: docker.APIClient, name: str) -> None:
    expected, host, config = CASES[name]
    made = make(client, host, config)
    try:
        seen = client.inspect_container(made)
        assert kinds(admission.check(seen, None, runtime="belayer", bound=BOUND)) == expected
    finally:
        client.remove_container(made, force=True, v=True)
        if name == "named volume":
            client.remove_volume("belayer-test-volume")


@pytest.mark.parametrize("name", RUNNING)
def test_each_is_seen_from_inside(client: docker.APIClient, name: str) -> None:
    expected, host = RUNNING[name]
    made = make(client, {"security_opt": ["no-new-privileges:true"], "cap_drop": ["AUDIT_WRITE"], **host}, {})
    try:
        client.start(made)
        seen = client.inspect_container(made)
        inside = admission.look(seen["State"]["Pid"])
        plain = client.inspect_container(made)
        # A configuration that says nothing of it: only what is seen from inside is left to find it.
        plain["HostConfig"] |= {
            **{"Runtime": "belayer", "NetworkMode": "none", "IpcMode": "private", "PidMode": "", "UTSMode": ""},
            **{"CapAdd": None, "Tmpfs": None, "SecurityOpt": []},
        }
        plain["Mounts"] = []
        assert kinds(admission.check(plain, inside, runtime="belayer", bound=BOUND)) == expected
        engine = Engine(HOST, "belayer", "nobody")
        with pytest.raises(Refused, match="cannot be a sandbox"):
            engine.life(made)
    finally:
        client.remove_container(made, force=True, v=True)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("adm"))
    yield found
    found.stop()


def test_a_sandbox_of_ours_passes_in_every_life(host: EnvHost) -> None:
    box = host.create()
    try:
        for _ in range(2):
            info = host.info(box.sandbox_id)
            inside = admission.look(info.pid)
            assert (inside.seccomp, inside.no_new_privs) == (2, True)
            with_client = docker.APIClient(base_url=HOST)
            seen = with_client.inspect_container(info.container_id)
            with_client.close()
            assert admission.check(seen, inside, runtime="belayer", bound=BOUND) == []
            box.checkpoint()
            box.kill()
            box.restore()
        # One more mount in its namespace, or a user namespace, is seen whoever made it.
        more = replace(inside, mounts=(*inside.mounts, Mount("/", "/mnt", "nfs", "far:/away")))
        assert kinds(admission.check(seen, more, runtime="belayer", bound=BOUND)) == {"mount"}
        other = replace(inside, spaces=inside.spaces | {"user": 1})
        assert kinds(admission.check(seen, other, runtime="belayer", bound=BOUND)) == {"user_namespace"}
    finally:
        box.destroy()


def test_a_volume_of_an_image_is_refused_and_its_health_check_is_not_run(
    host: EnvHost, client: docker.APIClient
) -> None:
    base = client.create_container(IMAGE, ["true"])["Id"]
    try:
        for tag, change in (
            ("volume", "VOLUME /data"),
            ("health", "HEALTHCHECK --interval=1s CMD touch /checked"),
            ("user", "USER games"),
        ):
            client.commit(base, repository="belayer-test", tag=tag, changes=change)
        with pytest.raises(HostUnfit, match="/data"):
            Sandbox.create("belayer-test:volume", paths=host.paths)
        box = Sandbox.create("belayer-test:health", paths=host.paths)
        seen = client.inspect_container(host.info(box.sandbox_id).container_id)
        assert seen["Config"]["Healthcheck"]["Test"] == ["NONE"]
        assert "Health" not in seen["State"]
        box.destroy()
        # PID 1 is root's in any case; the image's user is whom its actions run as.
        box = Sandbox.create("belayer-test:user", paths=host.paths)
        assert box.exec("id -un; stat -c %U /proc/1").stdout == "games\nroot\n"
        assert box.exec(["id", "-un"]).stdout == "games\n"
        assert box.exec(["id", "-un"], user="root").stdout == "root\n"
        box.destroy()
    finally:
        client.remove_container(base, force=True)
        for tag in ("volume", "health", "user"):
            client.remove_image(f"belayer-test:{tag}", force=True)


CALLS = """
import ctypes, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    libc.syscall(number, 0, 0, 0, 0, 0)
    print(ctypes.get_errno(), end=" ")
"""
X86_64 = {
    "io_uring_setup": (425, 38),
    "clone3": (435, 38),
    "memfd_secret": (447, 38),
    "bpf": (321, 1),
    "keyctl": (250, 1),
    "mount": (165, 1),
    "perf_event_open": (298, 1),
    "userfaultfd": (323, 1),
    "unshare": (272, 1),
    "setns": (308, 1),
    "open_by_handle_at": (304, 1),
    "kexec_load": (246, 1),
    "fanotify_init": (300, 1),
}


@pytest.mark.parametrize("life", ["fresh", "restored"])
def test_the_profile_holds_in_every_life(host: EnvHost, life: str) -> None:
    box = host.create()
    try:
        if life == "restored":
            box.checkpoint()
            box.kill()
            box.restore()
        if box.exec(["uname", "-m"]).stdout == "x86_64\n":
            numbers = [str(number) for number, _ in X86_64.values()]
            seen = box.exec(["python3", "-c", CALLS, *numbers]).stdout.split()
            assert dict(zip(X86_64, map(int, seen), strict=True)) == {
                name: errno for name, (_, errno) in X86_64.items()
            }
        assert box.exec(["unshare", "--user", "true"]).exit_code != 0
        vsock = "import socket; socket.socket(40, socket.SOCK_STREAM)"
        assert "PermissionError" in box.exec(["python3", "-c", vsock]).stderr
        assert box.exec(["python3", "-c", "import socket; socket.socket(); print('fine')"]).stdout == "fine\n"
        assert box.exec(["cat", AGENT_IN_SANDBOX, "/proc/1/mem"]).exit_code != 0
    finally:
        box.destroy()
