"""The owner of the check: one allocation of weights and one KV arena, as descriptors; no GPU context, no torch.

The states are gpuowner.core's, the second copies lie in gpuowner's holder, and memory comes from gpuowner's backend.
What gpuowner itself does not do yet on a GPU is here: it cannot read GPU memory, so a reader computes the sums and the
owner compares and decides. After its own death it adopts what the holder has, and grants nothing until a reader has
verified every sum."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import socket
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from belayer import procs
from belayer.errors import BelayerError
from benchmarks.h200.wire import Gone, Line
from gpuowner import core
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import driver_for
from gpuowner.service import peer_pidfd
from gpuowner.store import HolderStore

MODEL, SLOT = "weights", "slot0"


class Owner:
    """``folder``: socket, holder's socket, and the state that the next life reads."""

    def __init__(self, folder: Path, spec: str, sizes: tuple[int, int]) -> None:
        self._state = folder / "owner.json"
        self._store = HolderStore(folder / "holder.sock")
        self.memory = CudaVmm(driver_for(spec))
        self._fds = self._store.all()
        self._peers: dict[int, tuple[Line, int]] = {}  # number -> connection, pidfd
        self._count, self._holder = 0, -1
        if self._fds and self._state.exists():
            self._adopt(json.loads(self._state.read_text()))
        else:
            self._begin(sizes)

    def _begin(self, sizes: tuple[int, int]) -> None:
        self.sums: list[list[int]] = []
        self.generation, self.verified = 1, True
        for name, nbytes in zip((MODEL, SLOT), sizes, strict=True):
            made = self.memory.create(name, nbytes)
            self._fds[name] = made.fd
            self._store.put(name, made.fd)
        self.weights = core.Weights(MODEL, sizes[0])
        self.arena = core.Arena(SLOT, sizes[1])
        self._save()

    def _adopt(self, saved: dict[str, Any]) -> None:
        self.generation = saved["generation"] + 1
        self.sums, self.verified = saved["sums"], False
        weights, arena = dict(saved["weights"]), dict(saved["arena"])
        weights["state"], arena["state"] = core.WeightsState(weights["state"]), core.ArenaState(arena["state"])
        adopted = core.WeightsAdopted(owner=self.generation, intact=True)  # believed, and not granted, until verified
        self.weights = core.weights_step(core.Weights(**weights), adopted)
        alive = procs.start_time(saved["holder"][0]) == saved["holder"][1] != 0
        if alive:
            self._holder = procs.open_pidfd(*saved["holder"])
        event = core.ArenaAdopted(owner=self.generation, holder_alive=alive)
        self.arena = core.arena_step(core.Arena(**arena), event)
        self._save()

    def _save(self) -> None:
        """Before anything is told: the next life must not know less than a worker does."""
        holder = self._holder_identity()
        state = {
            "generation": self.generation, "sums": self.sums, "holder": holder,
            "weights": asdict(replace(self.weights, peer=None)), "arena": asdict(replace(self.arena, peer=None)),
        }  # fmt: skip
        beside = self._state.with_suffix(".new")
        beside.write_text(json.dumps(state))
        beside.replace(self._state)

    def _holder_identity(self) -> tuple[int, int]:
        if self._holder < 0 or procs.is_dead(self._holder):
            return 0, 0
        rows = Path(f"/proc/self/fdinfo/{self._holder}").read_text().splitlines()
        pid = next(int(row.split()[1]) for row in rows if row.startswith("Pid:"))
        return pid, procs.start_time(pid)

    # --- connections ---

    def serve(self, path: Path, lifeline: int) -> None:
        """``lifeline``: a pipe whose other end the check holds; when the check is gone, memory is given back."""
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        listener.bind(str(path))
        listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._selector.register(lifeline, selectors.EVENT_READ, self._end)
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map():
                    key.data()

    def _end(self) -> None:
        """The check was killed: give memory and files back. Workers that are still dying may write to their log."""
        self._store.end()
        shutil.rmtree(self._state.parent, ignore_errors=True)
        raise SystemExit(0)

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._count += 1
        number = self._count
        self._peers[number] = (Line(sock), peer_pidfd(sock, pid))
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._readable(number))

    def _readable(self, number: int) -> None:
        line, _ = self._peers[number]
        try:
            message = line.receive()
            assert message is not None
            answer, fds = self._answer(number, message)
            line.send(answer, fds)
            for fd in fds:
                os.close(fd)
        except Gone:
            self._drop(number)

    def _drop(self, number: int) -> None:
        line, pidfd = self._peers.pop(number)
        self._selector.unregister(line.sock)
        line.close()
        os.close(pidfd)
        self.arena = core.arena_step(self.arena, core.HolderDied(peer=number))
        self.weights = core.weights_step(self.weights, core.WriterDied(peer=number))
        self._save()

    def _answer(self, number: int, message: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
        verb = str(message.pop("do"))
        try:
            answer, fds = getattr(self, f"on_{verb}")(number, **message)
            self._save()
        except BelayerError as why:
            return {"declined": f"{why.code}: {why}"}, ()
        return answer | {"generation": self.generation}, fds

    # --- weights ---

    def on_build(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        return {"nbytes": self.weights.nbytes}, (os.dup(self._fds[MODEL]),)

    def on_seal(self, number: int, sums: list[list[int]]) -> tuple[dict[str, Any], tuple[int, ...]]:
        self.weights, self.sums = core.weights_step(self.weights, core.Built(version=1)), sums
        return {"version": 1}, ()

    def on_attach(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        core.readable(self.weights)
        if not self.verified:
            return {"declined": "weights_torn: adopted, and not verified yet: attach to verify first"}, ()
        return self._grant()

    def _grant(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        said = {"nbytes": self.weights.nbytes, "version": self.weights.version, "sums": self.sums}
        return said, (os.dup(self._fds[MODEL]),)

    def on_attach_to_verify(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        return self._grant()

    def on_verify(self, number: int, sums: list[list[int]]) -> tuple[dict[str, Any], tuple[int, ...]]:
        self.verified = sums == self.sums
        if not self.verified:
            return {"declined": "weights_broken: the sums differ from those that were sealed"}, ()
        return {"verified": True}, ()

    def on_begin_update(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        stamp = core.Stamp(self.generation, self.weights.version)
        event = core.UpdateBegun(stamp=stamp, peer=number, in_place=True, rewrite=True)
        self.weights = core.weights_step(self.weights, event)
        return {"nbytes": self.weights.nbytes, "version": self.weights.version + 1}, (os.dup(self._fds[MODEL]),)

    def on_commit(self, number: int, sums: list[list[int]]) -> tuple[dict[str, Any], tuple[int, ...]]:
        version = self.weights.version + 1
        stamp = core.Stamp(self.generation, version)
        self.weights = core.weights_step(self.weights, core.CommitAsked(stamp=stamp, peer=number))
        self.weights, self.sums = core.weights_step(self.weights, core.Committed(version=version)), sums
        return {"version": version}, ()

    # --- arena ---

    def on_lease(self, number: int, epoch: int, who: str) -> tuple[dict[str, Any], tuple[int, ...]]:
        event = core.Acquire(stamp=core.Stamp(self.generation, epoch), peer=number, who=who)
        self.arena = core.arena_step(self.arena, event)
        self._holder = os.dup(self._peers[number][1])
        return {"nbytes": self.arena.nbytes}, (os.dup(self._fds[SLOT]),)

    def on_fence(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Both halves: refused while the holder's own pidfd is alive."""
        stamp = core.Stamp(self.generation, self.arena.epoch)
        if self.arena.state is core.ArenaState.LEASED:
            self.arena = core.arena_step(self.arena, core.FenceBegun(stamp=stamp))
        if self.arena.state is core.ArenaState.FENCING:
            alive = self._holder >= 0 and not procs.is_dead(self._holder)
            self.arena = core.arena_step(self.arena, core.FenceEnded(stamp=stamp, holder_alive=alive))
        return self.on_status(number)

    def on_status(self, number: int) -> tuple[dict[str, Any], tuple[int, ...]]:
        said = {
            "pid": os.getpid(), "weights": self.weights.state, "version": self.weights.version,
            "verified": self.verified, "arena": self.arena.state, "epoch": self.arena.epoch,
            "driver_loaded": "libcuda" in Path("/proc/self/maps").read_text(),
        }  # fmt: skip
        return said, ()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("spec")
    parser.add_argument("sizes", type=int, nargs=2)
    parser.add_argument("lifeline", type=int)
    args = parser.parse_args()
    Owner(args.folder, args.spec, tuple(args.sizes)).serve(args.folder / "owner.sock", args.lifeline)


if __name__ == "__main__":
    main()
