"""Real workers on top of real owners and a real zygote."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from belayer import procs
from belayer.ids import new_worker_id
from belayer.messages import worker as w
from belayer.messages.common import Done
from belayer.seqpacket import SeqClient
from tests.support.owner_stack import MODEL, ZYGOTE, Stack
from tests.support.wait import eventually
from tests.support.worker_client import ControlClient, FrontClient


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

    def stop(self) -> None:
        """SIGSTOP, and seen to stand still."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGSTOP)
        eventually(lambda: procs.state(self.pid) == "T", what=f"{self.pid} stands still")

    def go_on(self) -> None:
        signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def become_main(self, epoch: int, generation: int) -> dict[str, float]:
        control = self.control
        took = control.call(w.TakeArena(epoch=epoch), Done).ms
        flushed = control.call(w.FlushCache(), Done).detail
        adopted = re.search(r"then (\d+) finished", flushed)
        oracle = control.call(w.CheckOracle(expected=self.status.oracle), w.OracleReply)
        assert oracle.equal
        control.call(w.BecomeMain(generation=generation), Done)
        return {"take_ms": took, "oracle_ms": oracle.ms, "adopted": int(adopted[1]) if adopted else -1}

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)


class WorkerStack(Stack):
    """A stack that can spawn workers; they end with it."""

    def __init__(self, slot: str = "", model: Path = MODEL, zygote: tuple[str, ...] = ZYGOTE) -> None:
        super().__init__(slot, model, zygote)
        self._workers: list[Worker] = []

    def spawn(self, within: float = 900.0) -> Worker:
        name = new_worker_id("slot0")
        zygote = SeqClient(self.paths.zygote_sock, timeout=300.0)
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
        super().stop()
