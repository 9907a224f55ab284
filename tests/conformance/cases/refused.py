"""What cannot come back is refused by name. Each runs in the same sandbox, which lives on thawed and whole."""

# ruff: noqa: E501  (programs of the sandbox)
from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable

import docker

from tests.conformance.model import CRIU, HEAD, TRIAL, Refusal
from tests.conformance.runner import Stack
from tests.support.ran import ran
from tests.support.wait import eventually


def _nsenter(stack: Stack, sandbox_id: str, *command: str, spaces: tuple[str, ...] = ("-m",)) -> None:
    pid = str(stack.host.info(sandbox_id).pid)
    ran("nsenter", "-t", pid, *spaces, *command)


def _mounted(kind: str, source: str = "belayer", options: str = "") -> Callable[[Stack, str], Callable[[], None]]:
    """A mount that the host makes inside the sandbox: its programs may not, but a laxer engine might let them."""

    def make(stack: Stack, sandbox_id: str) -> Callable[[], None]:
        more = ["-o", options] if options else []
        _nsenter(stack, sandbox_id, "mount", "-t", kind, *more, source, "/mnt")
        return lambda: _nsenter(stack, sandbox_id, "umount", "-l", "/mnt", spaces=("-m", "-p"))

    return make


def docker_exec(*command: str) -> Callable[[Stack, str], Callable[[], None]]:
    def start(stack: Stack, sandbox_id: str) -> Callable[[], None]:
        client = docker.APIClient(base_url=stack.docker)
        made = client.exec_create(stack.host.info(sandbox_id).container_id, list(command))["Id"]
        client.exec_start(made, detach=True)
        eventually(lambda: client.exec_inspect(made)["Pid"], what="the exec has started")
        pid = client.exec_inspect(made)["Pid"]

        def end() -> None:
            subprocess.run(["kill", "-9", str(pid)], check=False)
            eventually(lambda: not client.exec_inspect(made)["Running"], what="the exec ended")
            client.close()

        return end

    return start


def _orphan_with_stdout(stack: Stack, sandbox_id: str) -> Callable[[], None]:
    """An attached exec that leaves a child with its stdout behind: the child is PID 1's now, its pipe leads outside."""
    info = stack.host.info(sandbox_id)
    script = "sleep 1000 & echo $! > /c/orphan"
    child = subprocess.Popen(
        ["docker", "-H", stack.docker, "exec", info.container_id, "bash", "-c", script], stdout=subprocess.PIPE
    )
    root = f"/proc/{info.pid}/root"
    eventually(lambda: _ppid_is_one(root), what="the exec's shell has ended and its child is PID 1's")

    def end() -> None:
        _nsenter(stack, sandbox_id, "sh", "-c", "kill -9 $(cat /c/orphan)", spaces=("-m", "-p"))
        child.kill()
        child.wait(120)

    return end


def _ppid_is_one(root: str) -> bool:
    try:
        with open(f"{root}/c/orphan") as file:
            pid = file.read().strip()
        with open(f"{root}/proc/{pid}/stat") as file:
            return bool(pid) and file.read().rsplit(")", 1)[1].split()[1] == "1"
    except OSError:
        return False


