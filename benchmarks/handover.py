"""Break a main worker in mid-generation: how long until its client sees the next token, and what are the steps?

    python -m benchmarks.handover [--quick] [--n N] [--only tiny,tiny_reuse,smollm2,smollm2_reuse]
                                  [--kinds kill,stop,stall,stuck] [--contexts 100,400,1500] [--json FILE] [--plot FILE]

Each repetition streams one seeded request, breaks the main after some of its tokens (``kill``: SIGKILL; ``stop``:
SIGSTOP; ``stall``: blocked in a step; ``stuck``: the loop goes round and schedules nothing), and reads on to the end.
The clock starts when the fault is asked for and ends at the first token that the new main made, as the client reads it
over HTTP. A repetition counts only if its tokens equal those of the unfailed run; one that differs is exit status 1.

Two models: SmolLM2-135M, where re-reading the context dominates, and a tiny random one, where the mechanism does; each
also with ``kv_reuse``, where the new main finds the context in the arena. One host for all repetitions of a model.
Baselines of the same run: a cold restart of the leanest engine and of vLLM's own server, from exec to first token.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from belayer.clock import Stopwatch
from belayer.errors import BelayerError
from benchmarks import tiny
from benchmarks.cold import engine_seconds, server_seconds
from benchmarks.handover_plot import plot
from benchmarks.handover_turns import Bench, Turns
from benchmarks.report import Report, parser
from benchmarks.soak_host import SoakHost

MODELS = Path(__file__).parents[1] / ".cache/models"
SMOL = MODELS / "SmolLM2-135M-Instruct"
HANG_LIMIT_S = 1.0
SLOT = f"hang_limit_s = {HANG_LIMIT_S}\n"
RUNS = ("tiny", "tiny_reuse", "smollm2", "smollm2_reuse")
KINDS = {
    "kill": "",
    "stop": f"hang limit {HANG_LIMIT_S:g} s included",
    "stall": f"hang limit {HANG_LIMIT_S:g} s included",
    "stuck": f"{5 * HANG_LIMIT_S:g} s without a step included",
}
MIDDLE = 400  # tokens of context, of the figures without "@"


@dataclass
class Figures:
    """Of one run: by kind and context; seconds of cold restarts."""

    turns: dict[tuple[str, int], Turns] = field(default_factory=dict)
    engines: list[float] = field(default_factory=list)
    servers: list[float] = field(default_factory=list)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def options() -> argparse.ArgumentParser:
    out = parser(__doc__ or "")
    out.add_argument("--n", type=int, default=20, help="repetitions of each kind at each context")
    out.add_argument("--only", type=words, default=list(RUNS), help=f"of {','.join(RUNS)}")
    out.add_argument("--kinds", type=words, default=list(KINDS), help=f"of {','.join(KINDS)}")
    out.add_argument("--contexts", type=lambda text: [int(w) for w in words(text)], default=[100, 400, 1500])
    out.add_argument("--colds", type=int, default=3, help="cold restarts of each baseline of each model; 0: none")
    return out


def measure(run: str, wanted: argparse.Namespace, figures: Figures) -> None:
    model = SMOL if run.startswith("smollm2") else tiny.make(MODELS / "tiny-qwen3", SMOL)
    root = Path(tempfile.mkdtemp(prefix="belayer-bench-"))
    slot = SLOT + ("kv_reuse = true\n" if run.endswith("_reuse") else "")
    with SoakHost(root, model, slots=1, slot=slot) as host:
        host.up()
        for context in wanted.contexts:
            bench = Bench(host, context)
            for kind in wanted.kinds:
                turns, watch = figures.turns.setdefault((kind, context), Turns()), Stopwatch()
                for _ in range(wanted.n):
                    bench.turn(kind, turns)
                print(
                    f"{run} {kind} at {context}: {[round(s, 3) for s in turns.seconds]} s, {turns.different} different "
                    f"({watch.ms() / 1e3 / wanted.n:.1f} s a turn)",
                    file=sys.stderr,
                )
    shutil.rmtree(root)
    if not run.endswith("_reuse"):
        figures.engines += [engine_seconds(model) for _ in range(wanted.colds)]
        figures.servers += [server_seconds(model) for _ in range(min(2, wanted.colds))]


def tell(report: Report, run: str, figures: Figures, beside: Figures) -> None:
    """``beside``: whose cold restarts are the baseline. SmolLM2's figures have the plain names."""
    suffix = run.removeprefix("smollm2")
    suffix = f"_{run}" if suffix == run else suffix
    server, engine = min(beside.servers, default=None), min(beside.engines, default=None)
    for (kind, context), turns in figures.turns.items():
        at = "" if context == MIDDLE else f"@{context}"
        report.add(f"answers_different {kind}{suffix}{at}", "", [turns.different]) if turns.different else None
        if not turns.seconds:
            continue
        note = KINDS[kind] or "baseline: best cold_restart_vllm_server"
        report.add(f"{kind}_to_token{suffix}{at}", "s", turns.seconds, server, note)
        if kind == "kill" and engine is not None:
            report.add(f"kill_to_token{suffix}{at}_vs_engine", "s", turns.seconds, engine, "best cold_restart_engine")
        if context == MIDDLE or len({where for _, where in figures.turns}) == 1:
            for name, values in turns.steps.items():
                report.add(f"step{suffix} {kind}: {name}", "ms", [max(value, 1e-3) for value in values])
    rearms = [value for turns in figures.turns.values() for value in turns.rearm]
    if rearms:
        report.add(f"rearm{suffix}", "s", rearms, None, "new main serves -> new shadow ready")
    if figures.engines:
        report.add(f"cold_restart_engine{suffix}", "s", figures.engines)
        report.add(f"cold_restart_vllm_server{suffix}", "s", figures.servers)


def main(argv: list[str] | None = None) -> int:
    wanted = options().parse_args(argv)
    unknown = (set(wanted.only) - set(RUNS)) | (set(wanted.kinds) - set(KINDS))
    if unknown:
        print(f"handover: no such run or kind: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if wanted.quick:
        wanted.n, wanted.colds = min(wanted.n, 1), min(wanted.colds, 1)
    report, all_figures = Report("handover"), dict[str, Figures]()
    for run in wanted.only:
        figures = all_figures.setdefault(run, Figures())
        measure(run, wanted, figures)
        tell(report, run, figures, all_figures.get(run.removesuffix("_reuse"), figures))
    report.extra["steps_ms"] = {
        f"{run} {kind} {context}": turns.steps
        for run, figures in all_figures.items()
        for (kind, context), turns in figures.turns.items()
    }
    png, wanted.plot = wanted.plot, None
    report.write(wanted)
    if png:
        plot(png, {run: (f.turns, f.servers, f.engines) for run, f in all_figures.items()})
    return int(any(turns.different for figures in all_figures.values() for turns in figures.turns.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BelayerError as why:
        print(f"handover: {why}", file=sys.stderr)
        sys.exit(1)
