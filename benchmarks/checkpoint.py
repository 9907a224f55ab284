"""Frozen time of full_checkpoint and time of full_restore for three sizes, beside Docker's own way in the same run.

``python -m benchmarks.checkpoint [--quick] [--json FILE] [--plot FILE] [--root DIR]``

Each size is memory of one process (random bytes) and files in the upper layer (random, 1 MB each): small 10/1 MB,
medium 200/100 MB, large 1/1 GB. The process also counts and logs every step, a hundred times a second.

- ``frozen_*``: milliseconds in which no process of the sandbox ran. Baseline: the paper's sequence on the same content
  (docker pause, tar of the upper layer, Docker's checkpoint API, docker unpause), from pause to unpause.
- ``restore_*``: milliseconds from the call to a proven, serving sandbox. Baseline: creating and starting a fresh
  container of the same image in the same envkeeper, which brings nothing back.
- ``checkpoints_per_second``: eight small sandboxes checkpointed side by side.

Every restore is verified: hash of the process's memory, hashes of all files, a log without a gap that goes on, the
shell's variable. A wrong one ends the run with exit code 1.
"""

from __future__ import annotations

import mmap
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors

from belayer.clock import Stopwatch
from belayer.localhost import LocalHost
from belayer.sandbox import Sandbox
from benchmarks.report import Report, parser

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


@dataclass(frozen=True)
class Size:
    name: str
    memory_mb: int
    files: int
    n: int
    quick: int


SIZES = (Size("small", 10, 1, 15, 3), Size("medium", 200, 100, 9, 2), Size("large", 1024, 1024, 5, 1))


class WrongError(Exception):
    """A result that is not what it must be."""


def run(box: Sandbox, command: str) -> str:
    seen = box.exec(command, timeout_s=300)
    if seen.exit_code != 0:
        raise WrongError(f"{command[:60]!r} ended with {seen.exit_code}: {seen.stderr[:300]}")
    return seen.stdout


def load(box: Sandbox, size: Size) -> None:
    run(box, f'MB={size.memory_mb} python3 -c "{LOAD}" </dev/null >/dev/null 2>&1 & echo $! > /load.pid')
    run(box, f"mkdir /data && for i in $(seq {size.files}); do head -c 1000000 /dev/urandom > /data/$i; done")
    run(box, "cd /data && sha256sum * > /sums && cd /var && X=41")
    run(box, "until [ -s /before ] && [ -s /log ]; do sleep 0.02; done")


def verify(box: Sandbox) -> None:
    """What was captured is there, and goes on."""
    if run(box, 'echo "$X $PWD"') != "41 /var\n":
        raise WrongError("the shell forgot its variable or its directory")
    run(box, "cd /data && sha256sum -c --quiet /sums && cd /var")
    run(box, "rm -f /after; kill -USR1 $(cat /load.pid); until [ -e /after ]; do sleep 0.01; done; cmp /before /after")
    run(box, "n=$(wc -l </log); until [ $(wc -l </log) -gt $n ]; do sleep 0.01; done")
    run(box, "awk '$1 != NR { print \"gap at \" NR; exit 1 }' /log")


def measure(report: Report, host: LocalHost, size: Size, quick: bool) -> None:
    box = Sandbox.create(memory_mb=4096, pids=256, cpus=2.0, paths=host.paths)
    try:
        load(box, size)
        frozen, restored, totals = [], [], []
        for round_ in range(size.quick if quick else size.n):
            made = box.checkpoint([{"round": round_}])
            frozen.append(made.frozen_ms)
            totals.append(made.total_ms)
            run(box, "echo after >> /sums; X=lost")  # nothing of this may be seen again
            box.kill()
            watch = Stopwatch()
            back = box.restore_info()
            restored.append(watch.ms())
            if back.boundary != made.boundary or back.context_digest != made.context_digest:
                raise WrongError(f"restored boundary {back.boundary}, captured {made.boundary}")
            verify(box)
        base, why = docker_way(host, box, skip=quick and size.name != "small")
        plain = plain_start(host)
        mb = f"{size.memory_mb} MB memory, {size.files} MB files"
        report.add(f"frozen_{size.name}", "ms", frozen, base, f"{mb}; baseline: {why}")
        report.add(f"checkpoint_total_{size.name}", "ms", totals, None, "call to READY, hashed and on disk")
        report.add(f"restore_{size.name}", "ms", restored, plain, f"{mb}; baseline: fresh container, nothing restored")
    finally:
        box.destroy()


