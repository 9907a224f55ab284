"""vllm-router from PyPI before one server, as the router to compare with. setup/clients.sh installs it."""

from __future__ import annotations

import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from belayer.clock import monotonic
from belayer.localhost import free_port

BINARY = Path(__file__).parents[1] / ".cache/clients/bin/vllm-router"
ABSENT = f"vllm-router was not measured: no {BINARY.relative_to(BINARY.parents[3])}; run setup/clients.sh"


def is_there() -> bool:
    return BINARY.is_file()


class VllmRouter:
    """Ready when this returns. Neither retries nor breaker: what is measured is its way through. Raises RuntimeError
    with the end of its log when it does not come up."""

    def __init__(self, url: str, folder: Path, within: float = 60.0) -> None:
        self.port, log = free_port(), folder / "vllm-router.log"
        command = [str(BINARY), "--host", "127.0.0.1", "--port", str(self.port), "--worker-urls", url]
        command += ["--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker", "--log-level", "error"]
        command += ["--max-concurrent-requests", "4096", "--health-check-interval-secs", "3600"]
        command += ["--prometheus-port", str(free_port())]
        with log.open("wb") as out:
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=folder)
        deadline, pause = monotonic() + within, threading.Event()
        while not self._answers():
            if self._child.poll() is not None or monotonic() > deadline:
                self.close()
                raise RuntimeError(f"vllm-router did not come up: {log.read_text(errors='replace')[-400:]}")
            pause.wait(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
        self._child.wait(10)

    def __enter__(self) -> VllmRouter:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        self.close()
