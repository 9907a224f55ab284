"""Runs the cases through a real envkeeper: one stack (Docker Engine, runtime), one sandbox for many cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from belayer.errors import BelayerError, CheckpointRefused
from belayer.sandbox import Sandbox
from envkeeper import freezer
from tests.conformance.inside import LIB, LOOK, SHELL
from tests.conformance.model import EXACT, REFUSED, Case, Refusal
from tests.support.envhost import EnvHost

GENERATIONS = 2


@dataclass(frozen=True)
class Outcome:
    """``how``: EXACT, REFUSED, or "wrong". ``words``: what was seen, for the table and for the failure."""

    how: str
    words: str = ""


@dataclass
class Stack:
    """A running envkeeper. ``docker``: the engine's address, also for what a case does from outside."""

    host: EnvHost
    docker: str
    made: list[Sandbox] = field(default_factory=list)

    def create(self, **limits: float) -> Sandbox:
        box = self.host.create(**{"memory_mb": 1500, "pids": 1000, **limits})
        self.made.append(box)
        return box

    def destroy(self, box: Sandbox) -> None:
        self.made.remove(box)
        try:
            box.destroy()
        except BelayerError:
            box.close()

    def pid(self, box: Sandbox) -> int:
        return self.host.info(box.sandbox_id).pid

    def wants_frozen(self, box: Sandbox) -> bool:
        return freezer.of_process(self.pid(box)).wants_frozen()


def prepare(box: Sandbox) -> None:
    done = box.exec(
        f"mkdir -p /c && cat > /c/lib.py <<'LIB'\n{LIB}LIB\ncat > /c/look.py <<'LOOK'\n{LOOK}LOOK\n"
        f"cat > /c/shell <<'SHELL'\n{SHELL}SHELL\n"
    )
    assert done.exit_code == 0, done.stderr


def _in_folder(box: Sandbox, name: str, command: str, timeout_s: float = 240) -> str:
    """What was wrong with it, or its answer. The shell may be another one than that of the case before, which a host
    without time has ended: it is told then, and costs the cases that follow nothing."""
    seen = box.exec(f". /c/shell; cd /c/{name} || exit 9\n{command}", timeout_s=timeout_s)
    if seen.timed_out:
        return f"not over after {timeout_s:g} s: {seen.stdout} {seen.stderr}"
    return seen.stdout + (f"[exit {seen.exit_code}] {seen.stderr}" if seen.exit_code or seen.stderr else "")


def looks(box: Sandbox, cases: Sequence[Case]) -> dict[str, Any]:
    names = " ".join(case.name for case in cases if case.twin)
    seen = box.exec(f"python3 /c/look.py {names}", timeout_s=240)
    assert seen.exit_code == 0, seen.stderr
    found: dict[str, Any] = json.loads(seen.stdout)
    return found


def run_exact(stack: Stack, cases: Sequence[Case]) -> dict[str, Outcome]:
    """All of ``cases`` in one sandbox. Raises what envkeeper raised; a case that answers wrongly is its own outcome."""
    out: dict[str, Outcome] = {}
    box = stack.create()
    try:
        prepare(box)
        for case in cases:
            said = _in_folder_made(box, case)
            if said:
                out[case.name] = Outcome("wrong", f"did not start: {said}")
        going = [case for case in cases if case.name not in out]
        before = looks(box, going)
        box.checkpoint()
        _ask(box, going, out, "the source, after its checkpoint")
        for generation in range(1, GENERATIONS + 1):
            proof = box.kill()
            assert "dead" in proof.seen
            box.restore()
            after = looks(box, going)
            for case in going:
                if case.name not in out and after.get(case.name) != before.get(case.name):
                    words = difference(before.get(case.name), after.get(case.name))
                    out[case.name] = Outcome("wrong", f"generation {generation}: {words}")
            if generation < GENERATIONS:
                for case in going:
                    if case.between:
                        _in_folder(box, case.name, case.between)
                box.checkpoint()
        _ask(box, going, out, f"generation {GENERATIONS}")
    finally:
        stack.destroy(box)
    for case in cases:
        out.setdefault(case.name, Outcome(EXACT))
    return out


def run_alone(stack: Stack, case: Case) -> Outcome:
    """A case that this host may have to refuse."""
    try:
        return run_exact(stack, [case])[case.name]
    except CheckpointRefused as why:
        return Outcome(REFUSED if case.unless and case.unless in str(why) else "wrong", str(why))


def _in_folder_made(box: Sandbox, case: Case) -> str:
    box.exec(f"mkdir -p /c/{case.name}")
    return _in_folder(box, case.name, case.start)


def _ask(box: Sandbox, cases: Sequence[Case], out: dict[str, Outcome], who: str) -> None:
    for case in cases:
        answer = _in_folder(box, case.name, case.ask)
        expected = case.answer + ("2\n" if case.between and who.startswith("generation") else "")
        if answer != expected and case.name not in out:
            out[case.name] = Outcome("wrong", f"{who} answers {answer!r} instead of {expected!r}")


def difference(before: Any, after: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                return difference(before.get(key), after.get(key), f"{path}/{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) + len(after) > 8:
        return f"{path}: {[x for x in before if x not in after]} became {[x for x in after if x not in before]}"
    return f"{path}: {before!r} became {after!r}"


def run_refusal(stack: Stack, box: Sandbox, case: Refusal) -> Outcome:
    """In a sandbox that lives before and after: the refusal must leave it running, thawed, and checkpointable."""
    box.exec(f"mkdir -p /c/{case.name}; cd /c/{case.name}; KEPT=1")
    undo = case.outside(stack, box.sandbox_id) if case.outside else None
    try:
        if case.start:
            said = _in_folder(box, case.name, case.start)
            if said:
                return Outcome("wrong", f"did not start: {said}")
        try:
            box.checkpoint()
            return Outcome("wrong", "the checkpoint was not refused")
        except CheckpointRefused as why:
            words = str(why)
        if stack.wants_frozen(box) or stack.host.info(box.sandbox_id).state != "running":
            return Outcome("wrong", f"refused, but not left running: {words}")
        if case.kind not in words:
            return Outcome("wrong", f"refused, but not by name {case.kind!r}: {words}")
        if box.exec("echo $KEPT").stdout != "1\n":
            return Outcome("wrong", f"its shell did not survive the refusal: {words}")
    finally:
        if undo:
            undo()
        if case.end:
            _in_folder(box, case.name, case.end)
    box.checkpoint()
    return Outcome(REFUSED, words)
