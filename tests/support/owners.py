"""Owner daemons that are killed and come back: a tiny model, worker processes, and what the owner says of them."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

from belayer import procs
from belayer.errors import DaemonUnreachable
from belayer.messages import owner as o
from belayer.seqpacket import SeqClient
from gpuowner.attach import OwnerClient
from tests.support.owner_stack import REPO, Stack
from tests.support.wait import eventually

SIZE = 1 << 20

# Holds the lease and counts in the first 8 bytes of the arena, a thousand times a second: what a main's decoding is to
# the owner. Says each connection that was mended.
STREAMER = """
import sys
import threading
from pathlib import Path
from belayer.messages.owner import Role
from gpuowner.attach import ArenaView, OwnerClient
path, slot, rank, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
client = OwnerClient(path, Role.WORKER, sys.argv[5])
client.keep(lambda said: print(said, flush=True))
view = ArenaView(client, slot, size, rank)
view.promote(view.grant.epoch)
print("held", flush=True)
count = memoryview(view.mapping.buffer()).cast("B").cast("Q")
tick = threading.Event()
while not tick.wait(0.001):
    count[0] += 1
"""


def tiny_model(folder: Path, seed: int, nbytes: int = 1 << 18) -> Path:
    """A model folder of one float32 tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(seed).standard_normal(nbytes // 4).astype("<f4").tobytes()
    header = {"w": {"dtype": "F32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}
    text = json.dumps(header).encode()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


class Owners(Stack):
    """A stack whose configuration has tiny models and slots of SIZE bytes."""

    def __init__(self, models: dict[str, Path], slots: tuple[str, ...] = ("slot0",), extra: str = "") -> None:
        super().__init__()
        text = [f'[[model]]\nname = "{name}"\npath = "{path}"\n{extra}' for name, path in models.items()]
        text += [f'[[slot]]\nname = "{slot}"\nmodel = "{next(iter(models))}"\n' for slot in slots]
        self.paths.config.write_text("\n".join(text))
        self.owners: dict[str, subprocess.Popen[bytes]] = {}
        self.children: list[subprocess.Popen[str]] = []
        self._clients: list[OwnerClient] = []

    def up(self, kind: str) -> o.OwnerStatusReply:
        """Start an owner (again) and wait until it serves."""
        daemon = self.owners[kind] = self.daemon("gpuowner", "--kind", kind)

        def serves() -> bool:
            assert daemon.poll() is None, (self.root / f"gpuowner--kind{kind}.log").read_text()[-2000:]
            try:
                return self.status(kind).pid == daemon.pid
            except DaemonUnreachable:
                return False

        eventually(serves, what=f"the owner of {kind} serves", every=0.02)
        return self.status(kind)

    def kill(self, kind: str) -> None:
        """SIGKILL an owner and see it dead."""
        self.owners[kind].kill()
        assert self.owners[kind].wait() == -signal.SIGKILL

    def reborn(self, kind: str) -> o.OwnerStatusReply:
        self.kill(kind)
        return self.up(kind)

    def status(self, kind: str) -> o.OwnerStatusReply:
        client = SeqClient(self.paths.owner_sock(kind))
        try:
            return client.call(o.OwnerStatus(), o.OwnerStatusReply)[0]
        finally:
            client.close()

    def arena_in(self, state: str, slot: str = "slot0", rank: int = 0) -> o.ArenaInfo:
        """Wait until the arena is in ``state``."""
        eventually(lambda: self.the_arena(slot, rank).state == state, what=f"{slot} is {state}")
        return self.the_arena(slot, rank)

    def the_arena(self, slot: str = "slot0", rank: int = 0) -> o.ArenaInfo:
        return next(row for row in self.status("kv").arenas if (row.slot, row.rank) == (slot, rank))

    def the_model(self, name: str = "m") -> o.WeightsInfo:
        return next(row for row in self.status("weights").weights if row.model == name)

    def client(self, kind: str, role: o.Role = o.Role.WORKER, who: str = "test") -> OwnerClient:
        made = OwnerClient(self.paths.owner_sock(kind), role, who)
        self._clients.append(made)
        return made

    def holder_pid(self, kind: str) -> int:
        return int(self.status(kind).store.removeprefix("holder pid "))

    def child(self, script: str, *args: str) -> subprocess.Popen[str]:
        """A child process of a test that has said "held"."""
        process = subprocess.Popen(
            [sys.executable, "-c", script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )  # fmt: skip
        self.children.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    def streamer(self, slot: str = "slot0", rank: int = 0, who: str = "main") -> subprocess.Popen[str]:
        return self.child(STREAMER, str(self.paths.owner_sock("kv")), slot, str(rank), str(SIZE), who)

    def fence(self, info: o.ArenaInfo) -> o.ArenaInfo:
        """End a fence that has begun, as belayerd does."""
        admin = OwnerClient(self.paths.owner_sock("kv"), o.Role.ADMIN, "belayerd")
        message = o.EndFence(slot=info.slot, rank=info.rank, epoch=info.epoch, owner_generation=info.owner_generation)
        try:
            return admin.call(message, o.ArenaInfo)[0]
        finally:
            admin.close()

    def close_clients(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()

    def stop(self) -> None:
        for process in self.children:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self.close_clients()
        super().stop()


def kill_pid(pid: int) -> None:
    """SIGKILL a process that is no child of ours, and see it dead."""
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        assert procs.wait_dead([fd], 300.0) == []
    finally:
        os.close(fd)
