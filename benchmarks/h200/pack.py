"""One tar of what a machine without a network needs: our code, and a list of the wheels that must be there."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from benchmarks.h200.bench import TREE

PACKAGES = ("belayer", "gpuowner", "belayerd", "benchmarks")
FILES = ("pyproject.toml", "LICENSE", "docs/h200.md")
# What the check imports beyond the standard library; bring a wheel where `python -m benchmarks.h200_check --look`
# misses it.
WHEELS = {
    "torch": "torch>=2.7 with CUDA; expected to be on the machine",
    "numpy": "numpy>=1.26; comes with torch",
    "cuda.bindings": "cuda-bindings>=12.8, not newer than the driver's CUDA version",
    "pynvml": "nvidia-ml-py>=13.580",
    "msgspec": "msgspec>=0.18.6",
    "zmq": "pyzmq>=26",
    "rich": "rich>=13.7",
    "structlog": "structlog>=24; the log of gpuowner itself (W1, S7)",
}


def pack(file: Path) -> list[str]:
    """Write ``file`` (tar.gz) and return the names in it."""
    names = []
    with tarfile.open(file, "w:gz") as tar:
        for package in PACKAGES:
            for path in sorted((TREE / package).rglob("*")):
                if path.is_file() and path.suffix in (".py", ".cu", ".ptx"):
                    names.append(str(path.relative_to(TREE)))
        names += [name for name in FILES if (TREE / name).is_file()]
        for name in names:
            tar.add(TREE / name, arcname=f"belayer/{name}")
        text = "".join(f"{module}: {wheel}\n" for module, wheel in WHEELS.items()).encode()
        entry = tarfile.TarInfo("belayer/WHEELS.txt")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return [*names, "WHEELS.txt"]
