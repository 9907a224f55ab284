"""Bytes of the host into GPU memory, by a child that ends: the owner loads no driver for it.

``python -m gpuowner.backends.upload CHANNEL SPEC DEVICE FD NBYTES STAGING HALF`` imports the memory FD, zeroes it, and
copies what each packet on CHANNEL names from the memfd STAGING, whose two halves of HALF bytes are filled and copied in
turn. At the end it makes its mapping read-only and answers with the sums of all of it, taken on the GPU: the owner
compares them with those that NumPy took of what it had read from the files."""

from __future__ import annotations

import json
import os
import socket
import sys
from types import TracebackType
from typing import Any, NoReturn

from belayer.errors import HostUnfit
from gpuowner.backends import oneshot
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import driver_for
from gpuowner.backends.port import Access
from gpuowner.backends.sums import ChunkSum
from gpuowner.vmem import MAP_NORESERVE, MAP_SHARED, PROT_READ, Mapping

_MODULE = "gpuowner.backends.upload"
_PACKET = 1 << 18  # bytes: the sums of 100 GB are 64 KB of text
_BASE_S, _BYTES_PER_S = 60.0, 1e9  # slower than 1 GB/s to a GPU is a host in trouble


class Upload:
    """The owner's end. A half may be written again once ``free`` has returned for it. Every method raises HostUnfit or
    Refused with the child's own words; what is in the memory then is not to be used."""

    def __init__(self, spec: str, device: int, fd: int, nbytes: int, staging_fd: int, half: int) -> None:
        """``nbytes``: of the memory ``fd``, whole granules."""
        self._base_s, self._copying = _BASE_S + nbytes / _BYTES_PER_S, {0: 0, 1: 0}
        self._half = half
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [spec, str(device), str(fd), str(nbytes), str(staging_fd), str(half)]
            self._child = oneshot.start(_MODULE, theirs.fileno(), arguments, (fd, staging_fd))
        self._sock.settimeout(self._base_s)

    def free(self, half: int) -> None:
        """Wait until what was put into ``half`` is in GPU memory."""
        while self._copying[half]:
            told = self._heard()
            self._copying[told["half"]] -= 1

    def put(self, half: int, at: int, nbytes: int) -> None:
        """The first ``nbytes`` of ``half`` belong at ``at`` of the memory."""
        self._copying[half] += 1
        self._tell({"half": half, "at": at, "nbytes": nbytes})

    def finish(self) -> tuple[ChunkSum, ...]:
        """Sums of the whole memory, after the child has ended."""
        for half in self._copying:
            self.free(half)
        self._tell({"end": True})
        found = tuple(ChunkSum(*row) for row in self._heard()["sums"])
        if self._child.wait(self._base_s):
            raise oneshot.said(self._child)
        return found

    def _tell(self, words: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(words).encode())
        except ConnectionError as why:
            raise oneshot.said(self._child) from why

    def _heard(self) -> dict[str, Any]:
        try:
            data = self._sock.recv(_PACKET)
        except TimeoutError as why:
            raise HostUnfit(f"the child that fills GPU memory did not answer in {self._base_s:.0f} s") from why
        except ConnectionError:
            data = b""
        if not data:
            raise oneshot.said(self._child)
        told: dict[str, Any] = json.loads(data)
        return told

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()
        self._child.kill()  # has ended by now, or is of no use any more
        self._child.wait()
        assert self._child.stderr is not None
        self._child.stderr.close()


def _run(channel: int, spec: str, device: int, fd: int, nbytes: int, staging_fd: int, half: int) -> None:
    staging = Mapping(staging_fd, 2 * half, PROT_READ, MAP_SHARED | MAP_NORESERVE)
    memory = CudaVmm(driver_for(spec), device)
    va = memory.reserve(nbytes)
    memory.map(va, fd, nbytes, Access.READ_WRITE)
    os.close(fd)
    memory.zero(va, nbytes)
    with socket.socket(fileno=channel) as line:
        while True:
            data = line.recv(_PACKET)
            if not data:
                return  # the owner gave up, or has died: nothing of this is anybody's
            told = json.loads(data)
            if "end" in told:
                break
            source = staging.address + told["half"] * half
            memory.copy_in(va + told["at"], source, told["nbytes"])
            memory.synchronize()  # the host's bytes may be written over from here on
            line.send(json.dumps({"half": told["half"]}).encode())
        memory.protect(va, Access.READ)
        line.send(json.dumps({"sums": memory.digest(va, nbytes)}).encode())


def main() -> NoReturn:
    channel, spec, device, fd, nbytes, staging_fd, half = sys.argv[1:]
    oneshot.guarded(lambda: _run(int(channel), spec, int(device), int(fd), int(nbytes), int(staging_fd), int(half)))


if __name__ == "__main__":
    main()
