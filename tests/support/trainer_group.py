"""Two processes with a gloo group between them: a trainer that broadcasts weights, and the receiver that writes them.

    python -m tests.support.trainer_group trainer MODEL
    python -m tests.support.trainer_group receiver MODEL STORE STOP_AFTER SHAPES MODE

The receiver is the rank that stands for a worker: it takes each tensor from the group into the next version
(gpuowner.update) and stops itself (SIGSTOP) after ``STOP_AFTER`` tensors (-1: never). The trainer obeys one JSON
object per line and answers each with one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from belayer import procs
from belayer.errors import BelayerError
from belayer.messages.owner import Role
from belayer.messages.trainer import Replaced
from belayer.paths import Paths
from belayer.trainer import Trainer
from gpuowner.attach import OwnerClient
from gpuowner.update import begin_update
from tests.support.wait import eventually

REPO = Path(__file__).resolve().parents[2]
JOIN_S = 120.0
WAIT_S = 90.0  # of one collective; a hang would take gloo's own half hour


def join(store: str, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(minutes=30)
    )


def leave() -> None:
    """A group whose other member is dead or stopped."""
    dist.distributed_c10d._get_default_group().abort()
    dist.destroy_process_group()


# --- the trainer ---


def broadcast(trainer: Trainer, folder: Path) -> int:
    """Every tensor, then the version that the receiver has sealed."""
    for tensor in tensors(folder).values():
        trainer.wait(dist.broadcast(tensor, src=0, async_op=True), WAIT_S)
    sealed = torch.zeros(1, dtype=torch.int64)
    trainer.wait(dist.broadcast(sealed, src=1, async_op=True), WAIT_S)
    return int(sealed)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def obey(trainer: Trainer, order: dict[str, Any]) -> Any:
    match order["do"]:
        case "join":
            join(order["store"], 0)
            return "joined"
        case "leave":
            leave()
            return "left"
        case "update":
            with trainer.update():
                return broadcast(trainer, Path(order["folder"]))
        case "replaced":
            return [
                [e.slot, e.old_generation, e.new_generation, e.worker_id, e.weight_version]
                for e in trainer.replaced(order["within_s"])
            ]
        case "ack":
            trainer.ack(_event(order["generation"]))
            return "acknowledged"
    raise AssertionError(order)


def _event(generation: int) -> Replaced:
    return Replaced(
        slot="slot0", model="", old_generation=0, new_generation=generation, worker_id="", pid=0, start_time=0,
        weight_version=0, cause="", at=0.0,
    )  # fmt: skip


def be_trainer(model: str) -> None:
    trainer = Trainer(model, name="grpo")
    print(json.dumps({"said": [[m.slot, m.generation, m.worker_id] for m in trainer.members]}), flush=True)
    for line in sys.stdin:
        try:
            said = {"said": obey(trainer, json.loads(line))}
        except BelayerError as why:
            said = {"error": str(why.code), "message": why.message, "remedy": why.remedy}
        print(json.dumps(said), flush=True)


# --- the receiver ---


def be_receiver(model: str, store: str, stop_after: int, shapes: Path, mode: str) -> None:
    join(store, 1)
    client = OwnerClient(Paths().owner_sock("weights"), Role.LOADER, "receiver", timeout=300.0)
    got = {name: torch.empty_like(tensor) for name, tensor in tensors(shapes).items()}
    update = None
    for count, (name, tensor) in enumerate(got.items()):
        if count == stop_after:
            print("stopping", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.broadcast(tensor, src=0)
        # Opened with the first tensor: by then the trainer has paused the engines.
        update = update or begin_update(client, model, mode=mode, whole=True)
        update.write({name: tensor})
    assert update is not None
    update.commit()
    dist.broadcast(torch.tensor([update.version]), src=1)
    dist.destroy_process_group()


class Process:
    """One of the two, as a child of the test."""

    def __init__(self, root: Path, role: str, *words: str) -> None:
        env = {**os.environ, "BELAYER_ROOT": str(root), "PYTHONPATH": str(REPO)}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.trainer_group", role, *words],
            env=env, cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def tell(self, do: str, **words: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        return json.loads(self.line())  # type: ignore[no-any-return]

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        self.tell(do, **words)
        return self.answer()

    def stopped(self) -> None:
        """It stands still after the tensors that it was told, and is proven to."""
        assert self.line() == "stopping"
        eventually(lambda: procs.state(self.child.pid) == "T", what="the receiver stops")

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(300)
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        be_trainer(sys.argv[2])
    else:
        be_receiver(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
