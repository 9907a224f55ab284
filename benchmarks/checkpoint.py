"""full_checkpoint and full_restore: three sizes, several at once, forks and generations, on several disks, beside
Docker's own API and podman in the same run.

``python -m benchmarks.checkpoint [--quick] [--json FILE] [--plot FILE] [--disks host,xfs,tmpfs] [--podman] ...``

Each disk has a Docker Engine of its own; its data root and the checkpoints both lie on it. Rows of the first disk have
plain names, those of others end in its kind. Sizes: memory of one process and files of the upper layer (random).

- ``frozen_*``: milliseconds in which no process of the sandbox ran. Baseline: the same through Docker's checkpoint API
  (``engine_path = "docker_api"``; podman's whole command in rows of its own).
- ``checkpoint_total_*``: from the call to READY, hashed and on disk.
- ``restore_*``: from the call to a proven, serving sandbox. Baseline: the same through Docker's API.
- ``start_plain``: a fresh container of the same image in the same envkeeper, which brings nothing back.
- ``checkpoints_per_second``: eight (``_16``: sixteen) small sandboxes checkpointed side by side, each to READY.
- ``fork_16_*``: one checkpoint to sixteen sandboxes, until all of them serve.
- ``generation_*``: restore, act, checkpoint, ten times in a row; milliseconds of one checkpoint and restore.

Every restore is verified: hash of the process's memory, hashes of all files, a log without a gap that goes on, the
shell's variable. A wrong one ends the run with exit code 1. The JSON also holds the phases of each row, and
--plot writes a second picture of them (``FILE-phases``). --within MINUTES gives every part its share of that time: it
ends early, after three repetitions at least, and n in the table says how many there were.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from belayer.clock import Stopwatch
from belayer.errors import HostUnfit
from belayer.localhost import LocalHost
from belayer.sandbox import Sandbox
from benchmarks import disks, podman
from benchmarks.report import Report, parser
from benchmarks.sandbox_load import SIZES, Size, WrongError, load, run, verify

CONFIG = """[envkeeper]
docker = "{docker}"
engine_path = "{path}"
action_timeout_s = 600
checkpoint_timeout_s = 300
restore_timeout_s = 300
keep_checkpoints = 1
"""


# Parts of one disk's time with --within; what is missing to 1 is for starts, loading and the last repetition of each.
SHARES = {
    **{"api_small": 0.03, "api_medium": 0.06, "api_large": 0.05, "plain": 0.02},
    **{"small": 0.06, "medium": 0.10, "large": 0.22, "at_once_8": 0.04, "at_once_16": 0.05, "generations": 0.05},
    **{"fork_small": 0.04, "fork_medium": 0.05},
}
LEAST = 3  # repetitions, whatever the time


@dataclass
class Series:
    """Milliseconds of the rounds of one size."""

    frozen: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    frozen_phases: list[dict[str, float]] = field(default_factory=list)
    restore_phases: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Bench:
    """One disk under measurement. ``tail``: what the names of its rows end in. ``warm``: GiB. ``within_s``: seconds for
    all of it, 0 for as long as it takes."""

    report: Report
    docker: str
    folder: Path
    tail: str
    quick: bool
    phases: dict[str, dict[str, float]]
    warm: int = 0
    within_s: float = 0.0

    def repeat(self, part: str, n: int, least: int = LEAST) -> Iterator[int]:
        """0 to n - 1, as far as the time of ``part`` goes; ``least`` of them always."""
        watch = Stopwatch()
        for number in range(n):
            if self.within_s and number >= least and watch.ms() > 1000 * self.within_s * SHARES[part]:
                return
            yield number

    @contextlib.contextmanager
    def host(self, path: str = "fast") -> Iterator[LocalHost]:
        """An envkeeper on this disk; gone afterwards, with its sandboxes."""
        root = self.folder / ("h" if path == "fast" else "a")
        with LocalHost(root, CONFIG.format(docker=self.docker, path=path)) as made:
            made.start(("envkeeper",))
            made.wait("envkeeper", lambda: made.answers(made.paths.envkeeper_sock), 60)
            yield made

    def rounds(self, host: LocalHost, size: Size, n: int, part: str, *, fresh_each: bool = True) -> Series:
        """Checkpoint, kill, restore, verify."""
        out = Series()
        box = Sandbox.create(memory_mb=4096, pids=256, cpus=2.0, paths=host.paths)
        try:
            load(box, size)
            for number in self.repeat(part, n, LEAST if fresh_each else n):
                self._warm_for(size)
                made = box.checkpoint([{"round": number}])
                out.frozen.append(made.frozen_ms)
                out.total.append(made.total_ms)
                out.frozen_phases.append(made.phases_ms)
                if fresh_each:
                    run(box, "X=lost")  # nothing of this may be seen again
                box.kill()
                self._warm_for(size)
                watch = Stopwatch()
                back = box.restore_info()
                out.restored.append(watch.ms())
                out.restore_phases.append(back.phases_ms)
                if back.boundary != made.boundary or back.context_digest != made.context_digest:
                    raise WrongError(f"restored boundary {back.boundary}, captured {made.boundary}")
                verify(box)
        finally:
            box.destroy()
        return out

    def _warm_for(self, size: Size) -> None:
        """Just before: a guest that reports its free pages to the hypervisor has cold ones again after two seconds."""
        if size.memory_mb >= 1024:
            warm(min(self.warm, 3))

    def add(self, metric: str, unit: str, values: list[float], base: list[float] | None = None, note: str = "") -> None:
        if values:
            self.report.add(f"{metric}{self.tail}", unit, values, statistics.median(base) if base else None, note)

    def keep_phases(self, metric: str, rows: list[dict[str, float]]) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        self.phases[f"{metric}{self.tail}"] = {
            name: round(statistics.median(row.get(name, 0.0) for row in rows), 3) for name in names
        }

    def size(self, host: LocalHost, size: Size, base: Series) -> None:
        seen = self.rounds(host, size, size.quick if self.quick else size.n, size.name)
        note = str(size) + (f"; baseline: Docker's checkpoint API (n={len(base.frozen)})" if base.frozen else "")
        self.add(f"frozen_{size.name}", "ms", seen.frozen, base.frozen, note)
        self.add(f"checkpoint_total_{size.name}", "ms", seen.total, base.total, "call to READY, hashed and on disk")
        self.add(f"restore_{size.name}", "ms", seen.restored, base.restored, note)
        self.keep_phases(f"frozen_{size.name}", seen.frozen_phases)
        self.keep_phases(f"restore_{size.name}", seen.restore_phases)

    def plain_starts(self, host: LocalHost) -> None:
        took = []
        for _ in self.repeat("plain", 2 if self.quick else 10):
            watch = Stopwatch()
            fresh = Sandbox.create(paths=host.paths)
            took.append(watch.ms())
            fresh.destroy()
        self.add("start_plain", "ms", took, None, "a fresh container, nothing brought back")

    def at_once(self, host: LocalHost, count: int) -> None:
        boxes = [Sandbox.create(paths=host.paths) for _ in range(count)]
        try:
            for box in boxes:
                load(box, SIZES[0])
            rates, frozen = [], []
            with ThreadPoolExecutor(count) as pool:
                for _ in self.repeat(f"at_once_{count}", 1 if self.quick else 10):
                    watch = Stopwatch()
                    made = list(pool.map(Sandbox.checkpoint, boxes))
                    rates.append(count / (watch.ms() / 1000))
                    frozen += [one.frozen_ms for one in made]
                for box in boxes:
                    box.kill()
                watch = Stopwatch()
                list(pool.map(Sandbox.restore, boxes))
                restores = count / (watch.ms() / 1000)
            for box in boxes:
                verify(box)
        finally:
            for box in boxes:
                box.destroy()
        name = "" if count == 8 else f"_{count}"
        self.add(f"checkpoints_per_second{name}", "1/s", rates, None, f"{count} small sandboxes at once, each to READY")
        self.add(f"frozen_at_once{name}", "ms", frozen, None, f"of each, {count} at once")
        self.add(f"restores_per_second{name}", "1/s", [restores], None, f"{count} distinct at once, all verified")

    def forks(self, host: LocalHost, size: Size) -> None:
        box = Sandbox.create(memory_mb=4096, pids=256, cpus=2.0, paths=host.paths)
        took = []
        try:
            load(box, size)
            box.checkpoint()
            for _ in self.repeat(f"fork_{size.name}", 1 if self.quick else 3, least=1):
                watch = Stopwatch()
                made = box.fork(16)
                took.append(watch.ms() / 1000)
                try:
                    for fork in made:
                        verify(fork)
                finally:
                    for fork in made:
                        fork.destroy()
        finally:
            box.destroy()
        self.add(f"fork_16_{size.name}", "s", took, None, f"{size}; each fork verified")

    def generations(self, host: LocalHost) -> None:
        seen = self.rounds(host, SIZES[0], 10, "generations", fresh_each=False)
        self.add("generation_checkpoint", "ms", seen.total, seen.total[:1], "ten in a row; baseline: the first")
        self.add("generation_restore", "ms", seen.restored, seen.restored[:1], "ten in a row; baseline: the first")


def measure(bench: Bench, options: argparse.Namespace) -> None:
    sizes = [size for size in SIZES if size.name in options.sizes.split(",")]
    base = {size.name: Series() for size in sizes}
    if not options.no_docker_api:
        with bench.host("docker_api") as host:
            for size in sizes:
                if not bench.quick or size.name == "small":
                    n = {"small": 10, "medium": 3, "large": 1}[size.name]
                    base[size.name] = bench.rounds(host, size, 1 if bench.quick else n, f"api_{size.name}")
    with bench.host() as host:
        bench.plain_starts(host)
        for size in sizes:
            bench.size(host, size, base[size.name])
        if "small" in base:
            bench.at_once(host, 8)
            if not bench.quick:
                bench.at_once(host, 16)
            bench.generations(host)
        for size in sizes:
            if size.name == "small" or (size.name == "medium" and not bench.quick):
                bench.forks(host, size)


def measure_podman(report: Report, options: argparse.Namespace) -> None:
    for size in SIZES:
        if size.name in options.sizes.split(",") and not (options.quick and size.name != "small"):
            n = 1 if options.quick or size.name == "large" else 5
            frozen, restored = podman.measure(size, n, options.root)
            report.add(
                f"podman_checkpoint_{size.name}", "ms", frozen, None, f"{size}; the whole command, ends its source"
            )
            report.add(f"podman_restore_{size.name}", "ms", restored, None, "the whole command, verified")


def plot_phases(phases: dict[str, dict[str, float]], path: Path) -> None:
    """One bar per row, its phases side by side in order."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.45 * len(phases)))
    names = list(dict.fromkeys(name for row in phases.values() for name in row))
    colours = dict(zip(names, pyplot.get_cmap("tab20").colors * 2, strict=False))
    for at, row in enumerate(phases.values()):
        left = 0.0
        for name, ms in row.items():
            axes.barh(at, ms, left=left, color=colours[name])
            left += ms
    axes.set_yticks(range(len(phases)), list(phases))
    axes.invert_yaxis()
    axes.set_xlabel("ms (median of each phase; copy runs beside dump, publish after the thaw)")
    axes.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names], names, fontsize=7, ncols=4, loc="best"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def warm(gib: int) -> None:
    """Touch memory and give it back. On some virtual machines the first use of a page costs seven times the second,
    which is the hypervisor's time and not that of any row here; on bare metal this changes nothing."""
    if gib:
        with mmap.mmap(-1, gib << 30) as memory:
            memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)


