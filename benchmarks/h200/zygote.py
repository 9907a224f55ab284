"""A process that has imported torch, and no more: it forks the workers, so that the import is off the clock. It makes
no CUDA context, since a forked child could not use one."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from benchmarks.h200 import plan as plans
from benchmarks.h200 import worker
from benchmarks.h200.wire import Gone, Line


def child(role: str, channel: int, spec: str, folder: Path, plan: str) -> None:
    worker.die_with_parent()
    log = os.open(folder / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(worker.guarded(role, Line(socket.socket(fileno=channel)), spec, folder, plans.named(plan)))


def main() -> None:
    channel, spec, folder, plan = sys.argv[1:]
    worker.die_with_parent()
    line = Line(socket.socket(fileno=int(channel)))
    line.send({"ready": True})
    while True:
        try:
            message = line.receive()
        except Gone:
            return
        assert message is not None
        if message["do"] == "wait":
            _, status = os.waitpid(message["pid"], 0)
            line.send({"status": os.waitstatus_to_exitcode(status)})
            continue
        fd = line.one_fd()
        pid = os.fork()
        if pid == 0:
            line.close()
            child(message["role"], fd, spec, Path(folder), plan)
        os.close(fd)
        line.send({"pid": pid})


if __name__ == "__main__":
    main()
