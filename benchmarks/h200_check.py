"""``python -m benchmarks.h200_check``: state isolation and handover on one GPU, in one run of bounded length.

--fake runs all of it here on the CPU over the fake driver (a minute; no figure means anything for a GPU), --look says
what of the needed packages is missing, --pack FILE writes a tar to carry. Results grow in OUT/results.jsonl, a line per
stage; at the end come OUT/summary.json and OUT/report.md. Exit 0: every check held; 1: one did not; 2: this host
cannot. A stage that cannot be tried here is skipped by name (S7 without --model, or without vLLM for CUDA)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from belayer.clock import Stopwatch, monotonic
from belayer.errors import BelayerError, HostUnfit
from benchmarks.h200 import aftermath, failures, pack, stages, vllm_stage, weights_stage
from benchmarks.h200.bench import Bench
from benchmarks.h200.plan import named
from benchmarks.h200.record import Record, Stage, StageTimeout, within
from benchmarks.h200.wire import Gone
from benchmarks.report import machine, package_versions
from gpuowner.backends import oneshot
from gpuowner.backends.driver import REAL

Work = Callable[[Bench, Stage], None]
WORK: dict[str, Work] = {
    "S0": stages.probe_machine,
    "T1": stages.lifetime,
    "S1": stages.load,
    "S2": stages.main_engine,
    "S3": stages.shadow_cost,
    "S4": failures.failures,
    "S5": aftermath.baselines,
    "S6": aftermath.owner_death,
    "W1": weights_stage.weights,
    "S7": vllm_stage.worker,
}
WITH_MODEL = ("S0", "S7")  # an engine of vLLM takes its own minutes, and the whole card
FAKE_BYTES = 2 << 30
NEEDS = {"S2": "S1", "S3": "S2", "S4": "S2", "S5": "S2", "S6": "S2"}  # what must not have broken off


def run_stage(bench: Bench, name: str, work: Work, left_s: float) -> Stage:
    stage = Stage(name)
    try:
        with within(min(bench.plan.deadlines[name], left_s), name):
            work(bench, stage)
    except (StageTimeout, BelayerError, Gone, RuntimeError, OSError) as why:
        stage.error = f"{type(why).__name__}: {why}; last words: {bench.tail()}"
        if name in ("S3", "S4", "S5"):
            _recover(bench, stage)
    return stage


def _recover(bench: Bench, stage: Stage) -> None:
    """So that the next stage has a main; when even that fails, the next stage says so itself."""
    try:
        with within(60.0, "a new main after the stage that broke off"):
            bench.recover()
    except (StageTimeout, BelayerError, Gone, RuntimeError, OSError) as why:
        stage.error += f"; and no new main: {why}"


def run(bench: Bench, record: Record, work: Mapping[str, Work]) -> bool:
    broken: set[str] = set()
    for name in work:
        watch, left = Stopwatch(), bench.plan.total_s - (monotonic() - record.begun)
        if NEEDS.get(name) in broken:
            stage = Stage(name, error=f"not run: {NEEDS[name]} broke off")
        elif left <= 0:
            stage = Stage(name, error=f"not run: {bench.plan.total_s:.0f} s are over")
        else:
            stage = run_stage(bench, name, work[name], left)
        if stage.error:
            broken.add(name)
        record.keep(stage, watch)
        print(f"{name}: {stage.verdict()} in {stage.seconds:.1f} s {stage.error}", flush=True)
    return record.finish()


def look() -> int:
    """What is missing, in words."""
    missing = [wheel for module, wheel in pack.WHEELS.items() if find_spec(module.split(".")[0]) is None]
    print("\n".join(f"missing: {wheel}" for wheel in missing) or "every package is there")
    return 2 if missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.h200_check", description=__doc__)
    parser.add_argument("--fake", action="store_true", help="on the CPU, over the fake driver")
    parser.add_argument("--shape", choices=("8b", "4b"), default="8b", help="size of the decoder")
    parser.add_argument("--kv-gb", type=float, default=40.0, help="size of the KV arena in GB")
    parser.add_argument("--model", type=Path, help="only S0 and S7: vLLM over this Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("h200-results"), help="folder of the results")
    parser.add_argument("--look", action="store_true", help="only say which packages are missing")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="only write a tar of what is needed")
    args = parser.parse_args()
    if args.look:
        return look()
    if args.pack:
        print(f"{args.pack}: {len(pack.pack(args.pack))} files")
        return 0
    plan_name = "fake" if args.fake else f"{args.shape}:{args.kv_gb}"
    spec = f"fake:h200check{os.getpid()}:{FAKE_BYTES}" if args.fake else REAL
    plan = replace(named(plan_name), model=args.model.resolve() if args.model else None)
    try:
        oneshot.make(spec, 0, ())
    except HostUnfit as why:
        print(f"h200_check: {why}", file=sys.stderr)
        return 2
    about = {"fake": args.fake, "machine": machine(), "versions": package_versions(), "plan": plan.as_dict()}
    record, bench = Record(args.out, about), Bench(plan, plan_name, spec)
    try:
        passed = run(bench, record, {name: WORK[name] for name in WITH_MODEL} if args.model else WORK)
    finally:
        bench.end()
    print((args.out / "report.md").read_text())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
