"""What arenas and models share: this life's generation, second copies of descriptors, and the ledger."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from belayer.errors import BelayerError, ErrorCode
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.port import Allocation

Key = tuple[str, int]  # slot or model, tensor-parallel rank


class StoreLost(BelayerError):
    """The keeper of second copies is gone: what is held now would not outlive this process."""

    code = ErrorCode.OWNER_GONE


class Store(Protocol):
    """Keeps a second copy of descriptors beyond this process, by names that are never used twice."""

    def describe(self) -> str:
        """Who keeps them, for the status."""

    def put(self, name: str, fd: int) -> None:
        """When this returns, the copy outlives us. Raises StoreLost."""

    def drop(self, name: str) -> None:
        """Forget a copy. Raises StoreLost."""


@dataclass(frozen=True)
class Caller:
    """The peer of a request: its connection, and its process."""

    peer: int
    who: str
    pid: int
    pidfd: int


@dataclass
class Keeping:
    """``write`` persists the whole ledger. ``store`` None: nobody keeps copies, and ``reason`` says why. ``on_lost`` is
    called with a store that was given up. ``held``: what has a name in the store, the descriptors being ours."""

    generation: int
    write: Callable[[], None]
    store: Store | None
    log: Callable[..., Any]
    reason: str = ""
    on_lost: Callable[[Store], None] = lambda store: None
    held: dict[str, int] = field(default_factory=dict)
    _count: int = 0

    def keep(self, label: str, fd: int) -> str:
        """Put a second copy into the store and return its name. Without a store the owner serves all the same, and
        its status says that it would not outlive its own death."""
        self._count += 1
        name = f"{label}.g{self.generation}.{self._count}"
        self.held[name] = fd
        if self.store is not None:
            try:
                self.store.put(name, fd)
            except StoreLost as why:
                self.lost(why.message)
        return name

    def drop(self, name: str) -> None:
        self.held.pop(name, None)
        if self.store is not None:
            try:
                self.store.drop(name)
            except StoreLost as why:
                self.lost(why.message)

    def save(self) -> None:
        """Raises OSError: then nothing may be told that depends on it."""
        self.write()

    def note(self) -> None:
        """Write down a death that was seen. Where that fails, the next life sees the same death again by itself."""
        try:
            self.write()
        except OSError as why:
            self.log("ledger_not_written", why=str(why))

    def lost(self, reason: str) -> None:
        old, self.store, self.reason = self.store, None, reason
        self.log("store_lost", why=reason, kept="memory in this process only")
        if old is not None:
            self.on_lost(old)

    def renew(self, store: Store, has: set[str]) -> None:
        """``store`` keeps the copies from now on; ``has``: names that it has been given already. Raises StoreLost."""
        for name, fd in self.held.items():
            if name not in has:
                store.put(name, fd)
        for name in has - set(self.held):
            store.drop(name)
        self.store, self.reason = store, ""


def resident(memory: Allocation) -> int:
    """Bytes of an allocation that exist: a memfd has a page only once it was written, a GPU has all of them at once."""
    return os.fstat(memory.fd).st_blocks * 512 if isinstance(memory, Memfd) else memory.nbytes
