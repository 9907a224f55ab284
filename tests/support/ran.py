"""A program of the system that must succeed; where it does not, the failure holds its own words."""

from __future__ import annotations

import subprocess
from pathlib import Path


def ran(*command: str | Path, cwd: Path | str | None = None, env: dict[str, str] | None = None) -> str:
    """What it wrote to stdout."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False)
    words = " ".join(map(str, command))[:300]
    assert done.returncode == 0, f"`{words}` ended with {done.returncode}: {(done.stderr or done.stdout)[-3000:]}"
    return done.stdout
