"""Stages S0 to S3: the machine, the life of memory without its maker, loading, and what a parked shadow costs."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from belayer.clock import Stopwatch
from benchmarks.h200.bench import TREE, Bench, tokens_of
from benchmarks.h200.gauge import used
from benchmarks.h200.record import Stage
from gpuowner.backends import oneshot
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import REAL
from gpuowner.backends.port import Access

PATTERN = 0x5A


def probe_machine(bench: Bench, stage: Stage) -> None:
    """S0."""
    made = oneshot.make(bench.spec, 0, ())
    stage.facts |= {"device": made.device, "granularity": made.granularity, "kernel": platform.release()}
    stage.facts["mps_running"] = bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY")) or Path("/tmp/nvidia-mps").exists()
    stage.check("no MPS", not stage.facts["mps_running"], "MPS lets one client's fault reach all, and voids the fence")
    stage.check("granularity is 2 MiB", made.granularity == 2 << 20, made.granularity)
    if bench.spec == REAL:
        _probe_nvml(stage)
    stage.figure("device memory in use at the start", "MB", used(bench.spec) / 1e6)


def _probe_nvml(stage: Stage) -> None:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    asked: dict[str, Callable[[], Any]] = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "persistence_mode": lambda: pynvml.nvmlDeviceGetPersistenceMode(handle),
        "event_types": lambda: pynvml.nvmlDeviceGetSupportedEventTypes(handle),
        "recovery_action": lambda: (
            pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])[0].value.uiVal
        ),
    }
    for name, ask in asked.items():
        try:
            stage.facts[name] = ask()
        except pynvml.NVMLError as why:
            stage.facts[name] = f"NVML: {why}"


def lifetime(bench: Bench, stage: Stage) -> None:
    """T1: memory whose maker has ended, and which no process has mapped, is there as long as a descriptor is."""
    size = bench.plan.lifetime_bytes
    before = used(bench.spec)
    made = oneshot.make(bench.spec, 0, (size,))
    stage.check("it stays while only a descriptor holds it", used(bench.spec) - before >= size * 0.9, used(bench.spec))
    (fd,) = made.fds
    for verb, expected in (("write", 0), ("read", 0), ("stray", None), ("read", 0)):
        watch = Stopwatch()
        run = _touch(bench, verb, fd, made.sizes[0])
        ok = run.returncode == expected if expected is not None else run.returncode not in (0, 1)
        stage.check(
            {"write": "a new process maps and writes it", "read": "another new process reads the same bytes",
             "stray": "a write through a read-only mapping ends the writer"}[verb],
            ok, {"exit": run.returncode, "said": run.stderr[-300:]},
        )  # fmt: skip
        stage.figure(f"process that imports and does: {verb}", "ms", watch.ms())
    killed = _killed_in_use(bench, fd, made.sizes[0])
    stage.check("a process that has it mapped is killed", killed == -signal.SIGKILL, killed)
    stage.check("what it had written outlives it", _touch(bench, "read", fd, made.sizes[0]).returncode == 0)
    os.close(fd)
    stage.check("it is given back with the last descriptor", used(bench.spec) - before < size * 0.1, used(bench.spec))


def _command(bench: Bench, verb: str, fd: int, nbytes: int) -> list[str]:
    script = str(Path(__file__).with_name("touch.py"))
    return [sys.executable, script, bench.spec, verb, str(fd), str(nbytes)]


def _touch(bench: Bench, verb: str, fd: int, nbytes: int) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(TREE)}
    command = _command(bench, verb, fd, nbytes)
    return subprocess.run(command, pass_fds=(fd,), env=env, capture_output=True, text=True, check=False)


def _killed_in_use(bench: Bench, fd: int, nbytes: int) -> int:
    """Exit status of a process that writes, says so, and is killed with the memory mapped."""
    env = {**os.environ, "PYTHONPATH": str(TREE)}
    command = _command(bench, "write-and-wait", fd, nbytes)
    with subprocess.Popen(command, pass_fds=(fd,), env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    return process.returncode


def load(bench: Bench, stage: Stage) -> None:
    """S1: the owner makes memory, a loader fills and seals it."""
    watch = Stopwatch()
    said = bench.start_owner()
    stage.figure("owner up, memory made", "ms", watch.lap())
    stage.check("the owner has not loaded the driver", not said["driver_loaded"])
    loader = bench.fork("loader")
    sealed = bench.wait_ready(loader)
    loader.gone(30.0)
    said = bench.ask_owner(do="status")
    stage.check("sealed", said["weights"] == "sealed" and said["version"] == 1, said)
    gigabytes = sealed["sealed"] / 1e9
    stage.facts["weights_bytes"] = sealed["sealed"]
    stage.figure("sums of the weights", "GB/s", gigabytes / (sealed["digest_ms"] / 1e3))
    stage.figure("saved to a file", "GB/s", gigabytes / (sealed["save_ms"] / 1e3))


def main_engine(bench: Bench, stage: Stage) -> None:
    """S2: the first main, by the way of every main: a standby that takes the arena; the unfailed run."""
    plan = bench.plan
    ready = bench.fresh_main()
    for name, value in ready["ms"].items():
        stage.figure(f"standby: {name}", "ms", value)
    stage.check("the step was captured in memory that parks", not ready["capture_error"], ready["capture_error"])
    assert bench.main is not None
    bench.main.line.send({"do": "decode", "count": plan.tokens})
    bench.reference = tokens_of(bench.main)
    stage.check("the unfailed run has all its tokens", len(bench.reference) == plan.tokens, len(bench.reference))
    distinct = {tuple(row) for row in bench.reference}
    stage.check("its tokens differ from each other", len(distinct) > 2, len(distinct))
    bench.main.line.send({"do": "reset", "count": plan.tokens})
    again = tokens_of(bench.main)
    stage.check("computed again, it gives the same tokens", again == bench.reference)
    bench.main.line.send({"do": "verify"})
    said = bench.main.line.receive()
    assert said is not None
    stage.check("weights equal their sums", said["equal"])
    stage.figure("all weights verified", "ms", said["ms"])


def shadow_cost(bench: Bench, stage: Stage) -> None:
    """S3: speed and memory of the main with a parked shadow beside it, and without: A B A B."""
    assert bench.main is not None
    for _ in range(2):
        stage.figure("decode step, no shadow (p50)", "ms", _measure(bench)["p50"])
        before = used(bench.spec)
        shadow = bench.new_shadow()
        ready = bench.wait_ready(shadow)
        stage.figure("device memory of a parked shadow", "MB", (used(bench.spec) - before) / 1e6)
        stage.figure("graph memory parked", "MB", ready["parked_bytes"] / 1e6)
        beside = _measure(bench)
        stage.figure("decode step, parked shadow (p50)", "ms", beside["p50"])
        stage.figure("decode step, parked shadow (p99)", "ms", beside["p99"])
        stage.check("a standby parks its graph memory", ready["parked_bytes"] > 0)
        shadow.kill()
        stage.check("a killed standby leaves the main alone", shadow.gone(30.0) and _measure(bench)["steps"] > 0)
    bench.shadow = None


def _measure(bench: Bench) -> dict[str, Any]:
    assert bench.main is not None
    bench.main.line.send({"do": "measure", "seconds": bench.plan.overhead_s})
    said = bench.main.line.receive()
    assert said is not None
    return said


def touch(spec: str, verb: str, fd: int, nbytes: int) -> int:
    """The deed of a process of stage T1; its exit code."""
    from gpuowner.backends.driver import DriverError, Kernel, driver_for

    memory = CudaVmm(driver_for(spec))
    va = memory.reserve(nbytes)
    writes = verb.startswith("write")
    memory.map(va, fd, nbytes, Access.READ_WRITE if writes else Access.READ)
    if writes:
        memory.zero(va, nbytes)
        memory.launch(Kernel.POKE, 1, 1, va + nbytes - 8, PATTERN)
        memory.synchronize()
        if verb == "write-and-wait":
            print("written", flush=True)
            signal.pause()
    elif verb == "read":
        sums = memory.digest(va, nbytes)
        return 0 if sum(row.plain for row in sums) == PATTERN else 9
    else:
        try:
            memory.launch(Kernel.POKE, 1, 1, va, 1)
            memory.synchronize()
        except DriverError as why:
            return 70 if 700 <= why.number <= 719 else 1
    return 0
