"""The systemd units: well formed, naming programs that exist, and really started by a systemd that is PID 1.

The container of the last tests has systemd of this Debian release as PID 1 and mounts this tree, its .venv and its
Python read-only at their own paths, so that ExecStart runs what is being tested.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.wait import eventually

TREE = Path(__file__).resolve().parents[2]
UNITS = TREE / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
IMAGE = "belayer-systemd:test"
DAEMONS = (
    "gpuowner@weights.service",
    "gpuowner@kv.service",
    "belayer-router.service",
    "belayerd.service",
    "envkeeper.service",
)


def directives(unit: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return {section: dict(parser[section]) for section in parser.sections()}


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


# --- the files ---


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_exec_start_names_an_installed_program(unit: Path) -> None:
    program = Path(directives(unit)["Service"]["ExecStart"].split()[0])
    if program == Path("/bin/true"):
        stop = Path(directives(unit)["Service"]["ExecStop"])
        assert (UNITS / stop.name).is_file()
        return
    scripts = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["scripts"]
    assert program.parent == Path("/opt/belayer/venv/bin")
    assert program.name in scripts


@pytest.mark.parametrize("name", ["belayerd.service", "envkeeper.service"])
def test_what_must_outlive_its_daemon_is_not_killed_with_it(name: str) -> None:
    service = directives(UNITS / name)["Service"]
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    # A private mount namespace would be left behind by the daemon that its workers outlive.
    assert "PrivateTmp" not in service


def test_a_front_that_runs_out_of_memory_takes_only_itself() -> None:
    """It is a process of the router's unit, whose end by the OOM killer would stop all of it."""
    service = directives(UNITS / "belayer-router.service")["Service"]
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == "on-failure", "what ends the router itself"
    assert service.get("KillMode", "control-group") == "control-group", "fronts never outlive it"


def test_owner_keeps_descriptors_over_a_restart() -> None:
    service = directives(UNITS / "gpuowner@.service")["Service"]
    assert "--store systemd" in service["ExecStart"]
    assert int(service["WatchdogSec"]) >= 10, "hashing in a thread and a crowded host are no hang"
    assert service["NotifyAccess"] == "main"
    assert int(service["FileDescriptorStoreMax"]) >= 1024
    assert service["Restart"] == "on-failure"


def test_a_hung_envkeeper_is_ended_by_what_it_survives() -> None:
    service = directives(UNITS / "envkeeper.service")["Service"]
    assert (int(service["WatchdogSec"]), service["WatchdogSignal"]) == (60, "SIGKILL")
    assert service["Restart"] == "on-failure"


@pytest.mark.parametrize("unit", [u for u in SERVICES if u.name != "belayer-workers.service"], ids=lambda u: u.name)
def test_a_refused_configuration_is_not_tried_again(unit: Path) -> None:
    assert directives(unit)["Service"]["RestartPreventExitStatus"] == "2"


def test_target_wants_every_daemon() -> None:
    wanted = directives(UNITS / "belayer.target")["Unit"]["Wants"].split()
    assert set(DAEMONS) <= set(wanted)
    assert {f"{re.sub('@.*[.]', '@.', name)}" for name in wanted} == {unit.name for unit in SERVICES}


def test_install_below_another_root_keeps_an_edited_config(tmp_path: Path) -> None:
    install = [str(UNITS / "install.sh"), "--root", str(tmp_path)]
    subprocess.run(install, check=True)
    config = tmp_path / "etc/belayer/belayer.toml"
    assert "@MODEL@" not in config.read_text()
    config.write_text("# mine\n")
    subprocess.run(install, check=True)
    assert config.read_text() == "# mine\n"
    assert {path.name for path in (tmp_path / "etc/systemd/system").iterdir()} == {
        path.name for path in [*SERVICES, UNITS / "belayer.target"]
    }


# --- a systemd that is PID 1 ---


def _mounts() -> list[Path]:
    """What ExecStart needs at its own path: the tree, the real .venv, the Python behind it, the native parts."""
    base = Path(sys.base_prefix).resolve()
    wanted = [TREE, Path(sys.prefix).resolve(), Path("/opt/belayer/criu"), Path("/opt/belayer/agent")]
    wanted += [Path("/opt/belayer/bin/belayer-runtime"), Path("/opt/belayer/lib")]
    # A Python of the image's own release is in the image; another one (pyenv, a build in /opt) is brought along.
    if base != Path("/usr"):
        wanted.append(base)
    return [path for path in dict.fromkeys(wanted) if not any(o != path and o in path.parents for o in wanted)]


