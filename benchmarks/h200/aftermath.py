"""Stages S5 and S6: what a failure costs without a shadow, and what it costs when the owner itself dies."""

from __future__ import annotations

from belayer.clock import Stopwatch
from benchmarks.h200.bench import Bench, tokens_of
from benchmarks.h200.failures import first_token
from benchmarks.h200.plan import prompts
from benchmarks.h200.record import Stage


def baselines(bench: Bench, stage: Stage) -> None:
    """S5: the same tokens from a fresh process: everything anew (cold), or attached to the owner (attach only)."""
    main, plan = bench.main, bench.plan
    assert main is not None
    main.kill()
    main.gone(30.0)
    bench.main = None
    for role in ("attach", "cold"):
        for _ in range(plan.baselines):
            watch = Stopwatch()
            worker, process = bench.fresh(role)
            ready = bench.wait_ready(worker)
            epoch = bench.ask_owner(do="fence")["epoch"]
            worker.line.send({"do": "take", "epoch": epoch, "history": prompts(plan), "count": plan.after})
            first, _ = first_token(worker)
            stage.figure(f"{role}: start to first token", "ms", watch.ms())
            for name, value in ready["ms"].items():
                stage.figure(f"{role}: {name}", "ms", value)
            tokens = [first, *tokens_of(worker)]
            stage.check(f"{role}: its tokens are the unfailed ones", tokens == bench.reference[: len(tokens)])
            worker.kill()
            worker.gone(30.0)
            process.wait()


def owner_death(bench: Bench, stage: Stage) -> None:
    """S6: the owner is killed under a decoding main; the next life adopts, and grants only what was verified."""
    plan = bench.plan
    bench.fresh_main()
    main = bench.main
    assert main is not None
    assert bench.owner is not None
    before = bench.ask_owner(do="status")
    main.line.send({"do": "reset", "count": plan.tokens})
    first, _ = first_token(main)
    watch = Stopwatch()
    bench.owner.kill()
    bench.owner.wait()
    tokens = [first, *tokens_of(main)]
    stage.check("the main decodes on without an owner", tokens == bench.reference)
    after = bench.start_owner()
    stage.figure("owner killed to answering again", "ms", watch.ms())
    stage.check("its generation is one more", after["generation"] == before["generation"] + 1, after)
    stage.check("it adopted the weights", (after["weights"], after["version"]) == ("sealed", before["version"]), after)
    stage.check("it knows the holder of the arena", after["arena"] == "leased", after)
    stage.check("it grants no weights that were not verified", _declined(bench) == "weights_torn")
    verifier = bench.fork("verifier")
    said = bench.wait_ready(verifier)
    stage.figure("weights verified for the owner", "ms", said["ms"])
    stage.check("it grants them once they are", _declined(bench) == "")
    main.line.send({"do": "reset", "count": plan.after})
    stage.check("the main still decodes", tokens_of(main) == bench.reference[: plan.after])
    _torn(bench, stage)
    main.kill()
    stage.check("the arena is freed when its holder is dead", main.gone(30.0) and _freed(bench))


def _freed(bench: Bench) -> bool:
    return bool(bench.ask_owner(do="fence")["arena"] == "free")


def _declined(bench: Bench) -> str:
    """The code with which an attach is declined, or ""."""
    line = bench.reach_owner()
    try:
        line.ask(do="attach")
    except RuntimeError as why:
        return str(why).partition(":")[0]
    finally:
        for fd in line.fds:
            bench.close_fd(fd)
        line.close()
    return ""


def _torn(bench: Bench, stage: Stage) -> None:
    """A writer is killed inside an update: torn weights are refused to the next shadow."""
    writer = bench.fork("torn")
    said = bench.wait_ready(writer)
    stage.check("the writer was inside the update", said["torn_at"] > 0)
    writer.kill()
    stage.check("the writer was seen dead", writer.gone(30.0))
    code = ""
    while not code:  # the owner sees the end of the connection by itself; the stage's deadline bounds this
        status = bench.ask_owner(do="status")
        code = _declined(bench) if status["weights"] != "updating" else ""
    stage.check("torn weights are refused by name", code == "weights_torn", code)
