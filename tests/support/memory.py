"""Memory backends under test, by a name that a child process can rebuild them from; and bytes in and out of each.

Run as ``python -m tests.support.memory NAME VERB FD NBYTES``: a process that does one deed to memory which it was
handed, since some deeds end their process and a forked child may not use a GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import DriverError, Kernel, driver_for
from gpuowner.backends.memfd_backend import MemfdBackend
from gpuowner.backends.port import Access, Backend

TREE = Path(__file__).resolve().parents[2]
FAULTED = 70  # exit code: the driver reported the fault that a CPU would have answered with SIGSEGV


def backend(name: str) -> Backend:
    """``memfd``, or the spec of a driver."""
    return MemfdBackend() if name == "memfd" else CudaVmm(driver_for(name))


def put(memory: Backend, va: int, data: bytes) -> None:
    if isinstance(memory, CudaVmm):
        source = ctypes.create_string_buffer(data, len(data))
        memory.copy_in(va, ctypes.addressof(source), len(data))
    else:
        ctypes.memmove(va, data, len(data))


def get(memory: Backend, va: int, nbytes: int) -> bytes:
    if not isinstance(memory, CudaVmm):
        return ctypes.string_at(va, nbytes)
    into = ctypes.create_string_buffer(nbytes)
    memory.copy_out(ctypes.addressof(into), va, nbytes)
    return into.raw


def poke(memory: Backend, va: int) -> None:
    """A stray store, as code of a worker would do it."""
    if isinstance(memory, CudaVmm):
        memory.launch(Kernel.POKE, 1, 1, va, 0xBAD)
        memory.synchronize()
    else:
        ctypes.c_uint64.from_address(va).value = 0xBAD


def child(name: str, verb: str, fd: int = -1, nbytes: int = 0) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(TREE), "PYTHONFAULTHANDLER": ""}
    keep = () if fd < 0 else (fd,)
    arguments = [sys.executable, "-m", "tests.support.memory", name, verb, str(fd), str(nbytes)]
    return subprocess.Popen(arguments, pass_fds=keep, env=env, stdout=subprocess.PIPE)


def deed(name: str, verb: str, fd: int, nbytes: int) -> int:
    """Exit status of a child: 0, FAULTED, or minus the signal that ended it."""
    process = child(name, verb, fd, nbytes)
    process.communicate(timeout=300)
    return process.returncode


def _main(name: str, verb: str, fd: int, nbytes: int) -> None:
    memory = backend(name)
    if verb == "vault":
        allocation = memory.create("vault", nbytes)
        os.close(memory.dup_fd(allocation, Access.READ))
        loaded = [row.split()[-1] for row in Path("/proc/self/maps").read_text().splitlines() if "libcuda" in row]
        assert not loaded, f"the vault has loaded {loaded[0]}"
        return
    va = memory.reserve(nbytes)
    memory.map(va, fd, nbytes, Access.READ_WRITE if verb in ("write", "write-and-wait") else Access(verb.split("-")[1]))
    if verb.startswith("expect"):
        sys.exit(0 if get(memory, va, 10) == b"main wrote" else 9)
    if verb.startswith("write"):
        put(memory, va, b"written by a child")
        memory.digest(va, nbytes)  # waits for the write
        if verb == "write-and-wait":
            print("written", flush=True)
            signal.pause()
    else:
        poke(memory, va + 64)


def main() -> None:
    name, verb, fd, nbytes = sys.argv[1:]
    try:
        _main(name, verb, int(fd), int(nbytes))
    except DriverError as why:
        os._exit(FAULTED if 700 <= why.number <= 719 else 1)  # cuda.h: the errors of a kernel


if __name__ == "__main__":
    main()
