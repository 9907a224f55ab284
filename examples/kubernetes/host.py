"""All daemons of one host in one container, for the DaemonSet beside this file: ends with all of them at SIGTERM."""

from __future__ import annotations

import signal
import threading

from belayer.localhost import ROLLOUT, LocalHost
from belayer.paths import Paths


def main() -> int:
    paths = Paths()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with LocalHost(paths.run.parent, paths.config.read_text()) as host:
        host.start(ROLLOUT)
        stop.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
