"""Import arrows point down only, and the cores decide without I/O, clock, randomness or logging (design, layout)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("belayer", "gpuowner", "belayerd", "envkeeper", "belayerctl")

# package prefix -> what it may import of ours; the longest prefix of a module rules
ARROWS = {
    "belayer": {"belayer"},
    "gpuowner": {"belayer", "gpuowner"},
    "belayerd": {"belayer", "belayerd"},
    "belayerd.worker": {"belayer", "gpuowner", "belayerd"},
    "envkeeper": {"belayer", "envkeeper"},
    "belayerctl": {"belayer", "belayerctl"},
}
CORES = [
    "belayerd/pair.py",
    "belayerd/pair_table.py",
    "belayerd/handover.py",
    "belayerd/policy.py",
    "belayerd/replacements.py",
    "belayerd/health.py",
    "belayerd/weights_gate.py",
    "belayerd/router/core.py",
    "belayerd/router/slot_rules.py",
    "belayerd/router/remote_rules.py",
    "belayerd/router/fleet_core.py",
    "belayerd/router/fleet_guests.py",
    "belayerd/router/placement.py",
    "belayerd/router/archive.py",
    "belayerd/router/front_lives.py",
    "belayerd/router/records.py",
    "belayerd/router/events.py",
    "gpuowner/core.py",
    "gpuowner/together.py",
    "envkeeper/core.py",
    "envkeeper/asking.py",
    "envkeeper/budget.py",
    "envkeeper/policy.py",
    "envkeeper/estimate.py",
]
IMPURE = {"time", "os", "asyncio", "zmq", "subprocess", "random", "secrets", "logging", "socket", "threading"}
# torch and vllm cost seconds of import and gigabytes: only the worker and the router's front may see them
HEAVY = {"torch", "vllm"}
HEAVY_MAY = ("belayerd.worker", "belayerd.router")


def modules() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) > 40, "the walk finds the tree"
    return found


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    out: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            out.add(node.module)
    return out


def test_arrows_point_down() -> None:
    wrong = []
    for path in modules():
        name = name_of(path)
        prefix = max((p for p in ARROWS if name == p or name.startswith(p + ".")), key=len)
        for target in imports(path):
            top = target.split(".")[0]
            if top in PACKAGES and top not in ARROWS[prefix]:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("core", CORES)
def test_cores_are_pure(core: str) -> None:
    found = {target.split(".")[0] for target in imports(ROOT / core)}
    assert found & IMPURE == set()


def test_only_worker_and_front_see_torch_and_vllm() -> None:
    wrong = [
        f"{name_of(path)} imports {target}"
        for path in modules()
        for target in imports(path)
        if target.split(".")[0] in HEAVY and not name_of(path).startswith(HEAVY_MAY)
    ]
    assert wrong == []


def test_no_log_call_names_a_field_event() -> None:
    """structlog's own first argument is ``event``: a keyword of that name raises where the line is logged."""
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("debug", "info", "warning", "error", "exception")
        and any(keyword.arg == "event" for keyword in node.keywords)
    ]
    assert wrong == []


def test_no_file_is_over_500_lines() -> None:
    long = [f"{path}: {lines}" for path in modules() if (lines := path.read_text().count("\n")) >= 500]
    assert long == []
