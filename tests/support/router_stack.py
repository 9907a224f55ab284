"""Owners, zygote and router as real processes; the supervisor's part is played by the test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer.errors import WorkerGone
from belayer.localhost import free_port
from belayer.messages.common import Done
from belayer.messages.router import RegisterWorker, RouterStatus, RouterStatusReply, UnregisterWorker
from belayer.rpc import SyncClient
from tests.support.last_words import of_logs
from tests.support.owner_stack import MODEL
from tests.support.wait import eventually
from tests.support.worker_stack import Worker, WorkerStack


@dataclass
class RouterStack:
    """Start with ``up``, always end with ``stop``."""

    stack: WorkerStack
    url: str
    rpc: SyncClient
    generation: int = 0
    last: Any = None

    def promote(self, worker: Worker) -> None:
        """Lease, flush, oracle, become main, register: the order of a handover after its fence."""
        self.generation += 1
        self.last = worker
        worker.become_main(self.stack.arena().epoch, self.generation)
        told = RegisterWorker(
            slot="slot0",
            generation=self.generation,
            worker_id=worker.worker_id,
            endpoint=f"ipc://{worker.path}",
            model="smollm2",
            weight_version=1,
        )
        try:
            self.rpc.call(told, Done, 300.0)
        except WorkerGone:  # it was too slow for the router's first question, which it answers later
            eventually(lambda: self.status().slots[0].registered, what=f"{worker.worker_id} answers, and serves")

    def lose(self, worker: Worker) -> None:
        """SIGKILL, seen dead; unregister first of all, then fence."""
        worker.kill()
        self.rpc.call(UnregisterWorker(slot="slot0", generation=self.generation, reason="killed"), Done, 300.0)
        self.stack.end_fence()

    def retire(self) -> None:
        self.lose(self.last)

    def caught_running(self, worker: Worker, least: int) -> bool:
        """Let the worker stand still, and say whether ``least`` of its requests have not ended; where they have, it
        goes on. On a busy machine a client is told of a stream's middle when its engine has come to the end."""
        worker.stop()
        if self.status().running >= least:
            return True
        worker.go_on()
        return False

    def status(self) -> RouterStatusReply:
        return self.rpc.call(RouterStatus(), RouterStatusReply, 300.0)

    @classmethod
    def up(
        cls, slot: str = "max_model_len = 1024", router: str = "", port: int = 0, model: Path = MODEL
    ) -> RouterStack:
        """``slot``, ``router``: lines of these tables of the configuration."""
        port = port or free_port()
        stack = WorkerStack(f"{slot}\n[router]\nport = {port}\n{router}\n", model)
        try:
            stack.start()
            daemon = stack.daemon("belayerd.router")
            eventually(
                stack.paths.router_sock.exists, within=900, what=f"the router serves; see {stack.root}", every=0.1
            )
            assert daemon.poll() is None
        except BaseException as why:
            why.add_note(of_logs(stack.root))
            stack.stop()
            raise
        return cls(stack, f"http://127.0.0.1:{port}", SyncClient(stack.paths.router_sock))

    def stop(self) -> None:
        self.rpc.close()
        self.stack.stop()
