"""A weights owner that keeps one model twice (swap, in_place) in memory of a kind, and readers of that kind.

``python -m tests.support.device_owners SOCKET MODEL MODE KIND VERSION POINT`` is a writer that stops itself at a point
(tests.support.versions) and writes over the driver that BELAYER_TEST_DRIVER names."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from belayer.messages import owner as o
from belayer.messages.owner import TensorSpec
from gpuowner.attach import OwnerClient, WeightsView
from gpuowner.attach_gpu_weights import GpuWeightsView
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import REAL, driver_for
from gpuowner.tensors import Sparse
from gpuowner.update import begin_update
from tests.support import memory as support
from tests.support import versions as v
from tests.support.owners import Owners

SHAPES: dict[str, tuple[int, ...]] = {  # as versions.SHAPES, and small: there are many of these updates
    "model.embed_tokens.weight": (1 << 13, 128),
    f"{v.LAYER}.self_attn.q_proj.weight": (6, 64),
    f"{v.LAYER}.self_attn.k_proj.weight": (2, 64),
    f"{v.LAYER}.self_attn.v_proj.weight": (2, 64),
    "model.norm.weight": (64,),
}
MEMFD = "memfd"
MODELS = {"swap": "swapped", "in_place": "placed"}
SLOT = 4 << 20


class Reader(Protocol):
    """What a worker has of a model."""

    @property
    def grant(self) -> o.WeightsGrant: ...

    tensors: dict[str, TensorSpec]

    def address(self) -> int: ...

    def value(self, name: str) -> NDArray[Any]:
        """The items of a float32 tensor, copied out."""

    def check(self) -> None:
        """Read everything. Raises WeightsBroken."""

    def follow(self) -> bool: ...

    def close(self) -> None: ...


class HostReader:
    def __init__(self, client: OwnerClient, model: str) -> None:
        self._view = WeightsView(client, model)
        self.tensors = self._view.tensors
        self.check()

    @property
    def grant(self) -> o.WeightsGrant:
        return self._view.grant

    def address(self) -> int:
        return self._view.mapping.address

    def value(self, name: str) -> NDArray[Any]:
        return v.held(self._view, name).reshape(-1).copy()

    def check(self) -> None:
        self._view.verify()

    def follow(self) -> bool:
        return self._view.follow()

    def close(self) -> None:
        self._view.mapping.close()


class DeviceReader:
    def __init__(self, client: OwnerClient, model: str, memory: CudaVmm) -> None:
        self._memory, self._view = memory, GpuWeightsView(client, memory, model)
        self.tensors = self._view.tensors

    @property
    def grant(self) -> o.WeightsGrant:
        return self._view.grant

    def address(self) -> int:
        return self._view.va

    def value(self, name: str) -> NDArray[Any]:
        spec = self.tensors[name]
        return np.frombuffer(support.get(self._memory, self._view.va + spec.offset, spec.nbytes), dtype="<f4")

    def check(self) -> None:
        self._view.verify()

    def follow(self) -> bool:
        return self._view.follow()

    def close(self) -> None:
        self._view.close()


class DeviceOwners(Owners):
    """``memory``: "memfd", or the spec of a driver."""

    def __init__(self, memory: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="blw-m-", dir="/tmp")) / "model"
        self.folder.mkdir()
        (self.folder / "config.json").write_text('{"tie_word_embeddings": true}')
        v.save(self.folder / "model.safetensors", state(1))
        super().__init__({"m": self.folder})
        self.memory = memory
        self.cuda = None if memory == MEMFD else CudaVmm(driver_for(memory))
        kind, device = (MEMFD, "cpu") if self.cuda is None else ("cuda_vmm", "gpu")
        rows = [f'[gpuowner]\nmemory = "{kind}"\n']
        rows += [
            f'[[model]]\nname = "{name}"\npath = "{self.folder}"\nupdate = "{mode}"\n' for mode, name in MODELS.items()
        ]
        rows += [f'[[slot]]\nname = "slot0"\nmodel = "swapped"\ndevice = "{device}"\nkv_bytes = {SLOT}\n']
        self.paths.config.write_text("".join(rows))

    def daemon(self, module: str, *args: str) -> subprocess.Popen[bytes]:
        if module == "gpuowner" and self.memory not in (MEMFD, REAL):
            return super().daemon("benchmarks.h200.owner_daemon", self.memory, *args)
        return super().daemon(module, *args)

    def client(self, kind: str, role: o.Role = o.Role.WORKER, who: str = "test") -> OwnerClient:
        """Patient: an update of device memory starts processes, which take their time on a busy host."""
        made = OwnerClient(self.paths.owner_sock(kind), role, who, timeout=120.0)
        self._clients.append(made)
        return made

    def reader(self, mode: str, who: str = "reader") -> Reader:
        client = self.client("weights", who=who)
        client.keep(lambda said: None)
        if self.cuda is None:
            return HostReader(client, MODELS[mode])
        return DeviceReader(client, MODELS[mode], self.cuda)

    def info(self, mode: str) -> o.WeightsInfo:
        return self.the_model(MODELS[mode])

    def write(self, mode: str, kind: str) -> int:
        """Make the next version and return its number."""
        version = self.info(mode).version + 1
        client = self.client("weights", o.Role.LOADER, "trainer")
        write(client, MODELS[mode], mode, kind, version, lambda point: None, self.memory)
        return version

    def writer(self, mode: str, kind: str, version: int, point: str) -> v.Writer:
        os.environ["BELAYER_TEST_DRIVER"] = self.memory
        try:
            path = self.paths.owner_sock("weights")
            return v.Writer(path, MODELS[mode], mode, kind, version, point, __name__)
        finally:
            del os.environ["BELAYER_TEST_DRIVER"]

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.folder.parent)


def tensor(name: str, version: int) -> NDArray[np.float32]:
    """All values are ``version`` plus a fraction that tells the tensor."""
    return np.full(SHAPES[name], version + list(SHAPES).index(name) / 16, dtype=np.float32)


def state(version: int, names: Iterable[str] = SHAPES) -> dict[str, Any]:
    return {name: tensor(name, version) for name in names}


def seen_in(reader: Reader) -> dict[str, set[int]]:
    """The versions that the values of each tensor are of: one, unless they are mixed."""
    arrays = {name: reader.value(name) for name in SHAPES}
    return {name: {int(array.min()), int(array.max())} for name, array in arrays.items()}


def write(
    client: OwnerClient, model: str, mode: str, kind: str, version: int, at: Callable[[str], None], driver: str = ""
) -> None:
    """As ``versions.write``, over a driver."""
    spec = driver or os.environ["BELAYER_TEST_DRIVER"]
    update = begin_update(
        client, model, mode=mode, whole=kind == "whole", version=version, at=at, threads=1, driver=spec
    )
    if kind == "sparse":
        values = tensor(v.DELTA[0], version).reshape(-1)
        update.write_sparse({v.DELTA[0]: Sparse(np.arange(values.size), values)})
    else:
        update.write(state(version, SHAPES if kind == "whole" else v.DELTA))
    update.commit()


if __name__ == "__main__":
    v.main(write)