class Machine:
    """One container whose PID 1 is systemd."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def start(self) -> None:
        command = ["docker", "run", "--detach", "--name", self.name, "--hostname", "belayer-test"]
        command += ["--cap-add", "ALL", "--cap-drop", "SYS_RESOURCE", "--network", "none"]
        command += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
        command += ["--cgroupns=private", "--env", "container=docker"]
        for tmpfs in ("/run", "/run/lock", "/tmp"):
            command += ["--tmpfs", f"{tmpfs}:exec"]
        for path in _mounts():
            command += ["--volume", f"{path}:{path}:ro"]
        # /run is a tmpfs of the container, so the engine's socket is shown elsewhere.
        command += ["--volume", "/var/run/docker.sock:/host/docker.sock"]
        # envkeeper reads upper layers there. Not recursive: a copy of other containers' mounts would pin them.
        root = run("docker", "info", "--format", "{{.DockerRootDir}}").stdout.strip()
        command += ["--mount", f"type=bind,source={root},target={root},bind-nonrecursive"]
        command += ["--volume", f"{self.folder}:/install:ro", IMAGE, "/lib/systemd/systemd"]
        done = run(*command)
        assert done.returncode == 0, done.stderr

    def sh(self, script: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return run("docker", "exec", self.name, "bash", "-c", script, timeout=timeout)

    def ok(self, script: str, timeout: float = 300) -> str:
        done = self.sh(script, timeout)
        assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, unit: str, key: str) -> str:
        return self.ok(f"systemctl show --property {key} --value '{unit}'").strip()

    def journal(self) -> str:
        return self.sh("journalctl --no-pager --lines 80 --output cat").stdout

    def remove(self) -> None:
        run("docker", "rm", "--force", "--volumes", self.name)


CONFIG = """
[[model]]
name = "smollm2"
path = "{model}"

[[slot]]
name = "slot0"
model = "smollm2"
kv_bytes = 67108864
max_model_len = 1024
max_num_batched_tokens = 1024

[router]
port = 18650

[envkeeper]
docker = "unix:///host/docker.sock"
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if not shutil.which("docker"):
        pytest.fail("no docker command: run `make setup`")
    image = run(str(TREE / "setup/systemd_image.sh"), timeout=1800)
    assert image.returncode == 0, image.stdout + image.stderr
    folder = tmp_path_factory.mktemp("install")
    subprocess.run([str(UNITS / "install.sh"), "--root", str(folder)], check=True)
    model = TREE / ".cache/models/SmolLM2-135M-Instruct"
    (folder / "etc/belayer/belayer.toml").write_text(CONFIG.format(model=model))
    container = Machine(f"belayer-test-systemd-{os.getpid()}", folder)
    container.start()
    try:
        eventually(
            lambda: container.sh("systemctl is-system-running").stdout.strip() in ("running", "degraded"),
            what="systemd is up in the container",
        )
        # The parents of a pyenv Python are closed to other users in the image, not on a machine set up for it.
        closed = " ".join(str(p) for path in _mounts() for p in path.parents if str(p) != "/")
        container.ok(f"chmod a+x {closed}")
        container.ok(
            "cp -r /install/etc/. /etc/ && cp -r /install/opt/. /opt/"
            " && systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload"
        )
        yield container
    finally:
        container.remove()


@pytest.mark.systemd
def test_units_pass_systemd_analyze(machine: Machine) -> None:
    names = " ".join(f"/etc/systemd/system/{unit.name}" for unit in [*SERVICES, UNITS / "belayer.target"])
    done = machine.sh(f"systemd-analyze verify --man=no {names.replace('gpuowner@.', 'gpuowner@kv.')}")
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""


@pytest.mark.systemd
@pytest.mark.engine
def test_target_starts_every_daemon_and_status_answers(machine: Machine) -> None:
    started = machine.sh("systemctl start belayer.target", timeout=900)
    assert started.returncode == 0, started.stderr + machine.journal()
    for unit in DAEMONS:
        assert machine.show(unit, "ActiveState") == "active", f"{unit}: {machine.journal()}"
        assert machine.show(unit, "SubState") == "running"
    assert eventually(lambda: status(machine), what="belayerctl status answers")


