"""A reader or a writer of gpuowner's weights on a device, without torch.

``python -m benchmarks.h200.weights_process ROLE SPEC SOCKET``; a line of words in, a line of JSON out."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from belayer.clock import Stopwatch
from belayer.errors import BelayerError
from belayer.messages import owner as m
from benchmarks.h200.daemons import PART
from gpuowner.attach import OwnerClient
from gpuowner.attach_gpu_weights import GpuWeightsView
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import DriverError, Kernel, driver_for
from gpuowner.safetensors_file import elements
from gpuowner.update import begin_update

MODEL = "model"


class Reader:
    def __init__(self, spec: str, socket: Path) -> None:
        self._memory = CudaVmm(driver_for(spec))
        self._memory.synchronize()  # makes the context, which is no part of an attach
        client = OwnerClient(socket, m.Role.WORKER, "reader", 60.0)
        client.keep(lambda said: None)
        watch = Stopwatch()
        self._view = GpuWeightsView(client, self._memory, MODEL)
        self._attach_ms = watch.ms()

    def look(self) -> dict[str, Any]:
        grant = self._view.grant
        verify_ms = self._view.verify()
        return {
            "version": grant.version, "digest": grant.digest, "nbytes": grant.nbytes, "va": self._view.va,
            "attach_ms": self._attach_ms, "verify_ms": verify_ms, "part": self._part(),
        }  # fmt: skip

    def _part(self) -> list[float]:
        """First and last item of the small tensor."""
        spec = self._view.tensors[PART]
        items = np.zeros(elements(spec.shape), dtype="<f4")
        self._memory.copy_out(items.ctypes.data, self._view.va + spec.offset, items.nbytes)
        return [float(items[0]), float(items[-1])]

    def follow(self) -> dict[str, Any]:
        watch = Stopwatch()
        return {"remapped": self._view.follow(), "ms": watch.ms(), "version": self._view.grant.version}

    def stray(self) -> dict[str, Any]:
        """A store into what is mapped for reading. Its answer is this process's end."""
        try:
            self._memory.launch(Kernel.POKE, 1, 1, self._view.va, 1)
            self._memory.synchronize()
        except DriverError as why:
            os._exit(70 if 700 <= why.number <= 719 else 1)  # cuda.h: the errors of a kernel
        return {"stray": "went on"}


class Writer:
    """Each verb is one update of the small tensor: ``commit VALUE``, ``inside VALUE`` (and stop, to be killed)."""

    def __init__(self, spec: str, socket: Path) -> None:
        self._spec, self._socket = spec, socket

    def _update(self, value: float, mode: str, at: Callable[[str], None] | None = None) -> dict[str, Any]:
        client = OwnerClient(self._socket, m.Role.LOADER, "writer", 300.0)
        watch = Stopwatch()
        with begin_update(client, MODEL, mode=mode, driver=self._spec, at=at) as update:
            items = np.full(1 << 16, value, dtype="<f4")
            update.write({PART: items})
            info = update.commit()
        client.close()
        return {"version": info.version, "ms": watch.ms()}

    def commit(self, value: str, mode: str) -> dict[str, Any]:
        return self._update(float(value), mode)

    def inside(self, value: str, mode: str) -> dict[str, Any]:
        def stop(point: str) -> None:
            if point == "written":
                print(json.dumps({"at": point}), flush=True)
                signal.pause()

        return self._update(float(value), mode, stop)


def main() -> None:
    role, spec, socket = sys.argv[1:]
    made: Any = (Reader if role == "reader" else Writer)(spec, Path(socket))
    print(json.dumps({"ready": role, "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        verb, *rest = line.split()
        try:
            said = getattr(made, verb)(*rest)
        except BelayerError as why:
            said = {"declined": f"{type(why).__name__}: {why.message}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
