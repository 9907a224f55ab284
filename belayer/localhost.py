"""All daemons of a host below a private root, as plain child processes: for the demo, tests and benchmarks.

On a real host systemd does this (systemd/). Each daemon is started as its own process, is ready when its socket
answers ``Ping``, and is stopped by SIGTERM, then SIGKILL; the zygote and the workers, which outlive belayerd by
design, and the holders, which outlive the owners, are found by this root in their environment and killed.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeVar

from belayer import procs, statefile
from belayer.clock import monotonic
from belayer.errors import BelayerError, DaemonUnreachable, WorkerFailed
from belayer.messages.common import Done, Ping, Pong
from belayer.messages.control import HostStatus, HostStatusReply
from belayer.messages.sandbox import DestroySandbox, ListSandboxes, SandboxList
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayer.seqpacket import SeqClient

T = TypeVar("T")

OWNERS = ("gpuowner@weights", "gpuowner@kv")
ROLLOUT = (*OWNERS, "belayer-router", "belayerd")
ALL = (*ROLLOUT, "envkeeper")

_PACKAGES = frozenset({"belayerd", "gpuowner", "envkeeper"})
_HOLDER = "gpuowner/holder.py"
_COMMANDS = {
    "gpuowner@weights": ["gpuowner", "--kind", "weights"],
    "gpuowner@kv": ["gpuowner", "--kind", "kv"],
    "belayer-router": ["belayerd.router"],
    "belayerd": ["belayerd"],
    "envkeeper": ["envkeeper"],
}


_reserved: list[int] = []  # sockets named for ports that were given away, open for as long as this process lives


def free_port() -> int:
    """A TCP port of this machine for somebody who binds it later, which may be a minute.

    Not one of those that the kernel takes for outgoing connections, and reserved against other callers of this function
    in any process, by an abstract socket of its name. Raises BelayerError when there is none."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = list(range(10_000, first)) or list(range(20_000, 60_000))
    random.shuffle(ports)
    for port in ports:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0belayer-port-{port}")
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _reserved.append(name.detach())
        return port
    raise BelayerError(f"no free TCP port below {first}")


def demo_config(
    model: Path, port: int, slots: int = 2, *, extra_slot: str = "", extra: str = "", host: str = "127.0.0.1"
) -> str:
    """A small TOML for CPU slots: what examples, tests and benchmarks run."""
    parts = [f'[[model]]\nname = "smollm2"\npath = "{model}"\ndtype = "float32"\n']
    parts += [
        f'[[slot]]\nname = "slot{n}"\nmodel = "smollm2"\nkv_bytes = {128 << 20}\nmax_model_len = 2048\n{extra_slot}\n'
        for n in range(slots)
    ]
    return "\n".join([f'[router]\nhost = "{host}"\nport = {port}\n', *parts, extra])


def _refuse_given_up(status: HostStatusReply) -> None:
    reasons = [f"slot {row.slot}: {row.reason}" for row in status.slots if row.gave_up]
    reasons += [status.zygote] if status.zygote_failed else []
    if reasons:
        raise WorkerFailed(" | ".join(reasons), kept="whatever serves goes on")


def _is_daemon(cmdline: bytes) -> bool:
    """Of ours: ``python -m belayerd...``, or the holder, which is started by its file."""
    words = cmdline.decode(errors="replace").split("\0")
    modules = [word.split(".")[0] for before, word in pairwise(words) if before == "-m"]
    return any(module in _PACKAGES for module in modules) or any(word.endswith(_HOLDER) for word in words[:5])


