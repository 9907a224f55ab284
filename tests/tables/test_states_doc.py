"""docs/states.md says what the tables say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_states_doc_is_in_step_with_the_tables() -> None:
    code = "import runpy; print(runpy.run_path('docs/states.py', run_name='docs')['render'](), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parent, capture_output=True, text=True, check=True)
    assert done.stdout == (DOCS / "states.md").read_text(), "run: python docs/states.py"
