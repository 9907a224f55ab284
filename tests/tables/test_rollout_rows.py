"""The table of reported rollout failures names tests that exist, and its document says what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conformance.rollout_rows import ROWS, Row, render

REPO = Path(__file__).parents[2]


def defined(path: Path) -> set[str]:
    """Names of the test functions of a file, without importing it."""
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_every_row_is_tried_or_says_why_not(row: Row) -> None:
    assert row.why
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in defined(REPO / file), f"row {row.number}: {test} does not exist"


def test_rows_are_named_once_and_in_order() -> None:
    numbers = [row.number for row in ROWS]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers, key=lambda number: (int(number.rstrip("d")), number))


def test_the_document_is_in_step() -> None:
    assert (REPO / "docs/conformance-rollouts.md").read_text() == render(), "run: python docs/rollouts.py"