@pytest.mark.systemd
def test_a_hung_envkeeper_is_killed_and_comes_back(machine: Machine) -> None:
    """The unit's own watchdog, with a shorter patience."""
    unit, more = "envkeeper.service", "/etc/systemd/system/envkeeper.service.d"
    machine.ok(
        f"mkdir -p {more} && printf '[Service]\\nWatchdogSec=10\\n' > {more}/short.conf && systemctl daemon-reload"
    )
    try:
        machine.ok(f"systemctl restart {unit}", timeout=300)
        hung = machine.show(unit, "MainPID")
        machine.ok(f"kill -STOP {hung}")
        eventually(lambda: machine.ok(f"cut -d' ' -f3 /proc/{hung}/stat") == "T\n", what="it is stopped", every=0.1)
        eventually(lambda: "watchdog" in machine.journal().lower(), every=0.3, what="systemd has found it")
        eventually(
            lambda: machine.show(unit, "ActiveState") == "active" and machine.show(unit, "MainPID") not in ("0", hung),
            within=120,
            every=0.3,
            what="another one serves",
        )
    finally:
        machine.ok(f"rm -r {more} && systemctl daemon-reload && systemctl stop {unit}", timeout=300)


def status(machine: Machine) -> dict[str, Any]:
    """``belayerctl status --json``; {} while belayerd does not answer."""
    done = machine.sh("/opt/belayer/venv/bin/belayerctl status --json", timeout=300)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode in (0, 1) and done.stdout else {}
    return found if "host" in found else {}


def worker_pids(machine: Machine) -> dict[str, int]:
    """Role to pid of the one slot, once it is protected; {} before."""
    slots = status(machine).get("host", {}).get("slots", [])
    if not slots or not slots[0]["protected"]:
        return {}
    return {worker["role"]: worker["pid"] for worker in slots[0]["workers"]}


def owners(machine: Machine) -> dict[str, dict[str, Any]]:
    return {row["kind"]: row for row in status(machine).get("host", {}).get("owners", [])}


def owners_come_back_from_the_fd_store(machine: Machine) -> None:
    """kill -9 of both: systemd starts them again with the descriptors, and the workers find them."""
    before = owners(machine)
    for kind in ("weights", "kv"):
        assert before[kind]["store"] == "systemd"
        unit = f"gpuowner@{kind}.service"
        assert int(machine.show(unit, "NFileDescriptorStore")) == 1
        machine.ok(f"kill -KILL {machine.show(unit, 'MainPID')}")

    def adopted() -> dict[str, dict[str, Any]]:
        now = owners(machine)
        if any(now.get(kind, before[kind])["pid"] == before[kind]["pid"] for kind in ("weights", "kv")):
            return {}
        known = all(row["connected"] for row in now["kv"]["arenas"])
        return now if known and len(now["weights"]["weights"][0]["readers"]) == 2 else {}

    after = eventually(adopted, within=300, every=0.3, what="owners that know the workers again")
    for kind in ("weights", "kv"):
        assert after[kind]["owner_generation"] == before[kind]["owner_generation"] + 1
        assert len(after[kind]["adopted"]) == 1
        assert after[kind]["lost"] == []
    holder = before["kv"]["arenas"][0]["holder"]
    assert [row["holder"] for row in after["kv"]["arenas"]] == [holder]


@pytest.mark.systemd
@pytest.mark.engine
def test_workers_outlive_a_killed_supervisor_and_end_with_the_target(machine: Machine) -> None:
    assert machine.sh("systemctl start belayer.target", timeout=900).returncode == 0
    before = eventually(lambda: worker_pids(machine), within=600, every=0.5, what="the slot is protected")
    assert set(before) == {"main", "shadow"}
    owners_come_back_from_the_fd_store(machine)
    assert eventually(lambda: worker_pids(machine), every=0.2, what="the slot is protected") == before

    supervisor = machine.show("belayerd.service", "MainPID")
    machine.ok(f"kill -KILL {supervisor}")
    eventually(
        lambda: machine.show("belayerd.service", "MainPID") not in ("0", supervisor), what="systemd starts it again"
    )
    after = eventually(lambda: worker_pids(machine), every=0.2, what="the slot is protected again")
    assert after == before

    # systemctl waits for the target alone; its parts stop after it.
    machine.ok("systemctl stop belayer.target", timeout=300)
    eventually(
        lambda: all(machine.show(unit, "ActiveState") == "inactive" for unit in (*DAEMONS, "belayer-workers.service")),
        what="every unit has stopped",
    )
    eventually(lambda: machine.sh("pgrep --list-full --uid belayer").stdout == "", what="no process of it is left")
