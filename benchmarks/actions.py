"""What an action costs beside ``docker exec``, and what a sandbox costs with and without a pool, in one run.

``python -m benchmarks.actions [--quick] [--json FILE] [--plot FILE] [--root DIR]``

- ``action_session``: ``true`` in a session's shell, from the client's call to its committed observation (record
  written, connection closed). Baseline: ``docker exec`` of ``sh -c true`` in a container of the same
  image over the same Docker's API, which keeps no state and commits nothing.
- ``action_direct``: ``true`` as a program of its own. Same baseline.
- ``action_other_user``: a session of another user.
- ``action_output_1mb``: one MiB of output. Baseline: the same through ``docker exec``.
- ``create``, ``create_pooled``: a sandbox that answers; from the image, and from a full pool. Baseline of the second
  is the first.
- ``upload_10mb``: ten files of one MB.

Every answer is compared with what it must be; a wrong one ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import docker

from belayer.clock import Stopwatch
from belayer.localhost import LocalHost
from belayer.paths import Paths
from belayer.sandbox import Sandbox
from benchmarks.report import Report, parser
from envkeeper.host import owner_of

IMAGE = "belayer-sandbox:base"
MEGABYTE = "head -c 1048576 /dev/zero | tr '\\0' x"


class WrongError(Exception):
    """An answer that is not what it must be."""


def times(count: int, once: Callable[[], object], wanted: object) -> list[float]:
    """Milliseconds of each call; the first is not counted (it starts the shell, the pool, the connection)."""
    taken = []
    for number in range(count + 1):
        watch = Stopwatch()
        seen = once()
        if number:
            taken.append(watch.ms())
        if seen != wanted:
            raise WrongError(f"{str(seen)[:200]!r} instead of {str(wanted)[:50]!r}")
    return taken


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure_docker(count: int) -> tuple[list[float], list[float]]:
    """``docker exec`` of nothing and of one MiB of output."""
    client = docker.APIClient()
    container = client.create_container(
        IMAGE, ["sleep", "600"], host_config=client.create_host_config(network_mode="none")
    )
    try:
        client.start(container)

        def run(command: str) -> tuple[int, int]:
            made = client.exec_create(container, ["sh", "-c", command])
            out = client.exec_start(made)
            return client.exec_inspect(made)["ExitCode"], len(out)

        return times(count, lambda: run("true"), (0, 0)), times(count, lambda: run(MEGABYTE), (0, 1 << 20))
    finally:
        client.remove_container(container, force=True)
        client.close()


def measure_actions(report: Report, box: Sandbox, count: int) -> None:
    nothing, output = measure_docker(count)

    def end(*command: str, **more: str) -> tuple[int, int]:
        seen = box.exec(command if len(command) > 1 else command[0], max_output=2 << 20, **more)  # type: ignore[arg-type]
        return seen.exit_code, seen.stdout_bytes

    bare, large = median(nothing), median(output)
    report.add("docker_exec", "ms", nothing, note="docker exec sh -c true")
    report.add("action_session", "ms", times(count, lambda: end("true"), (0, 0)), bare)
    report.add("action_direct", "ms", times(count, lambda: end("/bin/sh", "-c", "true"), (0, 0)), bare)
    report.add("action_other_user", "ms", times(count, lambda: end("true", session="n", user="nobody"), (0, 0)), bare)
    report.add("action_output_1mb", "ms", times(count, lambda: end(MEGABYTE), (0, 1 << 20)), large)


def measure_files(report: Report, box: Sandbox, count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        for number in range(10):
            (Path(name) / str(number)).write_bytes(os.urandom(1_000_000))
        report.add("upload_10mb", "ms", times(count, lambda: box.upload(name, "/srv/up"), 10))


def measure_creation(report: Report, root: Path, pooled: Path, count: int) -> None:
    def made(at: Path) -> str:
        box = Sandbox.create(paths=Paths(at))
        seen = box.exec("echo ready").stdout
        kept.append(box)
        return seen

    kept: list[Sandbox] = []
    try:
        cold = times(count, lambda: made(root), "ready\n")
        report.add("create", "ms", cold, note="with its first action")
        report.add("create_pooled", "ms", times(count, lambda: made(pooled), "ready\n"), median(cold))
    finally:
        for box in kept:
            box.destroy()


def measure(arguments: argparse.Namespace, root: Path) -> Report:
    report, count = Report("actions"), 20 if arguments.quick else 300
    few = 3 if arguments.quick else 15
    plain, pooled = root / "a", root / "b"
    with _host(plain), _host(pooled, f"pool = {few + 2}\n") as other:
        box = Sandbox.create(paths=Paths(plain))
        try:
            measure_actions(report, box, count)
            measure_files(report, box, few)
            _wait_for_pool(other, few + 2)
            measure_creation(report, plain, pooled, few)
        finally:
            box.destroy()
    return report


@contextlib.contextmanager
def _host(root: Path, extra: str = "") -> Iterator[LocalHost]:
    root.mkdir()
    with LocalHost(root, f"[envkeeper]\n{extra}") as host:
        host.start(("envkeeper",))
        host.wait("envkeeper", lambda: host.answers(host.paths.envkeeper_sock), 60)
        yield host


def _wait_for_pool(host: LocalHost, size: int) -> None:
    """Waiting sandboxes are in no list of envkeeper's; Docker knows them by their label."""
    client = docker.APIClient()
    label = f"belayer={owner_of(host.paths)}"

    def full() -> bool:
        found = client.containers(filters={"label": label})
        return sum(str(row["Labels"]["belayer.sandbox"]).startswith("pool-") for row in found) >= size

    try:
        host.wait("the pool", full, 120)
    finally:
        client.close()


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument(
        "--root", type=Path, default=None, help="folder for the hosts (default: a new one in /var/tmp)"
    )
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="bl-act-", dir=arguments.root or "/var/tmp") as folder:
        try:
            report = measure(arguments, Path(folder))
        except WrongError as why:
            print(f"actions: WRONG RESULT: {why}", file=sys.stderr)
            return 1
    report.write(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
