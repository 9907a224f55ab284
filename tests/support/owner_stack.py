"""Owners and zygote as real processes below a private root. Imports no vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from belayer.errors import DaemonUnreachable
from belayer.messages import owner as o
from belayer.paths import Paths
from belayer.seqpacket import SeqClient
from gpuowner.store import end_holder
from tests.support.patience import patient
from tests.support.wait import eventually, remove_tree

REPO = Path(__file__).resolve().parents[2]
MODEL = REPO / ".cache/models/SmolLM2-135M-Instruct"


ZYGOTE = ("belayerd.worker.zygote",)


class Stack:
    """``slot`` holds extra lines of the [[slot]] table; ``zygote``: module and arguments of one to take instead."""

    def __init__(self, slot: str = "", model: Path = MODEL, zygote: tuple[str, ...] = ZYGOTE) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="blw-", dir="/tmp"))
        self.paths = Paths(self.root).make()
        text = f'[[model]]\nname = "smollm2"\npath = "{model}"\n[[slot]]\nname = "slot0"\nmodel = "smollm2"\n{slot}\n'
        self.paths.config.write_text(patient(text))
        self._zygote = zygote
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        zygote = self.daemon(*self._zygote)
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

    def wait_socket(self, daemon: subprocess.Popen[bytes], path: Path, within: float = 900.0) -> None:
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
        now = self.arena()
        message = o.EndFence(slot="slot0", epoch=now.epoch, owner_generation=now.owner_generation)
        info, _ = client.call(message, o.ArenaInfo)
        client.close()
        return info

    def stop(self) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        for kind in ("weights", "kv"):
            end_holder(self.paths.owner_holder_sock(kind))
        remove_tree(self.root)
