"""Stop a daemon exactly at one of its failpoints (envkeeper.failpoints), and look for what a fault has left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from belayer.errors import BelayerError
from belayer.rpc import SyncClient
from envkeeper.failpoints import VARIABLE, Point
from tests.support.wait import eventually


@dataclass(frozen=True)
class Failpoints:
    """``folder`` is new and empty."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        self.folder.mkdir(exist_ok=True)
        return {VARIABLE: str(self.folder)}

    def arm(self, point: Point) -> None:
        (self.folder / point).touch()

    def wait(self, point: Point, pid: int) -> None:
        """The daemon is at the point: it said so, and all its threads are stopped."""
        eventually((self.folder / f"{point}.hit").exists, what=f"{point} is reached")
        eventually(lambda: stopped(pid), what=f"{pid} is stopped")

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()


def stopped(pid: int) -> bool:
    try:
        rows = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended in this moment: it was not stopped
        return False
    return {row.rsplit(")", 1)[1].split()[0] for row in rows} == {"T"}


class Asking:
    """One request in a thread of its own, which may never be answered."""

    def __init__(
        self, sock: Path, ask: msgspec.Struct, reply: type[msgspec.Struct], alive: Callable[[], bool] = lambda: True
    ) -> None:
        self.answer: msgspec.Struct | None = None
        self.failed: BelayerError | None = None
        self._sock, self._over, self._alive = sock, threading.Event(), alive
        self._thread = threading.Thread(target=self._run, args=(ask, reply))
        self._thread.start()

    def _run(self, ask: msgspec.Struct, reply: type[msgspec.Struct]) -> None:
        client = SyncClient(self._sock)
        try:
            self.answer = client.call(ask, reply, 120.0, lambda: self._alive() and not self._over.is_set())
        except BelayerError as why:
            self.failed = why
        finally:
            client.close()

    def over(self) -> bool:
        return not self._thread.is_alive()

    def end(self, *, dead: bool) -> None:
        """Wait for the answer, or with ``dead`` no longer."""
        if dead:
            self._over.set()
        self._thread.join(120)
        assert not self._thread.is_alive()


def holders(root: Path, but: set[int]) -> dict[int, str]:
    """Processes other than ``but`` that hold a file below ``root`` open or live in a folder of it: CRIU, runc, tar that
    outlived what they were for. Pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in but:
            continue
        with suppress(OSError):
            links = [os.readlink(folder / "cwd"), *(os.readlink(link) for link in (folder / "fd").iterdir())]
            if any(link.startswith(f"{root}/") for link in links):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def happened(probe: Callable[[], object], what: str) -> None:
    """An injected fault first proves that it happened."""
    eventually(lambda: bool(probe()), what=what)
