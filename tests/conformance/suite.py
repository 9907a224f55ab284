"""All cases, and one run of them on one stack: ``python -m tests.conformance.suite --help``.

The run writes its column of docs/sandbox-support.md; the columns of other stacks stay.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from belayer.errors import BelayerError
from tests.conformance.cases import deeds, files, memory, processes, refused, sockets
from tests.conformance.model import Any_, Case, Deed
from tests.conformance.runner import Outcome, Stack, prepare, run_alone, run_exact, run_refusal
from tests.support.envhost import TREE, EnvHost
from tests.support.private_docker import PrivateDocker

THEMES: dict[str, list[Case]] = {
    "files": files.CASES, "sockets": sockets.CASES, "memory": memory.CASES, "processes": processes.CASES,
}  # fmt: skip
RESULTS = Path(__file__).with_name("results")
SYSTEM = "unix:///var/run/docker.sock"


def every() -> list[Any_]:
    found: list[Any_] = [case for cases in THEMES.values() for case in cases]
    return [*found, *refused.CASES, *deeds.CASES]


def run(stack: Stack) -> Iterator[tuple[Any_, Outcome]]:
    """Each case with its outcome, as they come."""
    for cases in THEMES.values():
        yield from theme(stack, cases)
    box = stack.create()
    prepare(box)
    box.checkpoint()
    for refusal in refused.CASES:
        yield refusal, run_refusal(stack, box, refusal)
    stack.destroy(box)
    for deed in deeds.CASES:
        yield deed, run_deed(stack, deed)


def theme(stack: Stack, cases: list[Case]) -> Iterator[tuple[Any_, Outcome]]:
    together = [case for case in cases if not case.unless]
    outcomes = run_exact(stack, together)
    yield from ((case, outcomes[case.name]) for case in together)
    yield from ((case, run_alone(stack, case)) for case in cases if case.unless)


def run_deed(stack: Stack, deed: Deed) -> Outcome:
    try:
        return Outcome(deed.expect, deed.run(stack))
    except (AssertionError, BelayerError) as why:
        return Outcome("wrong", str(why))


def right(case: Any_, outcome: Outcome) -> bool:
    return outcome.how == case.expect or (
        isinstance(case, Case) and bool(case.unless) and outcome.how == "refused by name"
    )


class Column(msgspec.Struct, frozen=True):
    """What one run on one stack has seen. ``outcomes``: case name -> (how, words)."""

    stack: str
    outcomes: dict[str, tuple[str, str]]


def versions(found: dict[str, str]) -> str:
    kernel = found["kernel"].split("-")[0]
    return f"Docker {found['docker']}, CRIU {found['criu']}, kernel {kernel}, cgroup v{found['cgroup']}"


@click.command(help="Run the conformance cases and write this stack's column of docs/sandbox-support.md.")
@click.option("--docker", default=SYSTEM, help="address of the engine")
@click.option(
    "--private", "binaries", type=click.Path(path_type=Path), help="start an engine of its own from these programs"
)
@click.option("--name", required=True, help="file name of the column, for example docker-20")
def main(docker: str, binaries: Path | None, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="bl-conf-", dir="/var/lib") as folder:
        engine = PrivateDocker(Path(folder) / "d", binaries=binaries) if binaries else None
        try:
            if engine is not None:
                engine.start().take_image("belayer-sandbox:base")
                docker = engine.url
            (Path(folder) / "e").mkdir()
            sys.exit(_measure(EnvHost.start(Path(folder) / "e", docker=docker), docker, name))
        finally:
            if engine is not None:
                engine.stop()


def _measure(host: EnvHost, docker: str, name: str) -> int:
    from belayer.config import Envkeeper
    from envkeeper.host import inspect

    seen: dict[str, tuple[str, str]] = {}
    wrong = 0
    try:
        stack = Stack(host, docker)
        words = versions(inspect(Envkeeper(docker=docker), host.paths).versions)
        for case, outcome in run(stack):
            seen[case.name] = (outcome.how, outcome.words)
            wrong += not right(case, outcome)
            print(f"{case.name:12} {outcome.how:18} {case.title}", flush=True)
            if not right(case, outcome):
                print(f"             {outcome.words[:400]}", flush=True)
    finally:
        host.stop()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(Column(words, seen)), indent=1) + b"\n"
    )
    from tests.conformance.document import render

    (TREE / "docs/sandbox-support.md").write_text(render())
    print(f"{len(seen)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
