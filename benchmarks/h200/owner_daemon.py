"""``python -m benchmarks.h200.owner_daemon SPEC --kind KIND [LIFELINE]``: ``python -m gpuowner`` over any driver.

With the descriptor LIFELINE it ends, and its holder and its root with it, when whoever has the other end is gone: a
check that is killed leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import sys
import threading

from belayer.config import load
from belayer.daemon import OnlyOne, Told, run
from belayer.paths import Paths
from gpuowner.__main__ import serve
from gpuowner.store import end_holder


def _watch(lifeline: int, paths: Paths, kind: str) -> None:
    os.read(lifeline, 1)
    end_holder(paths.owner_holder_sock(kind))
    shutil.rmtree(paths.run.parent, ignore_errors=True)
    os._exit(0)


def main() -> int:
    spec, _, kind, *rest = sys.argv[1:]
    paths = Paths().make()
    for number in rest:
        os.set_inheritable(int(number), False)  # or the holder would keep it open
        threading.Thread(target=_watch, args=(int(number), paths, kind), daemon=True).start()
    lock = OnlyOne(paths.run, f"owner-{kind}")
    config = load(paths.config)
    code = run(lambda stop: serve(stop, kind, "holder", config, paths, spec), Told(paths.run, f"owner-{kind}"))
    del lock  # held until here
    return code


if __name__ == "__main__":
    sys.exit(main())
