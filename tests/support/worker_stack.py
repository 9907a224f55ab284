"""Owners, zygote and workers as real processes below a private root, for tests of the worker itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from belayer import procs
from belayer.errors import DaemonUnreachable
from belayer.ids import new_worker_id
from belayer.messages import owner as o
from belayer.messages import worker as w
from belayer.messages.common import Done
from belayer.paths import Paths
from belayer.seqpacket import SeqClient
from tests.support.wait import eventually
from tests.support.worker_client import ControlClient, FrontClient

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / ".cache/models/SmolLM2-135M-Instruct"


@dataclass
class Worker:
    """A worker that answered as a standby."""

    worker_id: str
    pid: int
    pidfd: int
    control: ControlClient
    status: w.WorkerStatusReply
    path: Path

    def front(self, index: int = 0) -> FrontClient:
        return FrontClient(self.path, index)

    def kill(self) -> None:
        """SIGKILL, and seen dead: a fault that did not happen makes a test void."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        eventually(lambda: procs.is_dead(self.pidfd), what=f"death of {self.pid}")

    def become_main(self, epoch: int, generation: int) -> dict[str, float]:
        control = self.control
        took = control.call(w.TakeArena(epoch=epoch), Done).ms
        control.call(w.FlushCache(), Done)
        oracle = control.call(w.CheckOracle(expected=self.status.oracle), w.OracleReply)
        assert oracle.equal
        control.call(w.BecomeMain(generation=generation), Done)
        return {"take_ms": took, "oracle_ms": oracle.ms}

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)


class Stack:
    """``slot`` holds extra lines of the [[slot]] table."""

    def __init__(self, slot: str = "") -> None:
        self.root = Path(tempfile.mkdtemp(prefix="blw-", dir="/tmp"))
        self.paths = Paths(self.root).make()
        self.paths.config.write_text(
            f'[[model]]\nname = "smollm2"\npath = "{MODEL}"\n[[slot]]\nname = "slot0"\nmodel = "smollm2"\n{slot}\n'
        )
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._workers: list[Worker] = []

    def start(self) -> None:
        zygote = self.daemon("belayerd.worker.zygote")
        weights, kv = self.daemon("gpuowner", "--kind", "weights"), self.daemon("gpuowner", "--kind", "kv")
        for daemon, path in (
            (weights, self.paths.owner_sock("weights")),
            (kv, self.paths.owner_sock("kv")),
            (zygote, self.paths.zygote_sock),
        ):
            self.wait_socket(daemon, path)

    def daemon(self, module: str, *args: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "BELAYER_ROOT": str(self.root), "PYTHONPATH": str(REPO)}
        with (self.root / f"{module}{''.join(args)}.log").open("ab") as out:
            process = subprocess.Popen([sys.executable, "-m", module, *args], env=env, stdout=out, stderr=out, cwd="/")
        self._daemons.append(process)
        return process

    def wait_socket(self, daemon: subprocess.Popen[bytes], path: Path, within: float = 180.0) -> None:
        def listening() -> bool:
            assert daemon.poll() is None, f"{path.name}: the daemon ended, see {self.root}"
            try:
                SeqClient(path).close()
            except DaemonUnreachable:
                return False
            return True

        eventually(listening, within=within, what=f"{path} listens", every=0.1)

    def admin(self) -> SeqClient:
        client = SeqClient(self.paths.owner_sock("kv"))
        client.call(o.Hello(role=o.Role.ADMIN, who="belayerd"), o.Welcome)
        return client

    def arena(self) -> o.ArenaInfo:
        client = self.admin()
        status, _ = client.call(o.OwnerStatus(), o.OwnerStatusReply)
        client.close()
        return status.arenas[0]

    def end_fence(self) -> o.ArenaInfo:
        client = self.admin()
        info, _ = client.call(o.EndFence(slot="slot0", epoch=self.arena().epoch), o.ArenaInfo)
        client.close()
        return info

    def spawn(self, within: float = 120.0) -> Worker:
        name = new_worker_id("slot0")
        zygote = SeqClient(self.paths.zygote_sock, timeout=30.0)
        spawned, fds = zygote.call(w.SpawnWorker(worker_id=name, slot="slot0"), w.Spawned)
        zygote.close()
        path = self.paths.worker_sock(name)
        control = ControlClient(path)
        try:
            status = control.call(w.WorkerStatus(), w.WorkerStatusReply, within)
        except TimeoutError:
            print(self.paths.log(name).read_text()[-4000:], file=sys.stderr)
            raise
        worker = Worker(name, spawned.pid, fds[0], control, status, path)
        self._workers.append(worker)
        return worker

    def stop(self) -> None:
        for worker in self._workers:
            if not procs.is_dead(worker.pidfd):
                worker.kill()
            worker.close()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.root)
