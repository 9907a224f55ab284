"""The processes of a run, held by one that uses no GPU: it starts, watches, kills and counts; it ends them all."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from belayer import procs
from benchmarks.h200.plan import Plan, prompts
from benchmarks.h200.wire import Line
from gpuowner.store import end_holder

TREE = Path(__file__).resolve().parents[2]


@dataclass
class Proc:
    """A worker: its line, and its process by pidfd."""

    line: Line
    pid: int
    pidfd: int
    ready: dict[str, Any] = field(default_factory=dict)

    def kill(self, number: int = signal.SIGKILL) -> None:
        if not procs.is_dead(self.pidfd):
            signal.pidfd_send_signal(self.pidfd, number)

    def gone(self, seconds: float) -> bool:
        return not procs.wait_dead([self.pidfd], seconds)

    def close(self) -> None:
        self.line.close()
        os.close(self.pidfd)


class Bench:
    """``plan_name`` tells a process its plan; ``spec`` its driver."""

    def __init__(self, plan: Plan, plan_name: str, spec: str) -> None:
        self.plan, self.plan_name, self.spec = plan, plan_name, spec
        self.folder = Path(tempfile.mkdtemp(prefix="belayer-h200-"))
        self.workers: list[Proc] = []
        self.owner: subprocess.Popen[bytes] | None = None
        self._zygote: tuple[subprocess.Popen[bytes], Line] | None = None
        self.main: Proc | None = None
        self.shadow: Proc | None = None
        self.reference: list[list[int]] = []

    def _python(self, module: str, *args: str, keep: int | None = None) -> subprocess.Popen[bytes]:
        log = (self.folder / "processes.log").open("ab")
        env = {**os.environ, "PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same sums in every process
        pass_fds = () if keep is None else (keep,)
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", module, *args],
                env=env, pass_fds=pass_fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip

    # --- owner ---

    def start_owner(self) -> dict[str, Any]:
        """Its status once it answers."""
        sizes = (self.plan.shape.layout()[1], self.plan.arena_bytes)
        ours, theirs = os.pipe()
        self._lifeline = theirs  # closed by our end, however we end
        folder, numbers = str(self.folder), [str(size) for size in sizes]
        self.owner = self._python("benchmarks.h200.owner", folder, self.spec, *numbers, str(ours), keep=ours)
        os.close(ours)
        return self.ask_owner(do="status")

    def ask_owner(self, **message: Any) -> dict[str, Any]:
        line = self.reach_owner()
        try:
            return line.ask(**message)
        finally:
            line.close()

    def reach_owner(self) -> Line:
        """The stage's deadline bounds this loop."""
        assert self.owner is not None
        while True:
            if self.owner.poll() is not None:
                raise RuntimeError(f"the owner ended: {self.tail()}")
            try:
                return Line.connect(str(self.folder / "owner.sock"))
            except (FileNotFoundError, ConnectionRefusedError):
                select.select([], [], [], 0.02)

    # --- workers ---

    def zygote(self) -> Line:
        if self._zygote is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel = theirs.fileno()
            args = (str(channel), self.spec, str(self.folder), self.plan_name)
            process = self._python("benchmarks.h200.zygote", *args, keep=channel)
            theirs.close()
            self._zygote = process, Line(ours)
            self._zygote[1].receive()
        return self._zygote[1]

    def fork(self, role: str) -> Proc:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = int(self.zygote().ask(do="spawn", role=role, fds=(theirs.fileno(),))["pid"])
        return self._known(Line(ours), pid)

    def fresh(self, role: str) -> tuple[Proc, subprocess.Popen[bytes]]:
        """A process that imports everything itself, as after a crash without a shadow."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = theirs.fileno()
        args = (role, str(channel), self.spec, str(self.folder), self.plan_name)
        process = self._python("benchmarks.h200.worker", *args, keep=channel)
        theirs.close()
        return self._known(Line(ours), process.pid), process

    def _known(self, line: Line, pid: int) -> Proc:
        self.workers.append(Proc(line, pid, os.pidfd_open(pid)))
        return self.workers[-1]

    def status_of(self, worker: Proc) -> int:
        """How a forked worker ended: an exit code, or minus its signal."""
        return int(self.zygote().ask(do="wait", pid=worker.pid)["status"])

    def wait_ready(self, worker: Proc) -> dict[str, Any]:
        said = worker.line.receive()
        assert said is not None
        worker.ready = said
        return said

    def new_shadow(self) -> Proc:
        """It warms up by itself; ``wait_ready`` waits for it."""
        self.shadow = self.fork("standby")
        return self.shadow

    @staticmethod
    def close_fd(fd: int) -> None:
        os.close(fd)

    def fresh_main(self) -> dict[str, Any]:
        """A main in the way of every main, a standby that takes the free arena; its start is reported. It has sent
        nothing yet: the stream begins with the next word."""
        main = self.fork("standby")
        ready = self.wait_ready(main)
        epoch = self.ask_owner(do="fence")["epoch"]
        main.line.send({"do": "take", "epoch": epoch, "history": prompts(self.plan), "count": 0})
        tokens_of(main)
        self.main, self.shadow = main, None
        return ready

    def recover(self) -> None:
        """After a stage that broke off: nobody knows what its workers still have to say."""
        for worker in self.workers:
            worker.kill()
            worker.gone(30.0)
        self.fresh_main()

    def tail(self) -> str:
        """The last words of the processes, for an error."""
        said = []
        for name in ("workers.log", "processes.log"):
            path = self.folder / name
            if path.exists():
                said += path.read_text(errors="replace").strip().splitlines()[-3:]
        return " | ".join(said)

    def end(self) -> None:
        """Nothing is left: workers, zygote, owner, holder, files."""
        for worker in self.workers:
            worker.kill()
            worker.gone(10.0)
            worker.close()
        if self._zygote is not None:
            self._zygote[0].kill()
            self._zygote[0].wait()
            self._zygote[1].close()
        if self.owner is not None:
            self.owner.kill()
            self.owner.wait()
            os.close(self._lifeline)
        end_holder(self.folder / "holder.sock")
        shutil.rmtree(self.folder)


def tokens_of(worker: Proc, until: str = "done") -> list[list[int]]:
    """Every token that comes until the worker says ``until``."""
    found: list[list[int]] = []
    while True:
        message = worker.line.receive()
        assert message is not None
        if until in message:
            return found
        if "token" in message:
            found.append(message["token"])
