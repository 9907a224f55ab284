"""The code that calls the CUDA driver, without a GPU: the same backend contract over a stand-in for libcuda.so.1 behind
the real cuda.bindings; the kernels as the assembler and the NumPy twin see them; and the refusals of a host without."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer.errors import HostUnfit
from gpuowner.backends import cuda_driver, oneshot
from gpuowner.backends.driver import Kernel, driver_for
from gpuowner.backends.port import Access
from tests.contract.test_memory_backend import no_gpu
from tests.support.standin import build

TREE = Path(__file__).resolve().parents[2]
BACKENDS = TREE / "gpuowner/backends"


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in, to be put in LD_LIBRARY_PATH."""
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler: the stand-in for libcuda cannot be built")
@pytest.mark.skipif(not no_gpu(), reason="a real driver is here: the contract itself runs on it")
def test_the_backend_contract_through_the_real_bindings(standin: Path) -> None:
    chosen = ["-k", "over_cuda", "tests/contract/test_memory_backend.py", "tests/unit/test_gpu_pool.py"]
    chosen += ["tests/unit/test_gpu_upload.py", "tests/conformance/test_rollout_gpu.py"]
    env = {**os.environ, "LD_LIBRARY_PATH": str(standin), "BELAYER_TEST_DRIVER": "cuda"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        env=env, cwd=TREE, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed, run.stdout
    assert int(passed[1]) >= 20, run.stdout
    assert "skipped" not in run.stdout, run.stdout


def test_without_a_driver_every_entry_refuses_in_a_sentence() -> None:
    reason = no_gpu()
    if not reason:
        pytest.skip("a driver is here: nothing to refuse")
    assert "libcuda.so.1" in reason
    driver = driver_for("cuda")
    entries: list[Callable[[], object]] = [
        driver.init, driver.count, lambda: driver.uuid(0), lambda: driver.granularity(0), lambda: driver.create(0, 1),
        lambda: driver.release(1), lambda: driver.export_fd(1), lambda: driver.import_fd(1),
        lambda: driver.reserve(1, 1),
        lambda: driver.free_va(1, 1), lambda: driver.map(1, 1, 0, 1), lambda: driver.unmap(1, 1),
        lambda: driver.set_access(1, 1, 0, Access.READ), lambda: driver.enter(0), lambda: driver.has_context(0),
        lambda: driver.fill(1, 0, 1), lambda: driver.copy_out(1, 1, 1), lambda: driver.copy_in(1, 1, 1),
        lambda: driver.copy(1, 1, 1),
        lambda: driver.launch(Kernel.SPIN, 1, 1, 1), driver.synchronize,
    ]  # fmt: skip
    for entry in entries:
        with pytest.raises(HostUnfit, match=r"needs the NVIDIA driver.*nothing was started.*memfd"):
            entry()
    with pytest.raises(HostUnfit, match=r"allocating child, exit 2.*needs the NVIDIA driver"):
        oneshot.make("cuda", 0, ())


@pytest.mark.parametrize("spec", ["", "rocm", "fake", "fake:name", "fake:name:many"])
def test_an_unknown_driver_is_named(spec: str) -> None:
    with pytest.raises(HostUnfit, match="no driver is named"):
        driver_for(spec)


def test_every_name_that_the_driver_port_calls_exists_in_the_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    tree = ast.parse(Path(cuda_driver.__file__).read_text())
    calls = {
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "_call"
        and isinstance(node.args[0], ast.Constant)
    }
    words = set(re.findall(r"\bCU_[A-Z_0-9]+", Path(cuda_driver.__file__).read_text()))
    assert len(calls) > 15
    assert [name for name in sorted(calls) if not hasattr(driver, name)] == []
    enums = (
        driver.CUmemAllocationHandleType, driver.CUmemAllocationType, driver.CUmemLocationType,
        driver.CUmemAccess_flags, driver.CUmemAllocationGranularity_flags,
    )  # fmt: skip
    assert [name for name in sorted(words) if not any(hasattr(enum, name) for enum in enums)] == []


def test_the_ptx_holds_every_kernel_and_assembles(tmp_path: Path) -> None:
    text = (BACKENDS / "kernels.ptx").read_text()
    assert set(re.findall(r"\.visible \.entry (\w+)\(", text)) == {kernel.value for kernel in Kernel}
    found = list(Path(sys.prefix).glob("lib/python*/site-packages/triton/backends/nvidia/bin/ptxas"))
    if not found:
        pytest.skip("no ptxas (triton brings one)")
    for arch in ("sm_80", "sm_90"):
        command = [str(found[0]), f"-arch={arch}", str(BACKENDS / "kernels.ptx"), "-o", str(tmp_path / "out.cubin")]
        subprocess.run(command, check=True, timeout=300)
        assert (tmp_path / "out.cubin").stat().st_size > 1000
