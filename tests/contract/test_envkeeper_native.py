"""The native parts keep what the Python side counts on: agent, OCI runtime, stand-in for tar."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from random import Random
from threading import Thread

import docker
import docker.errors
import pytest

from belayer.sandbox import Sandbox
from envkeeper.agentlink import SOCKET_IN_SANDBOX, Action, AgentError, AgentLink, open_pidfd
from tests.support.envhost import TREE, EnvHost
from tests.support.ran import ran

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("native"))
    yield found
    found.stop()


@pytest.fixture
def link(host: EnvHost, box: Sandbox) -> Iterator[AgentLink]:
    pid = host.info(box.sandbox_id).pid
    pidfd = open_pidfd(pid)
    yield AgentLink(pid, pidfd)
    os.close(pidfd)


def test_the_build_is_the_one_in_use_and_changes_nothing(tmp_path: Path) -> None:
    script = TREE / "envkeeper/agent/build.sh"
    first = ran(script, tmp_path).strip()
    stamp = Path(first).stat().st_mtime_ns
    again = ran(script, tmp_path).strip()
    assert (first, Path(again).stat().st_mtime_ns) == (again, stamp)
    assert Path(first).name == Path("/opt/belayer/agent/current").resolve().name


def test_no_program_of_the_sandbox_can_drive_the_agent(box: Sandbox) -> None:
    seen = box.exec(
        "python3 -c \"import socket; s = socket.socket(1); s.connect('/run/belayer-agent.sock'); "
        "s.send(b'\\x01\\0\\0\\0Q'); print(s.recv(99))\""
    )
    # Closed without an answer: nothing, or a reset when the request was still unread.
    assert seen.stdout == "b''\n" or "ConnectionResetError" in seen.stderr or "BrokenPipe" in seen.stderr, seen


def test_garbage_and_oversize_requests_are_refused_and_the_agent_lives(host: EnvHost, box: Sandbox) -> None:
    path = f"/proc/{host.info(box.sandbox_id).pid}/root/{SOCKET_IN_SANDBOX}"
    for data, word in (
        (b"\xff\xff\xff\x7fX", b"length"),
        (b"\0\0\0\0\0", b"length"),
        (b"\1\0\0\0?", b"unknown"),
        (b"\2\0\0\0XX", b"short"),
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(data)
            answer = b""
            while more := sock.recv(4096):
                answer += more
        assert word in answer
    assert box.exec("echo fine").stdout == "fine\n"


def test_an_agent_of_another_protocol_is_not_spoken_to(tmp_path: Path) -> None:
    """A stand-in that answers as an older one would, where a link looks for the agent."""
    old = struct.pack("<IIIQ", 1, 1, 0, 4)
    pidfd = os.pidfd_open(os.getpid())
    link = AgentLink(os.getpid(), pidfd)
    link._path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(link._path)
        listener.listen()

        def answer() -> None:
            conn, _ = listener.accept()
            conn.recv(64)
            conn.sendall(struct.pack("<I", len(old) + 1) + b"p" + old)
            conn.close()

        speaker = Thread(target=answer)
        speaker.start()
        with pytest.raises(AgentError, match="protocol 1, this envkeeper 2"):
            link.status()
        speaker.join()
    os.close(pidfd)


def test_no_request_however_broken_ends_pid_1(host: EnvHost, box: Sandbox) -> None:
    """Whole requests with bytes changed, cut short, or of random bytes; the seed is fixed, so a failure comes again."""
    random = Random(20)
    parts = [b"", b"/tmp/f", b"/", b"/a/../b", b"/x/y/z", b"nobody", b"0:0", b":", b"x" * 300]
    path = f"/proc/{host.info(box.sandbox_id).pid}/root/{SOCKET_IN_SANDBOX}"

    def text() -> bytes:
        data = random.choice(parts)
        return struct.pack("<I", len(data)) + data + b"\0"

    def request() -> bytes:
        match random.choice(b"XXWDRKNQP?"):
            case 88:
                action = Action(7, random.choice([b"true", (b"true",)]), 1, random.choice([0, 1, 2, 99]), stdin=b"in")
                body = bytearray(b"X" + action.encode())
            case 87:
                body = bytearray(b"W" + random.randbytes(16) + text() + text() + text())
            case 68:
                body = bytearray(b"D" + random.randbytes(12) + text() + text())
            case 82:
                body = bytearray(b"R" + random.randbytes(12) + text())
            case kind:
                body = bytearray(bytes([kind]) + random.randbytes(random.choice([0, 1, 8, 64, 5000])))
        for _ in range(random.randrange(4)):
            body[random.randrange(1, len(body)) if len(body) > 1 else 0] = random.randrange(256)
        return bytes(body[: random.randrange(len(body)) + 1] if random.random() < 0.2 else body)

    for _ in range(400):
        data = request()
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(120.0)
            sock.connect(path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(struct.pack("<I", len(data)) + data)
                while random.random() < 0.9 and sock.recv(1 << 16):
                    pass
    assert host.info(box.sandbox_id).state == "running"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        sock.sendall(b"\1\0\0\0P")
        assert sock.recv(5)[4:] == b"p"


def test_nonce_lives_in_memory_only(link: AgentLink, box: Sandbox) -> None:
    nonce = os.urandom(32)
    link.set_nonce(nonce)
    assert link.ask_nonce() == nonce
    seen = box.exec(
        "grep -rlsaF \"$(printf '%b' '" + "".join(f"\\x{b:02x}" for b in b"belayer") + "')\" /run /tmp; true"
    )
    assert seen.stdout == ""


def test_a_big_command_and_many_quotes_arrive_whole(box: Sandbox) -> None:
    text = 'it\'s "$5" `x` \\ é 🙂\n' * 9000
    seen = box.exec(f"cat <<'END' | sha256sum\n{text}END\n")
    import hashlib

    assert seen.stdout.split()[0] == hashlib.sha256(text.encode()).hexdigest()


def test_a_shell_that_exits_is_replaced_and_its_code_told(box: Sandbox) -> None:
    box.exec("X=1")
    assert box.exec("exit 7").exit_code == 7
    assert box.exec('echo "[$X]"').stdout == "[]\n"
    assert box.exec("kill -9 $$").exit_code == 137
    assert box.exec("echo back").stdout == "back\n"


def test_orphans_are_reaped(box: Sandbox) -> None:
    box.exec("for i in $(seq 50); do (sleep 0.01 &); done")
    dead = "grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l"
    gone = f"until [ $(pgrep -c sleep) = 0 ] && [ $({dead}) = 0 ]; do :; done"
    assert box.exec(gone, timeout_s=60).exit_code == 0


def test_sandboxes_are_sealed(host: EnvHost, box: Sandbox) -> None:
    seen = box.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1; cat /proc/net/route | wc -l")
    assert seen.stdout.split() == ["lo", "1"]
    mounts = box.exec("grep -v -e ' overlay ' -e ' proc ' -e ' sysfs ' -e ' tmpfs ' -e ' cgroup' /proc/mounts").stdout
    writable = [row.split()[1] for row in mounts.splitlines() if row.split()[3].startswith("rw")]
    assert set(writable) <= {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/pts", "/dev/mqueue"}
    assert box.exec("echo x > /.belayer/agent").exit_code != 0


def test_the_runtime_passes_other_containers_through() -> None:
    client = docker.from_env()
    try:
        out = client.containers.run(
            "belayer-sandbox:base", ["echo", "plain"], runtime="belayer", network_mode="none", remove=True
        )
    finally:
        client.close()
    assert out == b"plain\n"


def test_dockers_own_restore_cannot_take_a_checkpoint_of_ours(host: EnvHost, box: Sandbox) -> None:
    """It would put the sandbox into the host's network: its images carry no network namespace."""
    made = box.checkpoint()
    folder = host.paths.checkpoints / box.sandbox_id / "ck" / made.checkpoint_id / "criu"
    assert (folder / "inventory.img").exists()
    assert not list(folder.glob("netns-*"))
    assert not (folder / "descriptors.json").exists()


