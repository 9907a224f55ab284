"""The soak, short: legal load is never taken for a fault, and a real one always is (benchmarks/soak.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import soak

pytestmark = pytest.mark.engine


def test_no_false_alarm_and_no_missed_fault(tmp_path: Path) -> None:
    code = soak.main(["--quick", "--json", str(tmp_path / "soak.json")])
    told = json.loads((tmp_path / "soak.json").read_text())
    rows = {row["metric"]: row["median"] for row in told["rows"]}
    scenes = {scene["name"]: scene for scene in told["scenes"]}
    assert {name: [*scene["false"], *scene["wrong"]] for name, scene in scenes.items()} == dict.fromkeys(scenes, [])
    assert (rows["faults_injected"], rows["faults_missed"]) == (2, 0), "the controls: the same stall, not announced"
    assert code == 0
