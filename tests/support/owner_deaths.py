"""Lives of an owner in forked processes that kill themselves between two effects, over a real holder and ledger."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpuowner import ledger
from gpuowner.keeping import Store
from gpuowner.store import HolderStore
from gpuowner.vault import Vault
from gpuowner.version import Source

SIZE = 1 << 16
Tell = Callable[[str], None]
Body = Callable[[Vault, Tell], None]


@dataclass
class Points:
    """Kills this process at the ``die_at``-th place between two effects."""

    die_at: int
    count: int = 0

    def reach(self) -> None:
        self.count += 1
        if self.count == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class SteppingStore:
    inner: HolderStore
    points: Points

    def describe(self) -> str:
        return self.inner.describe()

    def put(self, name: str, fd: int) -> None:
        self.points.reach()
        self.inner.put(name, fd)
        self.points.reach()

    def drop(self, name: str) -> None:
        self.points.reach()
        self.inner.drop(name)
        self.points.reach()


@dataclass
class Place:
    """Where lives of an owner follow each other."""

    folder: Path
    generation: int = 0
    sources: dict[str, Source] = field(default_factory=dict)
    slots: frozenset[str] | None = None

    @property
    def holder(self) -> Path:
        return self.folder / "holder.sock"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def vault(self, store: Store) -> Vault:
        self.generation += 1
        return Vault(self.generation, self.ledger, store, slots=self.slots)

    def revived(self) -> tuple[Vault, HolderStore]:
        """The next life, in this process."""
        store = HolderStore(self.holder)
        vault = self.vault(store)
        vault.revive(store.all(), self.sources)
        return vault, store

    def live(self, die_at: int, body: Body) -> tuple[bool, list[str]]:
        """One life that ends at a point. (whether it was killed, what it had told)"""
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                points = Points(die_at)
                vault = self.vault(SteppingStore(HolderStore(self.holder), points))
                write = vault.keeping.write

                def stepping() -> None:
                    points.reach()
                    write()
                    points.reach()

                vault.keeping.write = stepping
                body(vault, lambda text: void(os.write(tell, text.encode() + b"\n")))
                code = 0
            finally:
                os._exit(code)
        self.generation += 1
        os.close(tell)
        with os.fdopen(told) as pipe:
            said = pipe.read().splitlines()
        _, status = os.waitpid(pid, 0)
        killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert killed or status == 0, f"point {die_at}: the life failed, it had told {said}"
        return killed, said


def void(_: object) -> None:
    pass


def nothing_leaks(place: Place, vault: Vault, store: HolderStore) -> None:
    found = store.all()
    for fd in found.values():
        os.close(fd)
    saved = ledger.last(place.ledger)
    assert saved is not None
    named = {row.memory for row in saved.arenas} | {row.memory for row in saved.weights}
    named.discard("")  # yet to be loaded
    assert set(found) == named == set(vault.keeping.held)
    store.close()


def every_death(places: Callable[[], Place], body: Body, check: Callable[[Place, list[str], list[str]], None]) -> int:
    """Run ``body`` to each of its points; ``check`` gets what had been told, and what a whole life tells."""
    killed, whole = places().live(0, body)
    assert not killed
    n = 0
    while True:
        n += 1
        place = places()
        killed, told = place.live(n, body)
        assert told == whole[: len(told)]
        if not killed:
            assert told == whole
            return n - 1
        check(place, told, whole)