def plain_start(host: LocalHost) -> float:
    watch = Stopwatch()
    fresh = Sandbox.create(paths=host.paths)
    ms = watch.ms()
    fresh.destroy()
    return ms


def docker_way(host: LocalHost, box: Sandbox, *, skip: bool) -> tuple[float | None, str]:
    """The paper's sequence through Docker alone, on this sandbox as it stands."""
    if skip:
        return None, "not measured in a quick run"
    client = docker.APIClient(timeout=600)
    try:
        container = Sandbox.attach(box.sandbox_id, paths=host.paths).info.container_id
        upper = Path(client.inspect_container(container)["GraphDriver"]["Data"]["UpperDir"])
        with tempfile.TemporaryDirectory(prefix="belayer-bench-", dir="/var/tmp") as folder:
            watch = Stopwatch()
            client.pause(container)
            try:
                with tarfile.open(Path(folder) / "upper.tar", "w") as archive:
                    archive.add(upper, arcname=".")
                url = client._url("/containers/{0}/checkpoints", container)
                reply = client._post_json(url, data={"CheckpointID": "bench", "Exit": False})
                client._raise_for_status(reply)
            finally:
                client.unpause(container)
            return watch.ms(), "docker pause, tar, checkpoint API, unpause (n=1)"
    except docker.errors.APIError as why:
        return None, f"Docker's checkpoint API refused: {str(why.explanation)[:80]}"
    finally:
        client.close()


def side_by_side(report: Report, host: LocalHost, quick: bool) -> None:
    boxes = [Sandbox.create(paths=host.paths) for _ in range(8)]
    try:
        for box in boxes:
            load(box, SIZES[0])
        rates = []
        with ThreadPoolExecutor(len(boxes)) as pool:
            for _ in range(1 if quick else 5):
                watch = Stopwatch()
                list(pool.map(Sandbox.checkpoint, boxes))
                rates.append(len(boxes) / (watch.ms() / 1000))
        for box in boxes:
            box.kill()
            box.restore()
            verify(box)
        report.add("checkpoints_per_second", "1/s", rates, None, "eight small sandboxes at once, each to READY")
    finally:
        for box in boxes:
            box.destroy()


def warm(gib: int) -> None:
    """Touch memory and give it back. On some virtual machines the first use of a page costs seven times the second,
    which is the hypervisor's time and not that of any row here; on bare metal this changes nothing."""
    with mmap.mmap(-1, gib << 30) as memory:
        memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument(
        "--root", type=Path, default=None, help="folder for the store (default: a new one in /var/tmp)"
    )
    options.add_argument("--sizes", default="small,medium,large", help="comma separated")
    options.add_argument(
        "--warm", type=int, default=6, help="GiB of memory to touch beforehand (default 6, 0 for none)"
    )
    arguments = options.parse_args()
    report = Report("checkpoint", versions={"warmed_gib": str(arguments.warm)})
    if arguments.warm:
        warm(arguments.warm)
    config = "[envkeeper]\naction_timeout_s = 300\ncheckpoint_timeout_s = 120\nkeep_checkpoints = 1\n"
    with (
        tempfile.TemporaryDirectory(prefix="bl-bench-", dir=arguments.root or "/var/tmp") as folder,
        LocalHost(Path(folder), config) as host,
    ):
        host.start(("envkeeper",))
        host.wait("envkeeper", lambda: host.answers(host.paths.envkeeper_sock), 60)
        try:
            for size in SIZES:
                if size.name in arguments.sizes.split(","):
                    measure(report, host, size, arguments.quick)
            side_by_side(report, host, arguments.quick)
        except WrongError as why:
            print(f"checkpoint: WRONG RESULT: {why}", file=sys.stderr)
            return 1
    report.write(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
