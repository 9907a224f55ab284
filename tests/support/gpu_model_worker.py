"""A worker of a GPU slot up to its parameters: what ``placed.place`` does on a GPU, over a stand-in whose addresses are
host memory. ``python -m tests.support.gpu_model_worker ROOT WHO``; a word per line in, a line of JSON out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from belayer import log
from belayer.config import load
from belayer.errors import BelayerError
from belayer.paths import Paths
from belayerd.worker.adapter import gpu_attach, gpu_loader, gpu_seat
from belayerd.worker.adapter.device import GpuDevice
from gpuowner import vmem
from gpuowner.backends.cuda_vmm import CudaVmm, DeviceBytes
from gpuowner.backends.driver import REAL, driver_for


def on_host(buffer: DeviceBytes) -> torch.Tensor:
    return torch.frombuffer(vmem.bytes_at(buffer.va, buffer.nbytes), dtype=torch.uint8)


class Net(nn.Module):  # type: ignore[misc]
    """Names and shapes of the model folder of the test, tied as that is."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16, dtype=dtype)
        self.norm = nn.LayerNorm(16, bias=False, dtype=dtype)
        self.head = nn.Linear(16, 32, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def main() -> None:
    root, who = sys.argv[1:]
    log.setup("worker")  # to stderr: stdout is for answers
    paths = Paths(Path(root))
    config = load(paths.config)
    slot = config.slot[0]
    device = GpuDevice(CudaVmm(driver_for(REAL)))
    device.must_be(slot.device)
    seated = gpu_attach.attach(paths, who, slot, device, on_host)
    model = Net(torch.bfloat16)
    bound = gpu_loader.bind(model, gpu_seat.gpu_seat().weights, on_host)
    gpu_loader.assert_inside(model, seated.weights)

    def answer(verb: str) -> dict[str, object]:
        if verb == "follow":
            moved = gpu_loader.follow(model, seated.weights, on_host)
            return {"was": moved.was, "now": moved.now, "remapped": moved.remapped}
        if verb == "promote":
            seated.arena.promote(seated.arena.grant.epoch)
            return {"epoch": seated.arena.epoch}
        assert verb == "look", verb
        return {
            "version": seated.weights.grant.version, "views": bound.views,
            "values": {name: sorted(set(one.float().flatten().tolist())) for name, one in model.named_parameters()},
            "addresses": [one.data_ptr() - seated.weights.va for one in model.parameters()], "va": seated.weights.va,
        }  # fmt: skip

    print(json.dumps({"standby": True}), flush=True)
    for line in sys.stdin:
        try:
            said = answer(line.strip())
        except BelayerError as why:
            said = {"refused": f"{type(why).__name__}: {why.message}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