def arguments() -> argparse.Namespace:
    options = parser(__doc__ or "")
    options.add_argument("--root", type=Path, default=Path("/var/lib"), help="folder for the disks (a short path)")
    options.add_argument(
        "--disks", default="", help=f"comma separated: {', '.join(disks.KINDS)} (default: all; quick: host)"
    )
    options.add_argument("--disk-gib", type=int, default=14, help="size of the xfs and tmpfs disks")
    options.add_argument(
        "--within", type=float, default=0.0, help="minutes for each disk; fewer repetitions where needed (0: no limit)"
    )
    options.add_argument("--sizes", default="", help="comma separated (default: all; quick: small)")
    options.add_argument("--podman", action="store_true", help="measure podman too (it must be installed)")
    options.add_argument("--no-docker-api", action="store_true", help="leave Docker's own way out (it takes minutes)")
    options.add_argument(
        "--docker28", action="store_true", help="the engine of setup/docker28.sh instead of the system's"
    )
    options.add_argument("--warm", type=int, default=6, help="GiB of memory to touch beforehand (0 for none)")
    found = options.parse_args()
    found.disks = found.disks or ("host" if found.quick else ",".join(disks.KINDS))
    found.sizes = found.sizes or ("small" if found.quick else ",".join(size.name for size in SIZES))
    unknown = set(found.disks.split(",")) - set(disks.KINDS) | set(found.sizes.split(",")) - {s.name for s in SIZES}
    if unknown:
        options.error(f"unknown: {', '.join(sorted(unknown))}")
    return found