TAR = "/opt/belayer/lib/criu-path/tar"


def shim(verb: str, folder: Path, **streams: object) -> subprocess.CompletedProcess[bytes]:
    command = [TAR, verb, "--gzip", "--numeric-owner", "--preserve-permissions", "--directory", str(folder)]
    command += ["."] if verb == "--create" else []
    return subprocess.run(command, check=True, **streams)  # type: ignore[call-overload, no-any-return]


def rows(top: Path) -> list[tuple[object, ...]]:
    out = []
    for path in sorted([top, *top.rglob("*")]):
        info = path.lstat()
        link = os.readlink(path) if path.is_symlink() else ""
        body = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        out.append(
            (
                str(path.relative_to(top)),
                info.st_mode,
                info.st_uid,
                info.st_gid,
                int(info.st_mtime),
                info.st_rdev,
                link,
                body,
            )
        )
    return out


@pytest.mark.parametrize("with_data", [False, True])
def test_the_stand_in_for_tar_is_read_by_the_real_one_and_back(tmp_path: Path, with_data: bool) -> None:
    source = tmp_path / "from"
    (source / "a/b").mkdir(parents=True)
    os.mknod(source / "null", 0o020666, os.makedev(1, 3))
    os.mkfifo(source / "a/pipe", 0o640)
    os.symlink("/proc/self/fd", source / "fd")
    os.chown(source / "a/b", 5, 6)
    (source / "a").chmod(0o1777)
    if with_data:
        (source / "file").write_bytes(b"data")
    for path in (source / "a", source / "fd", source):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    archive = tmp_path / "x.tar.gz"
    with archive.open("wb") as out:
        shim("--create", source, stdout=out)
    assert (archive.read_bytes()[8] == 0xB1) is not with_data
    mine, real = tmp_path / "mine", tmp_path / "real"
    mine.mkdir()
    real.mkdir()
    with archive.open("rb") as given:
        shim("--extract", mine, stdin=given)
    subprocess.run(["tar", "-xpzf", archive, "-C", real, "--numeric-owner"], check=True)
    assert rows(mine) == rows(source) == rows(real)
    with tarfile.open(fileobj=BytesIO(archive.read_bytes())) as opened:
        assert opened.getnames()[0] == "."
