"""The soak, short: legal load is never taken for a fault, and a real one always is (benchmarks/soak.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_no_false_alarm_and_no_missed_fault(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--quick", "--json", str(tmp_path / "soak.json")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (tmp_path / "soak.json").exists(), done.stderr
    told = json.loads((tmp_path / "soak.json").read_text())
    rows = {row["metric"]: row["median"] for row in told["rows"]}
    problems = {scene["name"]: [*scene["false"], *scene["wrong"]] for scene in told["scenes"]}
    assert {name: said for name, said in problems.items() if said} == {}
    assert (rows["faults_injected"], rows["faults_missed"]) == (2, 0), "the controls: the same stall, not announced"
    assert done.returncode == 0, done.stderr
