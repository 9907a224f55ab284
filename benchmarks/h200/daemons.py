"""gpuowner itself, as daemons below a root of their own: what the check's small owner is not."""

from __future__ import annotations

import json
import os
import select
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from belayer.errors import DaemonUnreachable
from belayer.messages import owner as m
from belayer.paths import Paths
from belayer.seqpacket import SeqClient
from benchmarks.h200.bench import TREE
from gpuowner.store import end_holder

WHOLE, PART = "big.weight", "small.weight"
_PART_ITEMS = 1 << 16


def make_model(folder: Path, nbytes: int, seed: int) -> None:
    """float32 noise: one large tensor, and a small one that an update can change alone."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    rng = np.random.default_rng(seed)
    sizes = {WHOLE: nbytes // 4 - _PART_ITEMS, PART: _PART_ITEMS}
    header, at = {}, 0
    for name, items in sizes.items():
        header[name] = {"dtype": "F32", "shape": [items], "data_offsets": [at, at + 4 * items]}
        at += 4 * items
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for items in sizes.values():
            for start in range(0, items, 1 << 24):
                file.write(rng.random(min(1 << 24, items - start), dtype=np.float32).tobytes())


class Daemons:
    """They end with us, however we end; ``end`` ends them sooner."""

    def __init__(self, spec: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="bw-"))
        self.paths = Paths(self.root).make()
        self._spec, self._running = spec, dict[str, subprocess.Popen[bytes]]()
        self._ours, self._theirs = os.pipe()

    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(TREE), "BELAYER_ROOT": str(self.root), "OMP_NUM_THREADS": "1"}

    def start(self, kind: str) -> m.OwnerStatusReply:
        """Its status once it answers; the stage's deadline bounds this. Raises RuntimeError with its last words."""
        command = [sys.executable, "-m", "benchmarks.h200.owner_daemon", self._spec, "--kind", kind, str(self._ours)]
        with (self.root / "log").open("ab") as log:
            self._running[kind] = subprocess.Popen(
                command, env=self.env(), pass_fds=(self._ours,), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        while True:
            if self._running[kind].poll() is not None:
                raise RuntimeError(f"gpuowner@{kind} ended: {self.tail()}")
            try:
                return self.status(kind)
            except DaemonUnreachable:
                select.select([], [], [], 0.02)

    def status(self, kind: str) -> m.OwnerStatusReply:
        client = SeqClient(self.paths.owner_sock(kind), 60.0)
        try:
            return client.call(m.OwnerStatus(), m.OwnerStatusReply)[0]
        finally:
            client.close()

    def kill(self, kind: str) -> None:
        self._running[kind].kill()
        self._running[kind].wait()

    def driver_loaded(self, kind: str) -> bool:
        return "libcuda" in Path(f"/proc/{self._running[kind].pid}/maps").read_text()

    def tail(self) -> str:
        return " | ".join((self.root / "log").read_text(errors="replace").strip().splitlines()[-4:])

    def end(self) -> None:
        for kind in self._running:
            self.kill(kind)
            end_holder(self.paths.owner_holder_sock(kind))
        os.close(self._ours)
        os.close(self._theirs)
        shutil.rmtree(self.root)