class LocalHost:
    """Start with ``start()``, always end with ``stop()`` (or use as a context manager)."""

    def __init__(self, root: Path, config: str) -> None:
        self.root = root
        self.paths = Paths(root).make()
        self.paths.config.write_text(config)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, daemons: tuple[str, ...] = ALL) -> None:
        for name in daemons:
            self.spawn(name)

    def spawn(self, name: str) -> subprocess.Popen[bytes]:
        """Start one daemon (again); its stderr goes to state/log/NAME.log."""
        command = [sys.executable, "-m", *_COMMANDS[name], "--config", str(self.paths.config)]
        log = os.open(self.paths.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        env = {**os.environ, "BELAYER_ROOT": str(self.root)}
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        finally:
            os.close(log)
        self._children[name] = child
        return child

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def kill9(self, name: str) -> None:
        """SIGKILL one daemon and see it dead; that it is gone is no error from then on."""
        child = self._children.pop(name)
        child.kill()
        child.wait(60)

    def wait(self, what: str, probe: Callable[[], T | None], within: float) -> T:
        """The first answer that is not None. A daemon that has ended meanwhile is an error at once."""
        deadline, pause = monotonic() + within, threading.Event()
        while True:
            answer = probe()
            if answer is not None:
                return answer
            for name, child in self._children.items():
                if child.poll() is not None:
                    raise BelayerError(
                        f"{name} ended with {child.returncode} while waiting for {what}: {self.tail(name)}"
                    )
            if monotonic() > deadline:
                said = "; ".join(f"{name}: {self.tail(name, 1)}" for name in self._children)
                raise BelayerError(
                    f"no {what} within {within:g} s (last words of {said})", remedy=f"see {self.paths.state / 'log'}"
                )
            pause.wait(0.05)

    def tail(self, name: str, lines: int = 3) -> str:
        text = self.paths.log(name).read_text(errors="replace").strip().splitlines()
        return " | ".join(text[-lines:])

    def answers(self, path: Path) -> bool | None:
        try:
            call_sync(path, Ping(), Pong, 1.0)
        except DaemonUnreachable:
            return None
        return True

    def owner_answers(self, kind: str) -> bool | None:
        try:
            client = SeqClient(self.paths.owner_sock(kind), 1.0)
            client.call(Ping(), Pong)
            client.close()
        except DaemonUnreachable:
            return None
        return True

    def status(self) -> HostStatusReply:
        return call_sync(self.paths.belayerd_sock, HostStatus(), HostStatusReply, 30.0)

    def until(self, what: str, fact: Callable[[HostStatusReply], bool], within: float) -> HostStatusReply:
        """Wait until the host status shows a fact."""

        def probe() -> HostStatusReply | None:
            try:
                status = self.status()
            except DaemonUnreachable:
                return None
            return status if fact(status) else None

        return self.wait(what, probe, within)

    def until_protected(self, within: float = 900.0, *, mending: bool = False) -> HostStatusReply:
        """Raises WorkerFailed at once, with the reason, when a slot has given up. ``mending``: what it lacks is on its
        way, and belayerd tries again by itself."""

        def protected(status: HostStatusReply) -> bool:
            if not mending:
                _refuse_given_up(status)
            return bool(status.slots) and all(row.protected or row.state == "reserve" for row in status.slots)

        return self.until("protected slots", protected, within)

    def stop(self) -> None:
        """End everything below this root and see it dead."""
        last = self._last_status()
        self._destroy_sandboxes()
        for child in reversed(list(self._children.values())):
            child.terminate()
        for child in self._children.values():
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(60)
        self._children.clear()
        groups = procs.Cgroups(procs.tag_of(self.paths.run))
        pids = [worker.pid for slot in last.slots for worker in slot.workers] if last else []
        pids += self._sessions()
        for _ in range(5):  # a zygote may have forked one more before it was dead
            self._end(pids)
            groups.kill_all()
            pids = [*self._sessions(), *groups.all_pids()]
            if not pids:
                break
        else:
            raise WorkerFailed(
                f"SIGKILL does not end {pids}, below {self.root}", remedy="look at their stacks in /proc"
            )
        groups.remove_all()

    @staticmethod
    def _end(pids: list[int]) -> None:
        """SIGKILL, and seen dead within ten seconds, or not."""
        fds = []
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(fds[-1], signal.SIGKILL)
            except ProcessLookupError:
                continue
        procs.wait_dead(fds, 10.0)
        for fd in fds:
            os.close(fd)

    def _destroy_sandboxes(self) -> None:
        """Sandboxes outlive envkeeper by design; those of a private root end with it."""
        sock = self.paths.envkeeper_sock
        try:
            for box in call_sync(sock, ListSandboxes(), SandboxList, 5.0).sandboxes:
                call_sync(sock, DestroySandbox(sandbox_id=box.sandbox_id), Done, 60.0)
        except DaemonUnreachable:
            return  # no envkeeper here, or it was killed: its containers carry this root in their labels

    def _last_status(self) -> HostStatusReply | None:
        saved = statefile.load(self.paths.status_file, HostStatusReply)
        return saved if isinstance(saved, HostStatusReply) else None

    def _sessions(self) -> list[int]:
        """Daemons that carry this root in their environment: zygote, holders, workers between two status files. A
        user's own program in a shell that exports BELAYER_ROOT carries it too, and is none of ours."""
        needle = f"BELAYER_ROOT={self.root}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if needle in (entry / "environ").read_bytes() and _is_daemon((entry / "cmdline").read_bytes()):
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found
