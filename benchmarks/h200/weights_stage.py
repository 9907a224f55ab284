"""Stage W1: weights through gpuowner itself. Its daemon loads a model from disk into memory that it cannot read, a
reader has it, updates change it, and a killed owner has it again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from belayer.clock import Stopwatch
from benchmarks.h200.bench import Bench
from benchmarks.h200.daemons import Daemons, make_model
from benchmarks.h200.gauge import used
from benchmarks.h200.record import Stage

CONFIG = """[gpuowner]
memory = "cuda_vmm"
[[model]]
name = "model"
path = "model"
update = "in_place"
[[slot]]
name = "slot0"
model = "model"
device = "gpu"
"""
_NEAR = 64 << 20  # bytes of a device that come and go with contexts


class Child:
    """A process of weights_process."""

    def __init__(self, daemons: Daemons, role: str, spec: str) -> None:
        command = [sys.executable, "-m", "benchmarks.h200.weights_process", role, spec]
        with (daemons.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(daemons.paths.owner_sock("weights"))], env=daemons.env(), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def ask(self, words: str = "") -> dict[str, Any]:
        """Raises RuntimeError when it ends without an answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if words:
            self._process.stdin.write(words + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the stage ended with {self._process.wait()} on {words!r}")
        said: dict[str, Any] = json.loads(line)
        return said

    def end(self) -> int:
        self._process.kill()
        self._process.communicate()
        return self._process.returncode

    def ends_by(self, words: str) -> int:
        """The status that it ends with after ``words``; 0 when it went on."""
        try:
            self.ask(words)
        except RuntimeError:
            return self._process.wait()
        return 0


@contextmanager
def child(daemons: Daemons, role: str, spec: str) -> Iterator[Child]:
    made = Child(daemons, role, spec)
    try:
        made.ask()
        yield made
    finally:
        made.end()


def weights(bench: Bench, stage: Stage) -> None:
    before, daemons = used(bench.spec), Daemons(bench.spec)
    try:
        daemons.paths.config.write_text(CONFIG)
        make_model(daemons.root / "model", bench.plan.model_bytes, 1)
        _loaded(bench, daemons, stage)
        with child(daemons, "reader", bench.spec) as reader:
            first = reader.ask("look")
            stage.figure("attach, with all sums", "ms", first["attach_ms"])
            stage.figure("all sums again", "ms", first["verify_ms"])
            _stray(bench, daemons, stage, reader)
            _updated(bench, daemons, stage, reader)
            _reborn(bench, daemons, stage, reader)
    finally:
        daemons.end()
    left = used(bench.spec) - before
    stage.check("all of it is given back with owner and holder", left < _NEAR, left)


def _loaded(bench: Bench, daemons: Daemons, stage: Stage) -> None:
    watch = Stopwatch()
    status = daemons.start("weights")
    stage.figure("owner started, model sealed", "ms", watch.ms())
    (row,) = status.weights
    stage.check("sealed by gpuowner", (row.state, row.version, status.backend) == ("sealed", 1, "cuda_vmm"), row.state)
    stage.check("its owner has not loaded the driver", not daemons.driver_loaded("weights"))
    stage.check("all of it is accounted", row.resident >= bench.plan.model_bytes, row.resident)
    stage.facts["model_bytes"] = row.resident
    stage.figure("files to sealed", "MB/s", row.load_mb_s)


def _stray(bench: Bench, daemons: Daemons, stage: Stage, reader: Child) -> None:
    with child(daemons, "reader", bench.spec) as other:
        ended = other.ends_by("stray")
    stage.check("a store into sealed weights ends its writer", ended not in (0, 1), ended)
    stage.check("and has changed nothing", "declined" not in reader.ask("look"))


def _updated(bench: Bench, daemons: Daemons, stage: Stage, reader: Child) -> None:
    address = reader.ask("look")["va"]
    with child(daemons, "writer", bench.spec) as writer:
        said = writer.ask("commit 2 swap")
        stage.figure("swap of a part: begin to sealed", "ms", said["ms"])
        stage.check("a reader keeps its version", reader.ask("look")["version"] == 1)
        moved = reader.ask("follow")
        stage.figure("follow a swap", "ms", moved["ms"])
        now = reader.ask("look")
        stage.check("it follows at the same address", moved["remapped"] and now["va"] == address, moved)
        stage.check("and reads what was written", now["part"] == [2.0, 2.0], now["part"])
        said = writer.ask("commit 3 in_place")
        stage.figure("in place, a part: begin to sealed", "ms", said["ms"])
        stage.check("in place is the same memory", not reader.ask("follow")["remapped"])
        stage.check("with the new bytes", reader.ask("look")["part"] == [3.0, 3.0])
    with child(daemons, "writer", bench.spec) as writer:
        stage.check("a writer was inside a swap", writer.ask("inside 9 swap") == {"at": "written"})
    _settled(daemons, stage, "sealed", 3)
    stage.check("its death left the last version", reader.ask("look")["part"] == [3.0, 3.0])


def _settled(daemons: Daemons, stage: Stage, state: str, version: int) -> None:
    """The owner sees the end of the connection by itself; the stage's deadline bounds this."""
    while (row := daemons.status("weights").weights[0]).state == "updating":
        continue
    stage.check(f"after it: {state} v{version}", (row.state, row.version) == (state, version), (row.state, row.version))


def _reborn(bench: Bench, daemons: Daemons, stage: Stage, reader: Child) -> None:
    before = daemons.status("weights").weights[0]
    daemons.kill("weights")
    stage.check("a reader reads on without an owner", reader.ask("look")["part"] == [3.0, 3.0])
    watch = Stopwatch()
    (row,) = daemons.start("weights").weights
    stage.figure("owner killed to answering, all sums read", "ms", watch.ms())
    same = (row.state, row.version, row.digest) == ("sealed", before.version, before.digest)
    stage.check("it adopted what it had, read again", same, (row.state, row.version))
    while not daemons.status("weights").weights[0].readers:  # its connection is mended; the deadline bounds this
        continue
    stage.check("and serves it", "declined" not in reader.ask("follow"))
    with child(daemons, "writer", bench.spec) as writer:
        stage.check("a writer was inside an update in place", writer.ask("inside 9 in_place") == {"at": "written"})
    _settled(daemons, stage, "torn", before.version)
    said = str(reader.ask("follow").get("declined", ""))
    stage.check("torn weights are refused by name", said.startswith("WeightsTorn"), said)
    with child(daemons, "writer", bench.spec) as writer:
        said = str(writer.ask("commit 4 swap").get("declined", ""))
        stage.check("a part does not publish torn weights", said.startswith("WeightsTorn"), said)
