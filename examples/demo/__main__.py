"""``make demo``: the same four trajectories twice, once undisturbed, once with three faults; they must be equal.

Faults: SIGKILL of a main worker in the middle of a generation, SIGSTOP of another main worker, SIGKILL of a sandbox in
the middle of an action. A cold restart of the same engine is measured in the same run. Exit 0 only if every equality
holds; 1 when one does not; 2 when the machine cannot run it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from belayer import localhost
from belayer.clock import Stopwatch
from belayer.daemon import say
from belayer.errors import BelayerError, ConfigInvalid, HostUnfit
from belayer.localhost import ALL, LocalHost
from belayer.messages.common import FaultProof
from belayer.messages.control import HostStatusReply, Incident, IncidentList, InjectWorkerFault, ListIncidents
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from benchmarks.cold import engine_seconds
from examples.demo.agents import Once, Result, Thought, run_all

MODEL = Path(__file__).parents[2] / ".cache/models/SmolLM2-135M-Instruct"
CONTEXT = 250  # tokens; about what a trajectory has read when the first fault strikes


class Faults:
    """Where and when things break: each once, each with proof."""

    def __init__(self, host: LocalHost, sandboxes: dict[int, Sandbox]) -> None:
        self._host, self._sandboxes = host, sandboxes
        self.kill = Once(lambda: self._worker("kill", 0))
        self.stop = Once(lambda: self._worker("stop", 1))
        self.box = Once(self._sandbox)

    def hook(self, trajectory: int, turn: int, what: str, count: int) -> None:
        if what == "token" and turn == 1 and count == 12:
            self.kill.fire()
        if what == "token" and turn == 2 and count == 12 and self.kill.result is not None:
            self.stop.fire()
        if what == "action" and turn == 2 and trajectory == 2:
            self.box.fire()

    def _worker(self, kind: str, slot: int) -> FaultProof:
        message = InjectWorkerFault(slot=f"slot{slot}", kind=kind)
        return call_sync(self._host.paths.belayerd_sock, message, FaultProof, 10.0)

    def _sandbox(self) -> FaultProof:
        """In the middle of the action: its file has not been written yet, its sleep is running."""
        target = Sandbox.attach(self._sandboxes[2].sandbox_id, paths=self._host.paths)
        try:
            self._host.wait("a running action", lambda: _acting(target, self._host), 10.0)
            return target.kill()
        finally:
            target.close()


def _acting(target: Sandbox, host: LocalHost) -> bool | None:
    probe = Sandbox.attach(target.sandbox_id, paths=host.paths)
    probe.close()
    return True if probe.info.state == "acting" else None


def pause_of(results: list[Result], at: float) -> float:
    """Seconds from the fault to the next token of the stream that it interrupted: the end of the longest gap among
    the streams that were under way then."""
    worst = (0.0, 0.0)
    for result in results:
        for thought in result.thoughts:
            if thought.at[0] < at < thought.at[-1]:
                worst = max(worst, _gap(thought, at))
    return worst[1] - at if worst[1] else float("nan")


def _gap(thought: Thought, at: float) -> tuple[float, float]:
    pairs = [(b - a, b) for a, b in zip(thought.at, thought.at[1:], strict=False) if b > at]
    return max(pairs, default=(0.0, 0.0))


def main() -> int:
    out = Console(width=140)
    if not (MODEL / "config.json").is_file():
        raise ConfigInvalid(f"no model at {MODEL}", remedy="run `make setup`")
    root = Path(tempfile.mkdtemp(prefix="belayer-demo-"))
    config = localhost.demo_config(MODEL, localhost.free_port(), slots=2)
    total = Stopwatch()
    out.print(
        "[bold]Belayer demo[/]: 4 trajectories, 2 slots (main + shadow each), 3 faults. The model writes the thoughts;"
    )
    out.print("the actions are a fixed script, since a model of 135M parameters cannot write code.")
    with LocalHost(root, config) as host:
        try:
            code = _play(out, host)
        except BelayerError:
            out.print(f"  the logs are kept: {host.paths.state / 'log'}")
            raise
    if code == 0:
        shutil.rmtree(root)
    else:
        out.print(f"  logs and incidents are kept: {root}")
    out.print(f"{'[green]all equal' if code == 0 else '[red]NOT equal'}[/], {total.ms() / 1e3:.0f} s in all")
    return code


def _play(out: Console, host: LocalHost) -> int:
    with out.status("starting owners, router, supervisor, sandbox keeper; importing vLLM; forking 4 workers ..."):
        watch = Stopwatch()
        host.start(ALL)
        status = host.until_protected()
        host.wait("envkeeper", lambda: host.answers(host.paths.envkeeper_sock), 60.0)
    out.print(f"  up and protected after {watch.ms() / 1e3:.0f} s: {', '.join(row.slot for row in status.slots)}")
    url = status.router_url
    with out.status("the unfailed run ..."):
        watch = Stopwatch()
        calm = run_all(url, host.paths, lambda *_: None, {})
    out.print(
        f"  unfailed run: {watch.ms() / 1e3:.0f} s, {sum(len(t.tokens) for r in calm for t in r.thoughts)} tokens"
    )
    with out.status("the same again, with a SIGKILL, a SIGSTOP and a sandbox killed ..."):
        watch = Stopwatch()
        sandboxes: dict[int, Sandbox] = {}
        faults = Faults(host, sandboxes)
        stormy = run_all(url, host.paths, faults.hook, sandboxes)
    out.print(f"  run with faults: {watch.ms() / 1e3:.0f} s")
    happened = [fault.join() for fault in (faults.kill, faults.stop, faults.box)]
    for fault in (faults.kill, faults.stop, faults.box):
        if fault.error is not None:
            raise fault.error
    with out.status("waiting for the new shadows ..."):
        after = host.until_protected()
    incidents = call_sync(host.paths.belayerd_sock, ListIncidents(), IncidentList, 10.0).incidents
    with out.status("a cold restart of the same engine, for comparison ..."):
        cold = engine_seconds(MODEL, CONTEXT)
    return _tell(out, calm, stormy, faults, happened, incidents, after, cold)


def _tell(
    out: Console,
    calm: list[Result],
    stormy: list[Result],
    faults: Faults,
    happened: list[bool],
    incidents: tuple[Incident, ...],
    after: HostStatusReply,
    cold: float,
) -> int:
    by_worker = {row.detail.split()[1]: row for row in incidents if row.injected}
    _steps(out, [row for row in reversed(incidents) if row.injected and row.outcome != "open"])
    table = Table(title="What was broken and what was lost", title_justify="left", show_lines=True)
    for column in (
        "injected",
        "seen",
        "next token / ready again",
        "cold restart",
        "ratio",
        "equal to the unfailed run",
    ):
        table.add_column(column, overflow="fold")
    tokens = [a.tokens == b.tokens for x, y in zip(calm, stormy, strict=True) for a, b in _pairs(x, y)]
    observed = all(x.observations == y.observations for x, y in zip(calm, stormy, strict=True))
    for name, fault in (("SIGKILL main of slot0", faults.kill), ("SIGSTOP main of slot1", faults.stop)):
        pause = pause_of(stormy, fault.at)
        table.add_row(
            f"{name} in mid-generation",
            fault.result.seen if fault.result else "did not happen",
            f"{pause * 1e3:.0f} ms",
            f"{cold:.1f} s",
            f"{cold / pause:.0f}x",
            f"tokens: {_yes(all(tokens))}",
        )
    restores = [info for result in stormy for info in result.restores]
    contents = [x.manifest == y.manifest for x, y in zip(calm, stormy, strict=True)]
    for info in restores:
        table.add_row(
            "SIGKILL of a sandbox in mid-action",
            faults.box.result.seen if faults.box.result else "did not happen",
            f"restored to boundary {info.boundary} in {info.total_ms:.0f} ms ({info.proof})",
            "-",
            "-",
            f"sandbox content: {_yes(all(contents))}; observations: {_yes(observed)}",
        )
    out.print(table)
    checkpoints = [c.frozen_ms for result in stormy for c in result.checkpoints]
    out.print(
        f"  {len(tokens)} turns, {len(checkpoints)} checkpoints while the model was thinking "
        f"(frozen {min(checkpoints):.0f}-{max(checkpoints):.0f} ms), {stormy[0].files} entries compared per sandbox; "
        f"re-armed in {', '.join(f'{row.rearm_ms:.0f} ms' for row in after.slots)}"
    )
    facts = {
        "every fault happened": all(happened),
        "tokens equal": bool(tokens) and all(tokens),
        "observations equal": observed,
        "sandbox contents equal": all(contents),
        "the killed sandbox was restored once": len(restores) == 1,
        "both incidents on record": len(by_worker) >= 2,
    }
    for fact, holds in facts.items():
        if not holds:
            out.print(f"  [red]FAILED: {fact}[/]")
    return 0 if all(facts.values()) else 1


def _pairs(x: Result, y: Result) -> list[tuple[Thought, Thought]]:
    return list(zip(x.thoughts, y.thoughts, strict=True))


def _steps(out: Console, incidents: list[Incident]) -> None:
    table = Table(title="Handovers, step by step (ms)", title_justify="left")
    table.add_column("incident")
    names = list(dict.fromkeys(step.step for row in incidents for step in row.steps))
    for name in (*names, "total"):
        table.add_column(name, justify="right")
    for row in incidents:
        spent = {step.step: step.ms for step in row.steps}
        table.add_row(
            f"{row.slot} {row.cause}", *(f"{spent.get(name, 0.0):.1f}" for name in names), f"{row.total_ms:.0f}"
        )
    out.print(table)


def _yes(fact: bool) -> str:
    return "[green]yes[/]" if fact else "[red]NO[/]"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigInvalid, HostUnfit) as why:
        sys.exit(say(why))
    except BelayerError as why:
        print(f"demo: {why}", file=sys.stderr)
        sys.exit(1)
