"""``podman container checkpoint --export`` and restore under a new name, on the same content: the nearest thing that a
package manager offers. Verified like everything else. Podman is not installed by setup; --podman asks for it.

It ends its source. With ``--leave-running`` podman 4.3 lets the processes go on before it reads the file system, and
what it restores has a gap between memory and log: seen by the same verification, so that way is not measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from belayer.clock import Stopwatch
from belayer.errors import HostUnfit
from benchmarks.disks import IMAGE
from benchmarks.sandbox_load import CHECKS, FILES, LOAD, READY, SUMS, Size, WrongError

CRIU = Path("/opt/belayer/criu/usr/sbin")
# Without CAP_SYS_RESOURCE (virtual machines) podman cannot raise these and does not start.
_RUN = ("--runtime", "runc", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")


def check() -> str:
    """Podman's version. Raises HostUnfit when it is not there."""
    if shutil.which("podman") is None:
        raise HostUnfit(
            "--podman: there is no podman on this machine", remedy="apt-get install podman, or leave it out"
        )
    return _podman("--version").strip()


def measure(size: Size, n: int, below: Path) -> tuple[list[float], list[float]]:
    """(checkpoint, restore) milliseconds of ``n`` rounds; both are the whole command. Raises WrongError."""
    frozen, restored, name = [], [], "belayer-bench-0"
    with tempfile.TemporaryDirectory(prefix="bl-pod-", dir=below) as folder:
        _take_image(Path(folder))
        script = f'{FILES.format(files=size.files)}; {SUMS}; exec python3 -c "{LOAD}"'
        _podman(*f"run -d --name {name}".split(), *_RUN, "-e", f"MB={size.memory_mb}", IMAGE, "bash", "-c", script)
        try:
            _inside(name, READY)
            for number in range(1, n + 1):
                archive, last, name = f"{folder}/{number}.tar", name, f"belayer-bench-{number}"
                watch = Stopwatch()
                _podman("container", "checkpoint", "--export", archive, "-c", "none", last)
                frozen.append(watch.ms())
                _podman("rm", "-f", "-t", "0", last)
                watch = Stopwatch()
                _podman("--runtime", "runc", "container", "restore", "--import", archive, "--name", name)
                restored.append(watch.ms())
                for step in CHECKS:
                    _inside(name, step.format(pid="1"))
                Path(archive).unlink()
        finally:
            _podman("rm", "-f", "-t", "0", name)
    return frozen, restored


def _take_image(folder: Path) -> None:
    archive = folder / "image.tar"
    subprocess.run(["docker", "save", "-o", archive, IMAGE], check=True)
    _podman("load", "-q", "-i", str(archive))
    archive.unlink()


def _inside(name: str, command: str) -> None:
    done = subprocess.run(["podman", "exec", name, "bash", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongError(f"podman: {command[:60]!r} ended with {done.returncode}: {done.stdout}{done.stderr}"[:400])


def _podman(*words: str) -> str:
    env = {**os.environ, "PATH": f"{CRIU}:{os.environ['PATH']}"}
    done = subprocess.run(["podman", *words], capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise WrongError(f"podman {' '.join(words)[:80]}: {done.stderr.strip()[:300]}")
    return done.stdout
