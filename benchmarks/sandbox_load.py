"""What the checkpoint benchmark puts into a sandbox, and how it is told whether all of it came back.

Memory of one process (random bytes) and files in the upper layer (random, 1 MB each). The process also counts and logs
every step, a hundred times a second, so that an instant that is not one instant shows as a gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from belayer.sandbox import Sandbox

LOAD = r"""
import hashlib, os, signal, time
size = int(os.environ['MB']) << 20
data = bytearray()
while len(data) < size: data += os.urandom(min(1 << 20, size - len(data)))
def say(name): open(name + '.tmp', 'w').write(hashlib.sha256(data).hexdigest()); os.rename(name + '.tmp', name)
signal.signal(signal.SIGUSR1, lambda *_: say('/after'))
log = os.open('/log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
say('/before')
n = 0
while True:
    n += 1
    os.write(log, b'%d\\n' % n)
    time.sleep(0.01)
"""
FILES = "mkdir /data && for i in $(seq {files}); do head -c 1000000 /dev/urandom > /data/$i; done"
SUMS = "cd /data && sha256sum * > /sums"
READY = "until [ -s /before ] && [ -s /log ]; do sleep 0.02; done"
CHECKS = (
    "cd /data && sha256sum -c --quiet /sums && cd /var",
    "rm -f /after; kill -USR1 {pid}; until [ -e /after ]; do sleep 0.01; done; cmp /before /after",
    "n=$(wc -l </log); until [ $(wc -l </log) -gt $n ]; do sleep 0.01; done",
    "awk '$1 != NR {{ print \"gap at \" NR; exit 1 }}' /log",
)


@dataclass(frozen=True)
class Size:
    """``n``: repetitions; ``quick``: of a quick run."""

    name: str
    memory_mb: int
    files: int
    n: int
    quick: int

    def __str__(self) -> str:
        return f"{self.memory_mb} MB memory, {self.files} MB files"


SIZES = (Size("small", 10, 1, 15, 2), Size("medium", 200, 100, 10, 1), Size("large", 1024, 1024, 10, 1))


class WrongError(Exception):
    """A result that is not what it must be."""


def run(box: Sandbox, command: str) -> str:
    seen = box.exec(command, timeout_s=600)
    if seen.exit_code != 0:
        raise WrongError(f"{command[:60]!r} ended with {seen.exit_code}: {seen.stdout[:200]}{seen.stderr[:300]}")
    return seen.stdout


def load(box: Sandbox, size: Size) -> None:
    run(box, f'MB={size.memory_mb} python3 -c "{LOAD}" </dev/null >/dev/null 2>&1 & echo $! > /load.pid')
    run(box, FILES.format(files=size.files))
    run(box, f"{SUMS} && cd /var && X=41")
    run(box, READY)


def verify(box: Sandbox) -> None:
    """What was captured is there, and goes on. Raises WrongError."""
    if run(box, 'echo "$X $PWD"') != "41 /var\n":
        raise WrongError("the shell forgot its variable or its directory")
    for check in CHECKS:
        run(box, check.format(pid="$(cat /load.pid)"))