def main() -> int:
    options = arguments()
    report = Report("checkpoint", versions={"warmed_gib": str(options.warm)})
    phases: dict[str, dict[str, float]] = {}
    try:
        if options.podman:
            report.versions["podman"] = podman.check()
        warm(options.warm)
        for number, kind in enumerate(options.disks.split(",")):
            binaries = Path("/opt/belayer/docker28/bin") if options.docker28 else None
            with disks.disk(kind, options.root, options.disk_gib) as folder, disks.engine(folder, binaries) as docker:
                report.versions[f"disk_{number}"] = f"{kind}: {disks.kind_of(folder)}"
                report.versions["docker"] = docker.client().version()["Version"]
                tail, within_s = f"_{kind}" if number else "", options.within * 60
                bench = Bench(report, docker.url, folder, tail, options.quick, phases, options.warm, within_s)
                # Docker 28 cannot bring a container back that has a network namespace of its own.
                options.no_docker_api |= options.docker28
                measure(bench, options)
        if options.podman:
            measure_podman(report, options)
    except HostUnfit as why:
        print(f"checkpoint: {why}", file=sys.stderr)
        return 2
    except WrongError as why:
        print(f"checkpoint: WRONG RESULT: {why}", file=sys.stderr)
        return 1
    report.extra["phases"] = phases
    report.write(options)
    if options.plot:
        plot_phases(phases, options.plot.with_name(f"{options.plot.stem}-phases{options.plot.suffix}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
