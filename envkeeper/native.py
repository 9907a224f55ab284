"""The native parts that a wheel brings along, put where Docker and a restore expect them.

A checkout builds its own (``make setup``). A wheel carries static binaries for each machine below ``native/``, because
the host that it is installed on may have no compiler. Paths below the prefix are kept for ever: Docker's daemon.json
names the runtime, and a checkpoint names its agent by the hash in its name.
"""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from belayer.errors import HostUnfit

CARRIED = Path(__file__).with_name("native")


def install(prefix: Path, carried: Path = CARRIED, machine: str = "") -> list[Path]:
    """What is there now, for people. Files that are the same already are not touched; others are replaced by rename,
    so that a program that runs or starts in this moment sees a whole file. Raises HostUnfit."""
    machine = machine or platform.machine()
    source = carried / machine
    if not source.is_dir():
        have = sorted(path.name for path in carried.iterdir()) if carried.is_dir() else []
        raise HostUnfit(
            f"this installation carries no native parts for {machine} (it has {', '.join(have) or 'none'})",
            remedy="run `make setup` or envkeeper/agent/build.sh in a checkout",
        )
    done = []
    for path in sorted(source.rglob("*")):
        if path.is_file():
            done.append(_put(path, prefix / path.relative_to(source)))
    agents = [path for path in done if path.parent == prefix / "agent"]
    link = prefix / "agent" / "current"
    fresh = link.with_name(f"current.new.{os.getpid()}")
    fresh.symlink_to(agents[0].name)
    fresh.replace(link)
    return done


def _put(source: Path, target: Path) -> Path:
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.new.{os.getpid()}")
    shutil.copyfile(source, fresh)
    fresh.chmod(0o755)
    fresh.replace(target)
    return target
