"""Stage S4: a main dies or hangs in the middle of a stream, the shadow goes on, and the stream must be the unfailed
one.

Order of each: the fault, seen; SIGKILL and the process seen dead (the fence); the arena freed by the owner, which looks
at its own pidfd; then the shadow probes, checks sums, takes the lease, maps, zeroes, unparks, computes the context
again."""

from __future__ import annotations

import signal

from belayer import procs
from belayer.clock import Stopwatch
from benchmarks.h200.bench import Bench, Proc, tokens_of
from benchmarks.h200.plan import prompts
from benchmarks.h200.record import Stage
from benchmarks.h200.wire import Gone

BY_HAND = ("assert", "illegal", "oom", "busy", "readonly")  # done by the main itself, on our word
HANGS = ("stop", "busy")
# How the process may end: by our SIGKILL, by its own exception, or by the signal that stands for an Xid on a CPU.
ENDINGS = {
    "kill": (-signal.SIGKILL,),
    "stop": (-signal.SIGKILL,),
    "busy": (-signal.SIGKILL,),
    "assert": (1, -signal.SIGABRT),
    "oom": (1,),
    "illegal": (1, -signal.SIGSEGV),
    "readonly": (1, -signal.SIGSEGV),
}
_MOST_S = 30.0


def failures(bench: Bench, stage: Stage) -> None:
    for kind, times in {**bench.plan.faults, "readonly": 1}.items():
        for _ in range(times):
            if bench.shadow is None:
                bench.wait_ready(bench.new_shadow())
            one(bench, stage, kind)


def one(bench: Bench, stage: Stage, kind: str) -> None:
    main, shadow, plan = bench.main, bench.shadow, bench.plan
    assert main is not None
    assert shadow is not None
    sent, watch = _stream_until_fault(bench, main, kind)
    sent += _see_and_fence(bench, stage, main, kind)
    fenced = watch.ms()
    said = bench.ask_owner(do="fence")
    stage.check("the owner frees the arena once the old main is dead", said["arena"] == "free", said)
    history = prompts(plan) + sent
    shadow.line.send({"do": "take", "epoch": said["epoch"], "history": history, "count": plan.after})
    first, laps = first_token(shadow)
    stage.figure(f"{kind}: fault to next token", "ms", watch.ms())
    stage.figure(f"{kind}: fault to fenced", "ms", fenced)
    for name, value in laps.items():
        stage.figure(f"takeover: {name}", "ms", value)
    tokens = [*sent, first, *tokens_of(shadow)]
    stage.check(f"{kind}: the stream is whole", len(tokens) == len(sent) + plan.after, len(tokens))
    stage.check(f"{kind}: the stream is the unfailed one", tokens == bench.reference[: len(tokens)], kind)
    status = bench.status_of(main)
    stage.check(f"{kind}: the main ended by what was done to it", status in ENDINGS[kind], status)
    bench.main, bench.shadow = shadow, None
    coming = bench.new_shadow()  # warms up while the sums are verified
    _verify(bench, stage)
    bench.wait_ready(coming)


def _stream_until_fault(bench: Bench, main: Proc, kind: str) -> tuple[list[list[int]], Stopwatch]:
    """Tokens that the client has when the fault happens, and a watch that began with it."""
    plan = bench.plan
    by_hand = kind in BY_HAND
    main.line.send({"do": "reset", "count": plan.fault_at if by_hand else plan.tokens})
    sent: list[list[int]] = []
    while len(sent) < plan.fault_at or by_hand:
        message = main.line.receive()
        assert message is not None
        if "done" in message:
            break
        sent.append(message["token"])
    watch = Stopwatch()
    if by_hand:
        main.line.send({"do": "fault", "kind": kind})
        said = main.line.receive()
        assert said == {"faulting": kind}
    else:
        main.kill(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    return sent, watch


def _see_and_fence(bench: Bench, stage: Stage, main: Proc, kind: str) -> list[list[int]]:
    """Detection as a supervisor has it: a pidfd for a death, silence for a hang. Then SIGKILL, then seen dead. Returns
    the tokens that were on the way: the client has them, so they must not come again."""
    late: list[list[int]] = []
    if kind in HANGS:
        while (message := main.line.receive(bench.plan.hang_s)) is not None:
            late += [message["token"]] if "token" in message else []
        stage.check(f"{kind}: it hung and was alive", not procs.is_dead(main.pidfd))
        if kind == "stop":
            stage.check("stop: the main was stopped", procs.state(main.pid) in ("T", "t"), procs.state(main.pid))
    else:
        stage.check(f"{kind}: its death was seen", main.gone(_MOST_S), "still alive")
    main.kill()
    stage.check("the old main was seen dead", main.gone(_MOST_S), kind)
    try:
        while (message := main.line.receive(_MOST_S)) is not None:
            late += [message["token"]] if "token" in message else []
    except Gone:
        return late
    raise RuntimeError(f"{kind}: a process holds the line of the dead main")


def first_token(worker: Proc) -> tuple[list[int], dict[str, float]]:
    """The first token after ``take``, and how long each part of it took."""
    laps: dict[str, float] = {}
    while True:
        message = worker.line.receive()
        assert message is not None
        if "serving" in message:
            laps = message["ms"]
        if "token" in message:
            return message["token"], laps


def _verify(bench: Bench, stage: Stage) -> None:
    """The full check, right after the sampled one on the path."""
    assert bench.main is not None
    bench.main.line.send({"do": "verify"})
    said = bench.main.line.receive()
    assert said is not None
    stage.check("weights equal their sums after the fault", said["equal"])
