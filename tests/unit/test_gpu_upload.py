"""Bytes that the owner has hashed in a memfd are, after an upload, the same bytes in GPU memory, and the child is
gone."""

from __future__ import annotations

import os

import numpy as np
import pytest

from belayer.errors import HostUnfit, Refused
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import driver_for
from gpuowner.backends.fake_vmm import used_bytes
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.port import Access
from gpuowner.backends.sums import CHUNK
from gpuowner.backends.upload import upload
from tests.support import memory as support

NAME = f"upload{os.getpid()}"
SPEC = os.environ.get("BELAYER_TEST_DRIVER", f"fake:{NAME}:{256 << 20}")


@pytest.mark.parametrize("nbytes", [5, 4 << 20, CHUNK + 4099])
def test_what_is_uploaded_over_cuda_is_what_was_sealed(nbytes: int) -> None:
    source = Memfd("weights", nbytes)
    data = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    mapping = source.map_writable()
    mapping.buffer()[:] = data
    source.seal_writes()
    reader = source.reader_fd()
    made = upload(SPEC, 0, reader, nbytes)
    memory = CudaVmm(driver_for(SPEC))
    va = memory.reserve(made.memory.nbytes)
    memory.map(va, made.memory.fd, made.memory.nbytes, Access.READ)
    assert support.get(memory, va, nbytes) == data
    assert support.get(memory, va + made.memory.nbytes - 8, 8) == (
        bytes(8) if made.memory.nbytes > nbytes else data[-8:]
    )
    assert memory.digest(va, made.memory.nbytes) == made.sums
    memory.unmap(va)
    memory.free_va(va)
    made.memory.close()
    os.close(reader)
    mapping.close()
    source.close()


def test_an_upload_that_fails_leaves_nothing_on_the_device() -> None:
    name = f"small{os.getpid()}"
    spec = f"fake:{name}:{4 << 20}"
    source = Memfd("weights", 8 << 20)
    reader = source.reader_fd()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match=r"allocating child, exit 1.*OUT_OF_MEMORY"):
        upload(spec, 0, reader, 8 << 20)
    with pytest.raises(HostUnfit, match=r"exit 2.*no driver is named"):
        upload("rocm", 0, reader, 8 << 20)
    assert len(os.listdir("/proc/self/fd")) == before
    assert used_bytes(name) == 0
    os.close(reader)
    source.close()
