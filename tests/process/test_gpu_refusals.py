"""A host without a GPU that is asked for one: each daemon says it in one sentence, exits 2, and has started nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import config as configs
from belayer.errors import ConfigInvalid, HostUnfit, Refused
from belayer.paths import Paths
from belayer.procs import Cgroups, tag_of
from belayerd.worker import gpu_switch
from gpuowner.backends.choice import maker_for
from tests.contract.test_memory_backend import no_gpu

TREE = Path(__file__).resolve().parents[2]


def write(root: Path, slot: str, memory: str) -> Path:
    model = root / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    file = root / "belayer.toml"
    file.write_text(
        f'[gpuowner]\nmemory = "{memory}"\n[[model]]\nname = "m"\npath = "{model}"\n'
        f'[[slot]]\nname = "slot0"\nmodel = "m"\n{slot}\n'
    )
    return file


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: unix sockets go below it."""
    made = Path(tempfile.mkdtemp(prefix="blg-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    ("daemon", "said"),
    [
        (["gpuowner", "--kind", "kv"], "needs the NVIDIA driver"),
        (["gpuowner", "--kind", "weights"], "needs the NVIDIA driver"),
        (["belayerd"], "NVML"),
        (["belayerd.worker.zygote"], "has ever run on one"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(root: Path, daemon: list[str], said: str) -> None:
    if not no_gpu():
        pytest.skip("a driver is here: nothing to refuse")
    file = write(root, 'device = "gpu"', "cuda_vmm")
    env = {**os.environ, "BELAYER_ROOT": str(root), "PYTHONPATH": str(TREE)}
    module, *rest = daemon
    run = subprocess.run(
        [sys.executable, "-m", module, *rest, "--config", str(file)],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 2, run.stderr
    sentence = run.stderr.strip().splitlines()[-1]
    assert said in sentence
    assert "nothing was started" in sentence
    assert "Traceback" not in run.stderr
    assert list(root.rglob("*.sock")) == [], "nothing listens"
    own = Cgroups._own()
    assert own is None or not (own / f"belayer-{tag_of(Paths(root).run)}").exists(), "no control group is left"


@pytest.mark.parametrize(
    ("slot", "memory", "said"),
    [
        ('device = "gpu"', "memfd", r"slot\[0\].device.*memory = \"cuda_vmm\""),
        ("", "cuda_vmm", r"slot\[0\].device.*memory = \"memfd\""),
        ('device = "cuda:0"', "cuda_vmm", r"slot\[0\].device.*neither"),
        ('device = "gpu:1"\nkv_bytes = 3000000', "cuda_vmm", r"slot\[0\].kv_bytes.*multiple of 2097152"),
        ('device = "gpu"\nkv_reuse = true', "cuda_vmm", r"slot\[0\].kv_reuse.*built for the CPU only"),
        ("", "cuda_ipc", r"gpuowner.memory"),
    ],
)
def test_memory_and_device_must_fit_each_other(tmp_path: Path, slot: str, memory: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        configs.load(write(tmp_path, slot, memory))


def test_a_gpu_slot_can_be_written_down(tmp_path: Path) -> None:
    device = "gpu:GPU-12345678-1234-1234-1234-123456789abc"
    loaded = configs.load(write(tmp_path, f'device = "{device}"', "cuda_vmm"))
    assert loaded.slot[0].device == device
    with pytest.raises(HostUnfit, match=r"slots \['slot0'\] name a GPU.*nothing was started.*docs/h200.md"):
        gpu_switch.refuse(loaded)
    gpu_switch.refuse(loaded, proven=True)
    gpu_switch.refuse(configs.load(write(tmp_path, "", "memfd")))


def test_what_of_the_gpu_path_is_not_wired_is_refused_by_name() -> None:
    spec = f"fake:choice{os.getpid()}:{1 << 26}"
    for devices in ({"gpu:1"}, {"gpu", "gpu:GPU-12345678-1234-1234-1234-123456789abc"}):
        with pytest.raises(HostUnfit, match=r"slots are on gpu:.*first GPU, GPU-fake-choice.*nothing was started"):
            maker_for("cuda_vmm", spec, devices)
    maker = maker_for("cuda_vmm", spec, {"gpu", "gpu:0", f"gpu:GPU-fake-choice{os.getpid()}"})
    assert maker.name == "cuda_vmm"
    with pytest.raises(Refused, match=r"whole granules.*nothing was allocated"):
        maker.create("kv-slot0-0", (2 << 20) + 1)
    arena = maker.create("kv-slot0-0", 4 << 20)
    again = maker.adopt(os.dup(arena.fd), 4 << 20)
    assert again.nbytes == arena.nbytes
    again.close()
    arena.close()
