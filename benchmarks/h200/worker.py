"""One engine of the check: it attaches to the owner, warms up on scratch, parks, and waits; told to, it takes the arena
and serves. Faults are injected into it by its own hand or from outside. Runs forked from the zygote, or fresh for
baselines."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from belayer.clock import Stopwatch, monotonic
from benchmarks.h200 import plan as plans
from benchmarks.h200.device import Gpu
from benchmarks.h200.model import Decoder, fill_random, parameters
from benchmarks.h200.plan import CHUNK, GRAIN, Plan, prompts
from benchmarks.h200.wire import Gone, Line
from gpuowner.backends.driver import Kernel
from gpuowner.backends.port import Access
from gpuowner.backends.probe import WarmProbe

SEED = 20
SPIN_NS = 3_000_000_000


def die_with_parent() -> None:
    """SIGKILL when the parent ends, also for a stopped process (prctl(2), PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))


class Worker:
    def __init__(self, line: Line, spec: str, folder: Path, plan: Plan) -> None:
        self._line, self._plan, self._folder, self._spec = line, plan, folder, spec
        self._at, self._pending = 0, [0] * plan.shape.batch
        self.start_ms: dict[str, float] = {}

    # --- start ---

    def begin(self, source: str = "owner") -> None:
        """``source``: weights of the owner, or "file": private memory filled from the saved arena (cold start)."""
        watch = Stopwatch()
        self._gpu = Gpu(self._spec)
        self._memory = self._gpu.memory
        self.start_ms["context"] = watch.lap()
        self._owned = source == "owner"
        weights = self._attach() if self._owned else self._from_file()
        self.start_ms["weights"] = watch.lap()
        self._kv_bytes = self._plan.arena_bytes
        self._kv = self._memory.reserve(self._kv_bytes)
        self._scratch()
        tensor = self._gpu.tensor(self._kv, self._kv_bytes)
        self._decoder = Decoder(self._plan.shape, weights, tensor, self._gpu.take)
        self._probe = WarmProbe(self._memory)
        self.start_ms["build"] = watch.lap()
        self._step = self._gpu.captured(self._decoder.step)
        self._feed([0] * self._plan.shape.batch)
        self.start_ms["capture"] = watch.lap()

    def _attach(self) -> torch.Tensor:
        self._owner = Line.connect(str(self._folder / "owner.sock"))
        grant = self._owner.ask(do="attach")
        fd = self._owner.one_fd()
        self._sums, self._nbytes = [tuple(row) for row in grant["sums"]], int(grant["nbytes"])
        self._weights = self._memory.reserve(self._nbytes)
        self._memory.map(self._weights, fd, self._nbytes, Access.READ)
        os.close(fd)
        return self._gpu.tensor(self._weights, self._nbytes)

    def _from_file(self) -> torch.Tensor:
        """What an engine does without an owner: read everything again into memory of its own."""
        path = self._folder / "weights.bin"
        self._nbytes = path.stat().st_size
        whole = torch.empty(self._nbytes, dtype=torch.uint8, device=self._gpu.device)
        with path.open("rb") as file:
            at = 0
            while data := bytearray(file.read(CHUNK)):
                whole[at : at + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
                at += len(data)
        return whole

    def _scratch(self) -> None:
        """The KV addresses lead to one small chunk: warm-up and capture never touch the arena."""
        chunk = min(CHUNK, GRAIN) if self._plan.fake else CHUNK
        handle = self._memory.private(chunk)
        self._memory.map_handle(self._kv, self._kv_bytes, handle, chunk, Access.READ_WRITE)
        self._memory.release(handle)

    def park(self) -> None:
        watch = Stopwatch()
        parked = self._gpu.pool.park()
        self.start_ms["park"] = watch.ms()
        said = {"ready": True, "ms": self.start_ms, "parked_bytes": parked, "capture_error": self._gpu.capture_error}
        self._line.send(said)

    # --- serving ---

    def _feed(self, tokens: list[int]) -> list[int]:
        decoder = self._decoder
        decoder.ids.copy_(torch.tensor(tokens))
        decoder.pos.fill_(self._at)
        self._step()
        self._at += 1
        found: list[int] = decoder.next.tolist()
        return found

    def _refill(self, history: list[list[int]]) -> None:
        self._at = 0
        for tokens in history:
            self._pending = self._feed(tokens)

    def decode(self, count: int) -> None:
        for _ in range(count):
            self._line.send({"token": self._pending})
            self._pending = self._feed(self._pending)
        self._line.send({"done": True})

    def take(self, epoch: int, history: list[list[int]], count: int) -> None:
        """From standby to serving; the order is that of a handover, and the fence came before it."""
        ms, watch = {}, Stopwatch()
        if self._owned:
            ms["probe"] = self._probe.probe()
            watch.lap()
            self._check_sample()
            ms["digest_sampled"] = watch.lap()
        self._map_arena(epoch)
        ms["lease_and_map"] = watch.lap()
        self._memory.zero(self._kv, self._kv_bytes)
        ms["zero"] = watch.lap()
        if self._gpu.pool.parked:
            self._gpu.pool.unpark()
        ms["unpark"] = watch.lap()
        self._refill(history)
        ms["refill"] = watch.lap()
        self._line.send({"serving": True, "ms": ms})
        self.decode(count)

    def _map_arena(self, epoch: int) -> None:
        """The arena in the place of the scratch. A cold start has no owner, and an arena of its own."""
        if not self._owned:
            handle = self._memory.private(self._kv_bytes)
            self._memory.unmap(self._kv)
            self._memory.map_handle(self._kv, self._kv_bytes, handle, self._kv_bytes, Access.READ_WRITE)
            self._memory.release(handle)
            return
        self._owner.ask(do="lease", epoch=epoch, who=f"pid {os.getpid()}")
        fd = self._owner.one_fd()
        self._memory.unmap(self._kv)
        self._memory.map(self._kv, fd, self._kv_bytes, Access.READ_WRITE)
        os.close(fd)

    def _check_sample(self) -> None:
        """Two chunks on the path; everything is verified right after it (``verify``)."""
        for at in {0, len(self._sums) // 2}:
            start = at * CHUNK
            found = self._memory.digest(self._weights + start, min(CHUNK, self._nbytes - start))
            if tuple(found[0]) != self._sums[at]:
                raise RuntimeError(f"weights: chunk {at} differs from its sum")

    def verify(self) -> None:
        watch = Stopwatch()
        found = [tuple(row) for row in self._memory.digest(self._weights, self._nbytes)]
        self._line.send({"equal": found == self._sums, "ms": watch.ms(), "bytes": self._nbytes})

    def measure(self, seconds: float) -> None:
        """Decode the same positions over and over; steps per second and the slow ones."""
        steps, end = [], monotonic() + seconds
        while monotonic() < end:
            watch = Stopwatch()
            self._at = self._plan.prompt
            self._feed(self._pending)
            steps.append(watch.ms())
        steps.sort()
        self._line.send({"steps": len(steps), "p50": steps[len(steps) // 2], "p99": steps[int(len(steps) * 0.99)]})

    # --- faults ---

    def fault(self, kind: str) -> None:
        """Proves first that it is about to happen; each of them ends this process (or makes it worth ending)."""
        hole = self._memory.reserve(GRAIN)
        self._line.send({"faulting": kind})
        if kind == "assert":
            bad = torch.full((1,), self._plan.shape.vocab + 5, dtype=torch.int64, device=self._gpu.device)
            self._decoder.w["embed"].index_select(0, bad)
        elif kind == "illegal":
            self._memory.launch(Kernel.POKE, 1, 1, hole + 64, 1)
        elif kind == "readonly":
            self._memory.launch(Kernel.POKE, 1, 1, self._weights + 64, 1)
        elif kind == "busy":
            self._memory.launch(Kernel.SPIN, 1, 1, SPIN_NS)
        elif kind == "oom":
            self._memory.private(1 << 50)
        self._gpu.sync()
        self._memory.synchronize()

    def serve(self) -> None:
        verbs: dict[str, Callable[..., None]] = {
            "take": self.take, "decode": self.decode, "reset": self._reset,
            "verify": self.verify, "measure": self.measure, "fault": self.fault,
        }  # fmt: skip
        while True:
            message = self._line.receive()
            assert message is not None
            verb = message.pop("do")
            if verb == "leave":
                return
            verbs[verb](**message)

    def _reset(self, count: int) -> None:
        """The stream from its prompt again."""
        self._refill(prompts(self._plan))
        self.decode(count)


def load(line: Line, spec: str, folder: Path, plan: Plan, torn: bool) -> None:
    """Write the weights into the owner's memory and seal them; ``torn``: begin an update and wait inside it for
    death."""
    gpu = Gpu(spec)
    owner = Line.connect(str(folder / "owner.sock"))
    grant = owner.ask(do="begin_update" if torn else "build")
    fd, nbytes = owner.one_fd(), int(grant["nbytes"])
    va = gpu.memory.reserve(nbytes)
    gpu.memory.map(va, fd, nbytes, Access.READ_WRITE)
    arena = gpu.tensor(va, nbytes)
    if torn:
        arena[: nbytes // 2].fill_(0x55)
        gpu.sync()
        line.send({"torn_at": nbytes // 2})
        signal.pause()
    watch = Stopwatch()
    gpu.memory.zero(va, nbytes)
    gpu.memory.digest(va, GRAIN)  # the first launch loads the kernels
    fill_random(parameters(arena, plan.shape), SEED, gpu.device)
    gpu.sync()
    filled = watch.lap()
    sums = gpu.memory.digest(va, nbytes)
    summed = watch.lap()
    with (folder / "weights.bin").open("wb") as file:
        for at in range(0, nbytes, CHUNK):
            file.write(arena[at : at + CHUNK].cpu().numpy().tobytes())
    saved = watch.lap()
    gpu.memory.protect(va, Access.READ)
    owner.ask(do="seal", sums=sums)
    line.send({"sealed": nbytes, "fill_ms": filled, "digest_ms": summed, "save_ms": saved})


def verify_for_owner(line: Line, spec: str, folder: Path) -> None:
    """After an adoption: read everything, report the sums; the owner compares and decides."""
    gpu = Gpu(spec)
    owner = Line.connect(str(folder / "owner.sock"))
    grant = owner.ask(do="attach_to_verify")
    fd, nbytes = owner.one_fd(), int(grant["nbytes"])
    va = gpu.memory.reserve(nbytes)
    gpu.memory.map(va, fd, nbytes, Access.READ)
    watch = Stopwatch()
    sums = gpu.memory.digest(va, nbytes)
    owner.ask(do="verify", sums=sums)
    line.send({"verified": nbytes, "ms": watch.ms()})


def run(role: str, line: Line, spec: str, folder: Path, plan: Plan) -> None:
    """``role``: standby, loader, torn, verifier; or cold and attach, which serve at once."""
    if role in ("loader", "torn"):
        load(line, spec, folder, plan, torn=role == "torn")
    elif role == "verifier":
        verify_for_owner(line, spec, folder)
    else:
        worker = Worker(line, spec, folder, plan)
        worker.begin("file" if role == "cold" else "owner")
        if role == "standby":
            worker.park()
        else:
            line.send({"ready": True, "ms": worker.start_ms})
        worker.serve()


def guarded(role: str, line: Line, spec: str, folder: Path, plan: Plan) -> int:
    """Exit code: 0; 3 when the check has gone; 1 with the reason on stderr, which is the worker's log."""
    try:
        run(role, line, spec, folder, plan)
    except Gone:
        return 3
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="one engine of the H200 check, as a process of its own")
    for name in ("role", "channel", "spec", "folder", "plan"):
        parser.add_argument(name)
    args = parser.parse_args()
    die_with_parent()
    line = Line(socket.socket(fileno=int(args.channel)))
    os._exit(guarded(args.role, line, args.spec, Path(args.folder), plans.named(args.plan)))


if __name__ == "__main__":
    main()
