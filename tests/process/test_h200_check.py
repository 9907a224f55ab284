"""The H200 check, on the CPU over the fake driver: from the tar that would be carried, whole, and cut off in the
middle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from belayer import procs
from benchmarks import h200_check
from benchmarks.h200 import pack
from benchmarks.h200.bench import Bench
from benchmarks.h200.plan import SHAPES, STAGES, fake, named
from benchmarks.h200.record import Record, Stage, read
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree that is in the tar, and nothing else of ours."""
    folder = tmp_path_factory.mktemp("carried")
    names = pack.pack(folder / "check.tar.gz")
    assert "gpuowner/backends/kernels.ptx" in names
    with tarfile.open(folder / "check.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    return folder / "belayer"


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where the check puts its sockets and files; short, and empty again when it has ended, however it did."""
    made = Path(tempfile.mkdtemp(prefix="blh-", dir="/tmp"))
    yield made
    shutil.rmtree(made)


def start(carried: Path, out: Path, scratch: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.h200_check", "--out", str(out), *args]
    env = {**os.environ, "PYTHONPATH": str(carried), "TMPDIR": str(scratch)}
    return subprocess.Popen(
        command, cwd=carried, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def running(carried: Path) -> list[str]:
    """Command lines of processes that run code of this tar."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid() or not procs.lives(int(entry.name)):
            continue
        try:
            environ = (entry / "environ").read_bytes()
            if str(carried).encode() in environ:
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    return found


def test_the_whole_check_passes_from_the_carried_tar_and_leaves_nothing(
    carried: Path, tmp_path: Path, scratch: Path
) -> None:
    run = start(carried, tmp_path, scratch, "--fake")
    said, _ = run.communicate(timeout=1200)
    assert run.returncode == 0, said
    stages = {row["stage"]: row for row in read(tmp_path)}
    assert tuple(stages) == STAGES
    assert all(row["passed"] and bool(row["checks"]) != bool(row["skipped"]) for row in stages.values())
    skipped = {name: row["skipped"] for name, row in stages.items() if row["skipped"]}
    assert skipped == {"S7": "no GPU: vLLM's GPU engine cannot run over the fake driver"}
    assert "| S7 | skipped (no GPU" in (tmp_path / "report.md").read_text()
    decisive = stages["S4"]["checks"]
    for kind in (*fake().faults, "readonly"):
        assert decisive[f"{kind}: the stream is the unfailed one"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"]
    assert summary["about"]["fake"]
    assert "No figure below is one of a GPU" in (tmp_path / "report.md").read_text()
    eventually(lambda: running(carried) == [], what="every process has ended")
    assert list(scratch.iterdir()) == []


def test_a_check_that_is_killed_leaves_its_results_and_nothing_else(
    carried: Path, tmp_path: Path, scratch: Path
) -> None:
    run = start(carried, tmp_path, scratch, "--fake")

    def loaded() -> bool:
        if not (tmp_path / "results.jsonl").exists():
            return False
        return any(row["stage"] == "S1" for row in read(tmp_path))

    try:
        eventually(loaded, within=400, what="stage S1 is on disk", every=0.05)
    finally:
        run.kill()
        run.wait()
    stages = read(tmp_path)
    assert [row["stage"] for row in stages][:3] == ["S0", "T1", "S1"]
    assert all(row["passed"] for row in stages)
    assert not (tmp_path / "summary.json").exists()
    eventually(lambda: running(carried) == [], what="every process has ended")
    assert list(scratch.iterdir()) == []


def test_without_a_gpu_nothing_is_run(carried: Path, tmp_path: Path, scratch: Path) -> None:
    from tests.contract.test_memory_backend import no_gpu

    if not no_gpu():
        pytest.skip("a driver is here: the check itself can run")
    run = start(carried, tmp_path / "out", scratch)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 2
    assert "needs the NVIDIA driver" in said
    assert not (tmp_path / "out").exists()


def test_the_list_of_what_to_bring_is_complete(carried: Path) -> None:
    code = (
        "import sys, benchmarks.h200_check, benchmarks.h200.owner\n"
        "tops = {name.partition('.')[0] for name, module in sys.modules.items()\n"
        "        if 'site-packages' in str(getattr(module, '__file__', ''))}\n"
        "print(*sorted(tops))"
    )
    env = {**os.environ, "PYTHONPATH": str(carried)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=300)
    listed = {module.partition(".")[0] for module in pack.WHEELS}
    theirs = {"pygments", "markdown_it", "mdurl", "typing_extensions"}  # of rich, and of torch
    found = {name for name in run.stdout.split() if not name.startswith(("_", "sitecustomize", "distutils"))}
    assert "torch" not in found, "the process that holds everything imports no torch"
    assert found - listed - theirs == set()


def stub(**deadlines: float) -> Bench:
    """``deadlines``: of stages that shall not come to their end; the others have more time than they need."""
    plan = SimpleNamespace(deadlines=dict.fromkeys(STAGES, 60.0) | deadlines, total_s=1000.0)
    return cast(Bench, SimpleNamespace(plan=plan, tail=lambda: "its last words", recover=lambda: None))


def run_with(folder: Path, work: Mapping[str, Any], **deadlines: float) -> tuple[bool, list[dict[str, Any]]]:
    record = Record(folder, {"fake": True, "machine": "none"})
    return h200_check.run(stub(**deadlines), record, work), read(folder)


def good(bench: Bench, stage: Stage) -> None:
    stage.check("fine", True)


def test_a_single_check_that_fails_fails_the_run_and_is_named(tmp_path: Path) -> None:
    def wrong(bench: Bench, stage: Stage) -> None:
        stage.check("tokens", False, "token 7 differs")
        stage.check("tokens", True)

    passed, rows = run_with(tmp_path, {"S0": good, "T1": wrong})
    assert not passed
    assert [row["passed"] for row in rows] == [True, False]
    assert "T1: tokens: token 7 differs" in (tmp_path / "report.md").read_text()


def test_a_stage_past_its_deadline_is_kept_and_the_rest_goes_on(tmp_path: Path) -> None:
    ours, theirs = os.pipe()

    def hangs(bench: Bench, stage: Stage) -> None:
        stage.check("before", True)
        os.read(ours, 1)

    passed, rows = run_with(tmp_path, {"T1": hangs, "S1": good, "S2": hangs, "S3": good}, T1=1.0, S2=1.0)
    os.close(ours)
    os.close(theirs)
    assert not passed
    assert "StageTimeout" in rows[0]["error"]
    assert "its last words" in rows[0]["error"]
    assert rows[0]["checks"] == {"before": True}
    assert rows[1]["passed"]
    assert rows[3]["error"] == "not run: S2 broke off"


def test_a_stage_without_a_check_has_not_passed(tmp_path: Path) -> None:
    assert not run_with(tmp_path, {"S0": lambda bench, stage: None})[0]


def test_results_with_a_torn_last_line_can_be_read(tmp_path: Path) -> None:
    run_with(tmp_path, {"S0": good})
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"stage": "S1", "pas')
    assert [row["stage"] for row in read(tmp_path)] == ["S0"]


@pytest.mark.parametrize("shape", ["8b", "4b"])
def test_the_real_plan_fits_the_machine_and_the_time(shape: str) -> None:
    plan = named(f"{shape}:40.0")
    weights = plan.shape.layout()[1]
    shadow_bytes = 4e9  # context and graph memory, generously
    # Stage S5 needs most: the owner's weights and arena, and a cold engine's own of both.
    assert 2 * (weights + plan.arena_bytes) + shadow_bytes < 139e9
    assert plan.total_s < 400
    assert plan.prompt + plan.tokens + plan.after < plan.shape.max_len
    assert (15e9 < weights < 18e9) if shape == "8b" else (7e9 < weights < 10e9)
    assert SHAPES["tiny"].layout()[1] < 1 << 21 << 1
