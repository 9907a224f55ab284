"""Stage S7: Belayer's GPU worker inside vLLM, in a process of its own; skipped by name where it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from belayer.clock import Stopwatch
from benchmarks.h200.bench import Bench
from benchmarks.h200.daemons import Daemons
from benchmarks.h200.record import Stage
from gpuowner.backends.driver import REAL

VLLM = "0.32.0"  # belayerd.worker.adapter.checks
CONFIG = """[gpuowner]
memory = "cuda_vmm"
[[model]]
name = "model"
path = "{model}"
dtype = "bfloat16"
[[slot]]
name = "slot0"
model = "model"
device = "gpu"
kv_bytes = 4294967296
block_size = 16
max_num_seqs = 8
"""


def cannot(spec: str, model: Path | None) -> str:
    """Why the stage cannot run here, or ""."""
    if spec != REAL:
        return "no GPU: vLLM's GPU engine cannot run over the fake driver"
    if model is None:
        return "no model: --model FOLDER names one (Hugging Face safetensors)"
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return "vLLM is not installed"
    if found.split("+")[0] != VLLM or "cpu" in found:
        return f"vLLM {found} is installed, the worker was written for {VLLM} with CUDA"
    return ""


def worker(bench: Bench, stage: Stage) -> None:
    """S7: the process prints JSON lines: {"check": [name, holds, detail]}, {"figure": [name, unit, value]}."""
    model = bench.plan.model
    stage.skipped = cannot(bench.spec, model)
    if stage.skipped:
        return
    daemons = Daemons(bench.spec)
    try:
        daemons.paths.config.write_text(CONFIG.format(model=model))
        watch = Stopwatch()
        (row,) = daemons.start("weights").weights
        stage.figure("owner started, model sealed", "ms", watch.ms())
        stage.figure("files to sealed", "MB/s", row.load_mb_s)
        daemons.start("kv")
        _engine(bench, daemons, stage)
    finally:
        daemons.end()


def _engine(bench: Bench, daemons: Daemons, stage: Stage) -> None:
    with (bench.folder / "processes.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.h200.vllm_process"],
            env=daemons.env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, cwd=bench.folder,
            text=True,
        )  # fmt: skip
    try:
        _listen(process, stage)
    finally:
        process.kill()
        process.wait()


def _listen(process: subprocess.Popen[str], stage: Stage) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("{"):
            continue  # vLLM's own words
        said = json.loads(line)
        if "check" in said:
            stage.check(*said["check"])
        elif "figure" in said:
            stage.figure(*said["figure"])
    if process.wait():
        raise RuntimeError(f"the engine's process ended with {process.returncode}")
