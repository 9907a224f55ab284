"""Generated documents say what the code says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["states", "configuration"])
def test_generated_documents_are_in_step(name: str) -> None:
    code = f"import runpy; print(runpy.run_path('docs/{name}.py', run_name='docs')['render'](), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS.parent, capture_output=True, text=True, check=True)
    assert done.stdout == (DOCS / f"{name}.md").read_text(), f"run: python docs/{name}.py"
