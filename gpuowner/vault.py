"""What one owner instance holds, and its life across its own death: descriptors in a store, states in a ledger.

``revive`` takes over what the last life left. The order of every change is in ``arenas`` and ``models``; what a death
between two of their effects can leave is either a copy in the store that no ledger row names (dropped here) or
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from belayer import procs
from gpuowner import ledger, resplit
from gpuowner.arenas import ArenaEntry, Arenas
from gpuowner.backends.choice import MemfdMaker
from gpuowner.backends.port import Maker
from gpuowner.digest import Told
from gpuowner.keeping import Keeping, Key, Store
from gpuowner.ledger import ArenaRow, Ledger, WeightsRow
from gpuowner.models import Models
from gpuowner.version import Source


def no_log(event: str, **fields: Any) -> None:
    """For vaults of tests and tools."""


Tell = Callable[[str, int, int], None]  # what is done, bytes done, of how many


def tell_nobody(doing: str, done: int, of: int) -> None:
    """For vaults of tests and tools."""


def _summed(tell: Tell, rows: Sequence[WeightsRow]) -> Callable[[WeightsRow], Told]:
    """For each row, in their order, who hears how far it is: ``tell`` gets it as a part of them all."""
    *befores, total = accumulate((row.nbytes for row in rows), initial=0)
    before = {(row.model, row.rank): nbytes for row, nbytes in zip(rows, befores, strict=True)}

    def told(row: WeightsRow) -> Told:
        return lambda done, _: tell(f"verifies {row.model}", before[row.model, row.rank] + done, total)

    return told


class Vault:
    """``generation`` is this life of the owner; ``path`` is the ledger's file. ``adopted`` and ``lost``: one sentence
    for each thing that the last life left, or that died with it."""

    def __init__(
        self,
        generation: int,
        path: Path,
        store: Store | None,
        log: Callable[..., Any] = no_log,
        maker: Maker | None = None,
        slots: frozenset[str] | None = None,
    ) -> None:
        """``maker``: of arenas; where weights live is said by their ``Source``. ``slots``: those that are configured,
        which alone may have arenas; None does not limit them."""
        self.generation, self._path, self._slots = generation, path, slots
        self.maker = maker or MemfdMaker()
        self.keeping = Keeping(generation, self._write, store, log, "" if store else "no store was given")
        self.arenas, self.models = Arenas(self.keeping, self.maker, slots), Models(self.keeping)
        self.to_load: dict[Key, WeightsRow] = {}
        self.adopted: list[str] = []
        self.lost: list[str] = []
        self._boot = procs.boot_id()
        self._log = log

    def _write(self, *, stopped: bool = False) -> None:
        rows = Ledger(
            boot_id=self._boot,
            generation=self.generation,
            arenas=tuple(entry.row() for entry in self.arenas.entries.values()),
            weights=self._weights_rows(),
            stopped=stopped,
        )
        ledger.save(self._path, rows)

    def _weights_rows(self) -> tuple[WeightsRow, ...]:
        """A model that is only being loaded again is written down as it was: a death before the end of it must not
        make the next life forget which version was lost."""
        rows = {key: entry.row() for key, entry in self.models.entries.items()}
        lost = {key: row for key, row in self.to_load.items() if key not in rows or not rows[key].memory}
        return tuple((rows | lost).values())

    def stop(self) -> None:
        """An operator ends this life: what is not found at the next start was given up on purpose, not lost."""
        self._write(stopped=True)

    def revive(self, found: dict[str, int], sources: Mapping[str, Source], tell: Tell = tell_nobody) -> None:
        """Adopt what the last life left; ``found``: descriptors by name, ours from now on. All weights are hashed
        before this returns; ``tell`` hears what is done, and how many bytes of how many of all of it. ``to_load`` then
        has the rows of models whose memory is gone."""
        last = ledger.last(self._path)
        told = _summed(tell, [row for row in last.weights if row.memory in found] if last else [])
        for arena in last.arenas if last else ():
            self._revive_arena(arena, found.pop(arena.memory, None))
        parted: dict[str, list[WeightsRow]] = {}
        unfinished = self._unfinished(last.weights if last else (), sources)
        for row in last.weights if last else ():
            source = sources.get(row.model)
            if row.model in unfinished:
                self._begin_anew(row, found.pop(row.memory, None))
                continue
            if source is not None and resplit.other_parts(row, source):
                parted.setdefault(row.model, []).append(row)
            stopped = last is not None and last.stopped
            again = self._revive_model(row, found.pop(row.memory, None), sources, told(row), stopped=stopped)
            if again is not None:
                self.to_load[row.model, row.rank] = again
        for model in {name for name, _ in self.models.entries}:
            self.models.level(model)
        for model, rows in parted.items():
            for row in resplit.rows_to_load(rows, sources[model]):
                self.to_load[model, row.rank] = row
        self.keeping.save()
        for name, fd in found.items():  # a death between the store and the ledger left them; nobody was told of them
            self._forget(name, fd, "no ledger row names it")

    @staticmethod
    def _unfinished(rows: tuple[WeightsRow, ...], sources: Mapping[str, Source]) -> set[str]:
        return {
            model
            for model, source in sources.items()
            if resplit.never_whole([row for row in rows if row.model == model and row.source == source.text()], source)
        }

    def _begin_anew(self, row: WeightsRow, fd: int | None) -> None:
        if fd is not None:
            self._forget(row.memory, fd, "the last life ended before all parts of its model were there")
        self.to_load[row.model, row.rank] = resplit.anew(row)

    def _forget(self, name: str, fd: int, why: str) -> None:
        os.close(fd)
        self.keeping.drop(name)
        self._log("dropped", name=name, why=why)

    def _revive_arena(self, row: ArenaRow, fd: int | None) -> None:
        lives = row.pid > 0 and procs.lives(row.pid, row.start_time)
        if fd is None:
            if lives:
                self.lost.append(
                    f"arena {row.slot}: its memory died with the last owner and its store; {row.who} (pid {row.pid}) "
                    "writes on in what it has mapped, and the next main begins with an empty arena"
                )
        elif self._slots is not None and row.slot not in self._slots and not lives:
            self._forget(row.memory, fd, "its slot is not configured any more")
        else:
            entry = self.arenas.adopt(row, fd)
            self.keeping.held[row.memory] = fd
            said = f"arena {row.slot} {entry.arena.state.value} at epoch {entry.arena.epoch}"
            self.adopted.append(f"{said}, holder {entry.arena.who}" if entry.arena.who else said)

    def _revive_model(
        self, row: WeightsRow, fd: int | None, sources: Mapping[str, Source], told: Told, *, stopped: bool
    ) -> WeightsRow | None:
        """The row to load again, or None. ``stopped``: the last life was stopped by an operator."""
        source = sources.get(row.model)
        if source is None or source.text() != row.source:
            if fd is not None:
                self._forget(row.memory, fd, "the configuration asks for other weights")
            part = source is not None and row.rank < source.ranks  # it may lie in fewer parts now
            return msgspec.structs.replace(row, from_files=True) if part else None
        if fd is None:
            if not stopped and row.memory and not (row.from_files and row.whole):
                name = f"weights {row.model} v{row.version}"
                self.lost.append(f"{name}: their memory died with the last owner and its store")
            return msgspec.structs.replace(row, from_files=stopped or (row.from_files and row.whole))
        entry = self.models.adopt(row, fd, source, told)
        self.keeping.held[row.memory] = fd
        self.adopted.append(f"weights {row.model} {entry.weights.state.value} v{entry.weights.version}")
        return None

    def orphans(self) -> list[ArenaEntry]:
        """Adopted leases whose holder has not reclaimed yet: their process is watched, as they have no connection."""
        return [entry for entry in self.arenas.entries.values() if entry.arena.peer is None and entry.holder_pidfd >= 0]
