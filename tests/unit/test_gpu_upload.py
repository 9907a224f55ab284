"""Bytes of the host are, after an upload, the same bytes in GPU memory, and the child is gone; and a model comes there
in windows as it comes into a memfd at once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from belayer.errors import HostUnfit, Refused, WeightsBroken
from gpuowner import making
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.device_memory import DeviceMemory
from gpuowner.backends.driver import driver_for
from gpuowner.backends.fake_vmm import used_bytes
from gpuowner.backends.port import Access
from gpuowner.backends.sums import CHUNK, ChunkSum, chunk_sums, packed, unpacked
from gpuowner.copying import Job, Sink
from gpuowner.device_loader import Window, load_to_device, windows
from gpuowner.loader import load
from gpuowner.version import Version
from tests.support import memory as support
from tests.support import versions as v
from tests.support.uploaded import upload

NAME = f"upload{os.getpid()}"
SPEC = os.environ.get("BELAYER_TEST_DRIVER", f"fake:{NAME}:{256 << 20}")
HALF = 1 << 20


def quiet(done: int, nbytes: int, rate: float) -> None:
    pass


def content(made: DeviceMemory, nbytes: int) -> bytes:
    memory = CudaVmm(driver_for(SPEC))
    va = memory.reserve(made.nbytes)
    memory.map(va, made.fd, made.nbytes, Access.READ)
    found = support.get(memory, va, nbytes)
    memory.unmap(va)
    memory.free_va(va)
    return found


@pytest.mark.parametrize(("nbytes", "half"), [(5, 0), (3 * HALF + 77, HALF), (CHUNK + 4099, 0)])
def test_what_is_uploaded_over_cuda_is_what_was_on_the_host(nbytes: int, half: int) -> None:
    data = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8).tobytes()
    made = upload(SPEC, data, half)
    padded = data + bytes(made.memory.nbytes - nbytes)
    assert content(made.memory, made.memory.nbytes) == padded, "zeroes behind it"
    assert made.sums == made.memory.sums() == chunk_sums(padded)
    assert made.memory.difference(packed(made.sums)) is None
    other = (ChunkSum(made.sums[0].plain ^ 1, made.sums[0].weighted), *made.sums[1:])
    assert made.memory.difference(packed(other)) == 0
    made.memory.close()


def test_an_upload_that_fails_leaves_nothing_on_the_device() -> None:
    name = f"small{os.getpid()}"
    spec = f"fake:{name}:{4 << 20}"
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Refused, match=r"allocating child, exit 1.*OUT_OF_MEMORY"):
        upload(spec, bytes(8 << 20))
    with pytest.raises(HostUnfit, match=r"exit 2.*no driver is named"):
        upload("rocm", bytes(8))
    made = DeviceMemory.create(spec, 0, 2 << 20)
    foreign = DeviceMemory(2 << 20, os.open("/dev/null", os.O_RDONLY), spec)
    with pytest.raises(Refused, match=r"verifying child, exit 1.*INVALID_VALUE"):
        foreign.sums()
    adopted = Version(memory=foreign, name="w", layout=(), chunks=packed((ChunkSum(0, 0),)), digest="")
    intact, why = making.intact(adopted)
    assert not intact
    assert why.startswith("they are not there any more")
    foreign.close()
    hog = CudaVmm(driver_for(spec))
    handle = hog.private(2 << 20)
    with pytest.raises(HostUnfit, match=r"verifying child, exit 2.*no room on the device to read"):
        made.sums()
    hog.release(handle)
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert used_bytes(name) == 0


def test_digests_of_another_kind_are_no_sums() -> None:
    sums = (ChunkSum(1, 2), ChunkSum((1 << 64) - 1, 0))
    assert unpacked(packed(sums)) == sums
    with pytest.raises(WeightsBroken, match="not sums of GPU memory"):
        unpacked((bytes(32),))


def test_a_model_in_windows_lies_as_it_lies_in_a_memfd(tmp_path: Path) -> None:
    folder = v.make_model(tmp_path / "model")
    for dtype in ("float32", "auto"):
        host = load("m", folder, dtype, quiet)
        there = load_to_device("m", folder, dtype, quiet, driver=SPEC, least=CHUNK)
        assert there.layout == host.layout
        raw = bytes(host.mapping.buffer()) if host.mapping else b""
        assert len(raw) > CHUNK, "more than one window"
        assert content(there.memory, len(raw)) == raw  # type: ignore[arg-type]
        assert there.memory.difference(there.chunks) is None
        assert (there.mapping, len(there.chunks)) == (None, 2)
        host.drop()
        there.drop()


def test_a_broken_folder_costs_no_device_memory(tmp_path: Path) -> None:
    name = f"broken{os.getpid()}"
    folder = v.make_model(tmp_path / "model")
    file = folder / "model.safetensors"
    before = len(os.listdir("/proc/self/fd"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(WeightsBroken, match=r"model\.safetensors"):
        load_to_device("m", folder, "float32", quiet, driver=f"fake:{name}:{256 << 20}")
    assert (len(os.listdir("/proc/self/fd")), used_bytes(name)) == (before, 0)


def job(start: int, end: int) -> Job:
    def run(sink: Sink) -> None:
        raise AssertionError("nothing is run here")

    return Job(start, end, end - start, run)


def test_windows_are_cut_where_no_job_crosses() -> None:
    small = [job(at, at + (16 << 20)) for at in range(0, 6 * CHUNK, 16 << 20)]
    assert [(one.start, one.end) for one in windows(small, 6 * CHUNK + 5, 2 * CHUNK)] == [
        (0, 2 * CHUNK), (2 * CHUNK, 4 * CHUNK), (4 * CHUNK, 6 * CHUNK + 5),
    ]  # fmt: skip
    strided = job(CHUNK // 2, 3 * CHUNK + 8)  # of a tensor that is filled with gaps
    cut = windows([*small, strided], 6 * CHUNK, CHUNK)
    assert [(one.start, one.end) for one in cut] == [
        (0, 4 * CHUNK), (4 * CHUNK, 5 * CHUNK), (5 * CHUNK, 6 * CHUNK),
    ]  # fmt: skip
    assert sorted(id(one) for window in cut for one in window.jobs) == sorted(map(id, [*small, strided]))
    for window in cut:
        assert all(window.start <= one.start and one.end <= window.end for one in window.jobs)
    assert windows([], 5) == [Window(0, 5, ())]
    assert Window(0, 5, ()).room() == 8
