"""Builds the stand-in for libcuda.so.1 (libcuda.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
BACKENDS = HERE.parents[1] / "gpuowner/backends"


def build(folder: Path) -> Path:
    """``folder``, to be put into LD_LIBRARY_PATH."""
    command = ["g++", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{BACKENDS}", str(HERE / "libcuda.cpp")]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), "-ldl"], check=True, timeout=300)
    return folder
