"""Disks to measure on, each with a Docker Engine of its own whose data root and whose checkpoints both lie on it.

``host``: the file system below a folder. ``xfs``: a loop device with reflinks. ``tmpfs``: memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.private_docker import PrivateDocker

KINDS = ("host", "xfs", "tmpfs")
IMAGE = "belayer-sandbox:base"


@contextlib.contextmanager
def disk(kind: str, below: Path, gib: int) -> Iterator[Path]:
    """An empty folder on such a disk; all of it is gone afterwards. Needs root."""
    with tempfile.TemporaryDirectory(prefix="bl-b-", dir=below) as folder:
        if kind == "host":
            yield Path(folder)
            return
        point = Path(folder) / "m"
        point.mkdir()
        if kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", f"size={gib}g,mode=700", "belayer-bench", point)
        else:
            image = Path(folder) / "disk"
            with image.open("wb") as file:
                file.truncate(gib << 30)  # a hole: it takes what is written
            _run("mkfs.xfs", "-q", "-m", "reflink=1", image)
            _run("mount", "-o", "loop,noatime", image, point)
        try:
            yield point
        finally:
            # Lazily: a run that was cut leaves shims that still hold it, and nothing may stay mounted by name.
            _run("umount", "-l", point)


@contextlib.contextmanager
def engine(folder: Path, binaries: Path | None = None) -> Iterator[PrivateDocker]:
    """A Docker Engine below ``folder``, in experimental mode (Docker's own checkpoints are measured beside ours)."""
    made = PrivateDocker(folder / "d", binaries=binaries, extra={"experimental": True})
    try:
        made.start().take_image(IMAGE)
        yield made
    finally:
        made.stop()


def kind_of(folder: Path) -> str:
    """Name of the file system, as in "ext4"."""
    done = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True)
    return {"ext2/ext3": "ext4"}.get(done.stdout.strip(), done.stdout.strip())


def _run(*words: str | Path) -> None:
    subprocess.run([*words], check=True, capture_output=True)
