"""Writes docs/conformance-rollouts.md: ``python docs/rollouts.py``. A test keeps it in step with its table."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conformance.rollout_rows import render

if __name__ == "__main__":
    (Path(__file__).parent / "conformance-rollouts.md").write_text(render())
