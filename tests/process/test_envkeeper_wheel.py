"""A wheel brings the native parts for both machines, and they are what they say."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from belayer.errors import HostUnfit
from envkeeper import native
from envkeeper.agentlink import PROTOCOL, Action, AgentLink, open_pidfd
from envkeeper.host import RELOCKS
from tests.support.envhost import TREE
from tests.support.ran import ran
from tests.support.wait import eventually

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="installs a cross compiler and makes namespaces")

MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine of elf(5)
QEMU = shutil.which("qemu-aarch64-static") or ""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, as pip unpacks it."""
    folder = tmp_path_factory.mktemp("wheel")
    ran(TREE / "setup/wheel.sh", folder)
    (wheel,) = folder.glob("belayer-*.whl")
    ran(sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", folder / "site", wheel)
    return folder / "site"


def machine_of(path: Path) -> int:
    head = path.read_bytes()[:20]
    assert head[:4] == b"\x7fELF"
    return int(struct.unpack_from("<H", head, 18)[0])


def is_static(path: Path) -> bool:
    """No program header of type PT_INTERP (3)."""
    data = path.read_bytes()
    offset, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    return all(struct.unpack_from("<I", data, offset + number * size)[0] != 3 for number in range(count))


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_gets_its_own_static_parts(installed: Path, machine: str, tmp_path: Path) -> None:
    done = native.install(tmp_path, installed / "envkeeper/native", machine)
    plugins = {"lib/criu-plugins"} if machine in RELOCKS else set()
    assert {str(path.relative_to(tmp_path).parent) for path in done} == {"agent", "bin", "lib/criu-path"} | plugins
    assert [(machine_of(path), is_static(path)) for path in done] == [(MACHINES[machine], True)] * (3 + len(plugins))
    current = (tmp_path / "agent/current").resolve()
    assert current in done
    before = current.stat().st_mtime_ns
    assert native.install(tmp_path, installed / "envkeeper/native", machine) == done
    assert current.stat().st_mtime_ns == before
    assert sorted(path.name for path in (tmp_path / "agent").iterdir()) == sorted(["current", current.name])


def test_the_wheel_needs_nothing_of_the_checkout(installed: Path) -> None:
    code = "import envkeeper.seccomp as s, envkeeper.native as n; print(len(s.allowed()) > 300, n.CARRIED)"
    env = {"PYTHONPATH": f"{installed}:{':'.join(sys.path)}", "PATH": os.environ["PATH"]}
    assert ran(sys.executable, "-c", code, cwd="/", env=env) == f"True {installed / 'envkeeper/native'}\n"


def test_a_machine_that_is_not_carried_is_named(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(HostUnfit, match=r"no native parts for riscv64 .*aarch64, x86_64"):
        native.install(tmp_path, installed / "envkeeper/native", "riscv64")
    with pytest.raises(HostUnfit, match="it has none"):
        native.install(tmp_path, tmp_path / "no")


@pytest.mark.skipif(
    not QEMU and platform.machine() != "aarch64",
    reason="no qemu-user-static here: the arm64 agent is only checked as a file",
)
def test_the_arm64_agent_runs(installed: Path, tmp_path: Path) -> None:
    """As PID 1 of namespaces of its own; what it starts are this machine's programs."""
    native.install(tmp_path, installed / "envkeeper/native", "aarch64")
    run = tmp_path / "run"
    run.mkdir()
    agent = [QEMU, str(tmp_path / "agent/current")] if QEMU else [str(tmp_path / "agent/current")]
    script = f'mount --bind {run} /run && exec "$@"'
    unshare = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "sh", "-ec", script, "sh", *agent]
    holder = subprocess.Popen(unshare)
    try:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        pid = int(eventually(children.read_text, what="PID 1 of the namespace").split()[0])
        pidfd = open_pidfd(pid)
        try:
            link = AgentLink(pid, pidfd)
            eventually(lambda: listens(link), what="the agent listens", every=0.05)
            speak(link)
        finally:
            # By hand: the death of its parent does not end PID 1 of a namespace.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    finally:
        holder.wait(120)


def listens(link: AgentLink) -> bool:
    """Its socket is there a moment before it listens."""
    try:
        link.status(30)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def speak(link: AgentLink) -> None:
    assert link.status(30).protocol == PROTOCOL
    assert link.run(Action(1, (b"/bin/echo", b"direct"), 30, 4096)).stdout == b"direct\n"
    assert link.run(Action(2, b"X=7; echo $X", 30, 4096)).stdout == b"7\n"
    ended = link.run(Action(3, b"setsid sleep 71 & sleep 70", 1, 4096))
    assert (ended.code, ended.timed_out) == (124, True)
    link.set_nonce(b"n" * 32)
    assert link.ask_nonce() == b"n" * 32