def _outside_listener(stack: Stack, sandbox_id: str) -> Callable[[], None]:
    """A cable between the host and the sandbox's own network namespace, and a listener at our end."""
    pid = stack.host.info(sandbox_id).pid
    here, there = f"blh{pid % 99999}", f"bls{pid % 99999}"
    run = ["ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(pid)]
    subprocess.run(run, check=True)
    subprocess.run(["ip", "addr", "add", "10.211.7.1/30", "dev", here], check=True)
    subprocess.run(["ip", "link", "set", here, "up"], check=True)
    _nsenter(stack, sandbox_id, "ip", "addr", "add", "10.211.7.2/30", "dev", there, spaces=("-n",))
    _nsenter(stack, sandbox_id, "ip", "link", "set", there, "up", spaces=("-n",))
    listener = socket.create_server(("10.211.7.1", 4242))

    def end() -> None:
        listener.close()
        subprocess.run(["ip", "link", "del", here], check=True)

    return end


def _host_client(stack: Stack, sandbox_id: str) -> Callable[[], None]:
    """A program of the host that connects to a unix socket of the sandbox as soon as it listens."""
    path = f"/proc/{stack.host.info(sandbox_id).pid}/root/c/outside.sock"
    client = socket.socket(socket.AF_UNIX)
    thread = threading.Thread(target=lambda: eventually(lambda: _connect(client, path), what="the program listens"))
    thread.start()

    def end() -> None:
        thread.join(120)
        client.close()

    return end


def _connect(client: socket.socket, path: str) -> bool:
    try:
        client.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _uring(stack: Stack, sandbox_id: str) -> Callable[[], None]:
    """From outside: entered from the host, the process is under no profile. It is foreign as well, and said to be."""
    return _entered(stack, sandbox_id, "libc.syscall(425, 8, ctypes.create_string_buffer(120))", "-a")


def _nested(stack: Stack, sandbox_id: str) -> Callable[[], None]:
    return _entered(stack, sandbox_id, "libc.unshare(0x08000000 | 0x04000000)", "-a")


def _entered(stack: Stack, sandbox_id: str, body: str, spaces: str) -> Callable[[], None]:
    info = stack.host.info(sandbox_id)
    group = f"/proc/{info.pid}/cgroup"
    marker = f"/proc/{info.pid}/root/c/entered"
    code = f"import ctypes, os, time; libc = ctypes.CDLL(None); {body}; open('/c/entered', 'w'); time.sleep(900)"
    child = subprocess.Popen(["nsenter", "-t", str(info.pid), spaces, "-F", "python3", "-c", code])
    with open(group) as file:  # into the sandbox's freezer, as a docker exec would be
        path = next(row.split(":", 2)[2].strip() for row in file if "freezer" in row.split(":")[1].split(","))
    with open(f"/sys/fs/cgroup/freezer{path}/cgroup.procs", "w") as file:
        file.write(str(child.pid))
    eventually(lambda: subprocess.run(["test", "-e", marker]).returncode == 0, what="the process has done it")

    def end() -> None:
        child.kill()
        child.wait(120)
        subprocess.run(["rm", "-f", marker], check=True)

    return end


def python(body: str, up: str = "up()") -> str:
    return f"cat > main.py <<'PROGRAM'\n{HEAD}{body}\n{up}\nsignal.pause()\nPROGRAM\npython3 main.py </dev/null >err 2>&1 &\nwait_up"


KILL = "P=$(cat up); kill -9 $P; rm -f up; wait $P 2>/dev/null; true"

CASES = [
    Refusal(
        ("W2",), "exec in flight", "gvisor issue 11439", "foreign_process", outside=docker_exec("sleep", "600"),
    ),
    Refusal(
        ("W4",), "orphan that still holds the output of the exec that started it", "podman issue 11911", "outside_peer",
        outside=_orphan_with_stdout,
    ),
    Refusal(
        ("W8", "P50"), "traced process", CRIU + "1753", "traced",
        python("k = os.fork()\nif k == 0: time.sleep(9000)\nlibc.ptrace(16, k, 0, 0)", "up(k)"), KILL,
    ),
    Refusal(
        ("P51",), "stopped process", TRIAL, "stopped",
        "sleep 1000 & echo $! > up; kill -STOP $(cat up); until grep -q 'T (stopped)' /proc/$(cat up)/status; do :; done",
        KILL,
    ),
    Refusal(
        ("P53",), "script(1), which ends when its poll is interrupted", TRIAL, "ends_at_dump",
        python("import pty\nk, f = pty.fork()\nif k == 0: os.execvp('script', ['script', '-qfc', 'bash --norc', 'log'])\n"
               "while not os.path.exists('log'): time.sleep(0.01)", "up(k)"),
        KILL,
    ),
    Refusal(
        ("W37b",), "io_uring of a process that got one in spite of the profile", CRIU + "2131", "io_uring",
        outside=_uring,
    ),
    Refusal(
        ("W42",), "connection to outside of the sandbox", "docker/for-linux issue 1057", "outside_peer",
        python("s = socket.create_connection(('10.211.7.1', 4242))"), KILL, _outside_listener,
    ),
    Refusal(
        ("W48b",), "unix socket with a peer outside", CRIU + "772", "outside_peer",
        python("s = socket.socket(1); s.bind('/c/outside.sock'); s.listen(); put('up', str(os.getpid())); a = s.accept()[0]"),
        KILL + "; rm -f /c/outside.sock", _host_client,
    ),
    Refusal(
        ("W50",), "BPF file system mounted inside", CRIU + "2264", "foreign_mount", outside=_mounted("bpf"),
    ),
    Refusal(
        ("W50b",), "overlay mounted inside (Docker in Docker)", CRIU + "1249", "foreign_mount",
        outside=_mounted("overlay", options="lowerdir=/etc:/usr"),
    ),
    Refusal(
        ("B7",), "POSIX message queue with a message in it", "no dump carries it", "message_queue",
        python("rt = ctypes.CDLL('librt.so.1'); q = rt.mq_open(b'/b7', os.O_CREAT | os.O_RDWR, 0o600, None)\n"
               "rt.mq_send(q, b'unread', 6, 0)\nassert q >= 0"),
        KILL + "; rm -f /dev/mqueue/b7; python3 -c \"import ctypes; ctypes.CDLL('librt.so.1').mq_unlink(b'/b7')\"",
    ),
    Refusal(
        ("B8",), "process in namespaces of its own", "criu issue 2610", "nested_namespace",
        outside=_nested,
    ),
]  # fmt: skip
