"""A worker that only holds a KV arena on a GPU. ``python -m tests.support.gpu_worker SOCKET SPEC SLOT NBYTES WHO``; a
word per line in, a line out."""

from __future__ import annotations

import sys
from pathlib import Path

from belayer.messages.owner import Role
from gpuowner.attach import OwnerClient
from gpuowner.attach_gpu import GpuArena
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import driver_for
from tests.support.memory import get, put


def main() -> None:
    path, spec, slot, nbytes, who = sys.argv[1:]
    memory = CudaVmm(driver_for(spec))
    client = OwnerClient(Path(path), Role.WORKER, who)
    arena = GpuArena(client, memory, slot, int(nbytes))
    client.keep(lambda said: print(said, file=sys.stderr, flush=True))
    print("standby", flush=True)
    for line in sys.stdin:
        verb, _, rest = line.strip().partition(" ")
        if verb == "promote":
            before = arena.va
            arena.promote(int(rest))
            print("moved" if arena.va != before else "promoted", flush=True)
        elif verb == "write":
            put(memory, arena.va, rest.encode())
            print("written", flush=True)
        else:
            print(get(memory, arena.va, 16).rstrip(b"\0").decode(), flush=True)


if __name__ == "__main__":
    main()
