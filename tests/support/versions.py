"""A model whose every value tells its weight version, and a writer process that stops where it is told."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from belayer import procs
from belayer.messages.owner import Role
from gpuowner.attach import OwnerClient, WeightsView
from gpuowner.tensors import Sparse
from gpuowner.update import begin_update
from tests.support.wait import eventually

REPO = Path(__file__).resolve().parents[2]
LAYER = "model.layers.0"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (70, 1 << 18),  # 70 MiB of float32: the model spans two chunks
    f"{LAYER}.self_attn.q_proj.weight": (6, 64),
    f"{LAYER}.self_attn.k_proj.weight": (2, 64),
    f"{LAYER}.self_attn.v_proj.weight": (2, 64),
    f"{LAYER}.mlp.gate_proj.weight": (96, 64),
    f"{LAYER}.mlp.up_proj.weight": (96, 64),
    "model.norm.weight": (64,),
}
DELTA = (f"{LAYER}.self_attn.k_proj.weight", "model.norm.weight")


def tensor(name: str, version: int) -> NDArray[np.float32]:
    """All values are ``version`` plus a fraction that tells the tensor."""
    return np.full(SHAPES[name], version + list(SHAPES).index(name) / 16, dtype=np.float32)


def state(version: int, names: Any = SHAPES) -> dict[str, Any]:
    return {name: tensor(name, version) for name in names}


def save(path: Path, tensors: dict[str, NDArray[Any]], dtype: str = "F32") -> None:
    """One safetensors file."""
    header: dict[str, Any] = {}
    at = 0
    for name, array in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(array.tobytes())


def make_model(folder: Path, version: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    save(folder / "model.safetensors", state(version))
    return folder


def held(view: WeightsView, name: str) -> NDArray[Any]:
    spec = view.tensors[name]
    data = memoryview(view.mapping.buffer()).cast("B")[spec.offset : spec.offset + spec.nbytes]
    return np.frombuffer(data, dtype="<f4").reshape(spec.shape)


def versions_in(view: WeightsView) -> dict[str, set[int]]:
    """The versions that the values of each tensor are of: one, unless they are mixed."""
    arrays = {name: held(view, name) for name in SHAPES}
    return {name: {int(array.min()), int(array.max())} for name, array in arrays.items()}


class Writer:
    """A process that updates a model and stops itself (SIGSTOP) at ``point``."""

    def __init__(
        self, socket: Path, model: str, mode: str, kind: str, version: int, point: str, module: str = __name__
    ) -> None:
        """``module``: whose model and ``write`` it is."""
        command = [sys.executable, "-m", module, str(socket), model, mode, kind, str(version), point]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPO,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )  # fmt: skip

    def stopped(self, point: str) -> None:
        """Wait until it is at its point, and proven to stand still there."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == f"{point}\n", self.process.communicate()[1][-2000:]
        eventually(lambda: procs.state(self.process.pid) == "T", what=f"the writer stops at {point}")

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait() == -signal.SIGKILL
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def write(client: OwnerClient, model: str, mode: str, kind: str, version: int, at: Any) -> None:
    """``kind``: whole, delta or sparse."""
    update = begin_update(client, model, mode=mode, whole=kind == "whole", version=version, at=at, threads=1)
    if kind == "sparse":
        name = DELTA[0]
        values = tensor(name, version).reshape(-1)
        update.write_sparse({name: Sparse(np.arange(values.size), values)})
    else:
        update.write(state(version, SHAPES if kind == "whole" else DELTA))
    update.commit()


Write = Callable[[OwnerClient, str, str, str, int, Callable[[str], None]], None]


def main(write: Write = write) -> None:
    socket, model, mode, kind, version, point = sys.argv[1:]

    def at(name: str) -> None:
        if name == point:
            print(name, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    write(OwnerClient(Path(socket), Role.LOADER, "writer", timeout=300.0), model, mode, kind, int(version), at)


if __name__ == "__main__":
    main()
