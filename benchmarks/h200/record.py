"""What a run leaves behind: one line per stage, on disk before the next stage begins, so that a run that is cut short
keeps what it has; then a summary and a report. Digests and token equality decide; times are only reported."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from belayer.clock import Stopwatch, monotonic


class StageTimeout(Exception):
    """The stage is past its deadline."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise StageTimeout out of whatever the block waits for. Main thread only."""

    def late(number: int, frame: FrameType | None) -> None:
        raise StageTimeout(f"{what} was not over after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Stage:
    """``checks``: what decides, by name. ``figures``: name -> (unit, values); ``facts``: anything else worth
    keeping. ``skipped``: why nothing was tried here; it neither passes nor fails the run."""

    name: str
    checks: dict[str, bool] = field(default_factory=dict)
    figures: dict[str, tuple[str, list[float]]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    skipped: str = ""
    seconds: float = 0.0

    def check(self, name: str, holds: bool, detail: Any = None) -> None:
        """Once false, a check of that name stays false."""
        self.checks[name] = holds and self.checks.get(name, True)
        if not holds:
            self.facts.setdefault("failed", []).append({"check": name, "detail": detail})

    def figure(self, name: str, unit: str, value: float) -> None:
        self.figures.setdefault(name, (unit, []))[1].append(round(value, 4))

    def passed(self) -> bool:
        return not self.error and bool(self.checks or self.skipped) and all(self.checks.values())

    def verdict(self) -> str:
        return f"skipped ({self.skipped})" if self.skipped else "passed" if self.passed() else "FAILED"

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "passed": self.passed(),
            "error": self.error,
            "skipped": self.skipped,
            "seconds": round(self.seconds, 2),
            "checks": self.checks,
            "figures": {name: {"unit": unit, "values": values} for name, (unit, values) in self.figures.items()},
            "facts": self.facts,
        }


class Record:
    """Files in ``folder``: results.jsonl (grows), summary.json and report.md (at the end)."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._about = folder, about
        self.stages: list[Stage] = []
        self.begun = monotonic()
        self._file = (folder / "results.jsonl").open("w")
        self._write({"about": about})

    def _write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def keep(self, stage: Stage, watch: Stopwatch) -> None:
        stage.seconds = watch.ms() / 1e3
        self.stages.append(stage)
        self._write(stage.as_dict())

    def finish(self) -> bool:
        """Write the summary and the report; True when every stage passed."""
        passed = bool(self.stages) and all(stage.passed() for stage in self.stages)
        summary = {
            "passed": passed,
            "seconds": round(monotonic() - self.begun, 1),
            "about": self._about,
            "stages": [stage.as_dict() for stage in self.stages],
        }
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        (self._folder / "report.md").write_text(self._report(passed))
        return passed

    def _report(self, passed: bool) -> str:
        lines = ["# H200 check", "", f"**{'passed' if passed else 'FAILED'}** on {self._about['machine']}.", ""]
        if self._about["fake"]:
            lines += ["Fake run on a CPU: it shows that the check works. No figure below is one of a GPU.", ""]
        lines += ["| stage | passed | s | checks that hold | error |", "|---|---|---|---|---|"]
        for stage in self.stages:
            held = f"{sum(stage.checks.values())} of {len(stage.checks)}"
            verdict = stage.verdict() if stage.skipped else "yes" if stage.passed() else "**no**"
            lines.append(f"| {stage.name} | {verdict} | {stage.seconds:.1f} | {held} | {stage.error} |")
        lines += ["", "| stage | figure | unit | n | median | min | max |", "|---|---|---|---|---|---|---|"]
        for stage in self.stages:
            for name, (unit, values) in stage.figures.items():
                row = [statistics.median(values), min(values), max(values)]
                figures = " | ".join(f"{value:,.4g}" for value in row)
                lines.append(f"| {stage.name} | {name} | {unit} | {len(values)} | {figures} |")
        broken = [(s.name, row) for s in self.stages for row in s.facts.get("failed", [])]
        lines += ["", *(f"- {name}: {row['check']}: {row['detail']}" for name, row in broken), ""]
        return "\n".join(lines)


def read(folder: Path) -> list[dict[str, Any]]:
    """The stages of a results.jsonl, also of a run that was cut off: a torn last line is left out."""
    rows = []
    for line in (folder / "results.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if "stage" in row:
            rows.append(row)
    return rows
