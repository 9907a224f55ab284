"""Sandbox deaths as incidents (promise O2), in the same store as those of the slots: `belayerctl incidents` shows both,
also while envkeeper is down. SQLite takes several writers; a row of ours costs no fsync and never stops a recovery.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from belayer.clock import wall
from belayer.ids import new_incident_id
from belayer.messages.control import Incident, StepTiming
from belayer.story import Incidents
from envkeeper.core import Event, State
from envkeeper.records import SandboxRecord

_ROUTINE = frozenset({Event.ACT, Event.COMMITTED, Event.CAPTURE, Event.CAPTURED})


class Story:
    """Event loop only. ``log`` is told when the store cannot be written."""

    def __init__(self, path: Path, log: Any) -> None:
        self._path, self._log = path, log
        self._store: Incidents | None = None

    def transition(self, record: SandboxRecord, before: State, event: Event, detail: str, *, injected: bool) -> None:
        """``record`` is the one after it."""
        if event in _ROUTINE:  # thousands of each, and each is in the log
            return
        self._write(self._transition, record, before, event)
        if record.state is State.LOST and before not in (State.LOST, State.RESTORING):
            self._write(self._open, record, detail, injected)
        elif record.state is State.DESTROYED:
            self._write(self._end, record, "destroyed", (), 0.0)
        elif event is Event.RESTORE_FAILED:
            self._write(self._failed, record, detail)

    def adopted(self, record: SandboxRecord, before: State) -> None:
        """A sandbox that was found lost when envkeeper came back."""
        if record.state is State.LOST and before is not State.LOST:
            self._write(self._open_once, record)

    def restored(self, record: SandboxRecord, phases: dict[str, float], path: tuple[str, ...], total_ms: float) -> None:
        order = ["fence", "create", "open", "install", "start", "verify_rest", "proof"]
        steps = tuple(StepTiming(step=name, ms=round(phases[name], 3)) for name in order if name in phases)
        tried = tuple(StepTiming(step="tried", ms=0.0, detail=line) for line in path)
        self._write(self._end, record, f"restored at boundary {record.boundary}", steps + tried, total_ms)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _write(self, work: Any, *args: Any) -> None:
        try:
            if self._store is None:
                self._store = Incidents(self._path)
            work(self._store, *args)
        except sqlite3.Error as why:
            self.close()  # opened again at the next occasion
            self._log.error("incident not written", path=str(self._path), why=str(why))

    @staticmethod
    def _transition(store: Incidents, record: SandboxRecord, before: State, event: Event) -> None:
        store.transition(wall(), record.sandbox_id, str(before), str(record.state), str(event), record.lives)

    @staticmethod
    def _open(store: Incidents, record: SandboxRecord, detail: str, injected: bool) -> None:
        store.put(
            Incident(
                incident_id=new_incident_id(),
                slot=record.sandbox_id,
                at=wall(),
                cause="sandbox_lost",
                detail=detail,
                from_generation=record.lives,
                to_generation=record.lives,
                outcome="open",
                injected=injected,
            )
        )

    def _open_once(self, store: Incidents, record: SandboxRecord) -> None:
        if store.open_of(record.sandbox_id) is None:  # of a restore that was cut short it is there
            self._open(store, record, record.reason, False)

    @staticmethod
    def _failed(store: Incidents, record: SandboxRecord, detail: str) -> None:
        found = store.open_of(record.sandbox_id)
        if found is not None:
            tried = StepTiming(step="failed", ms=0.0, detail=detail)
            store.put(msgspec.structs.replace(found, steps=(*found.steps, tried)))

    @staticmethod
    def _end(
        store: Incidents, record: SandboxRecord, outcome: str, steps: tuple[StepTiming, ...], total_ms: float
    ) -> None:
        found = store.open_of(record.sandbox_id)
        if found is None:  # a rewind of a living sandbox is no fault
            return
        store.put(
            msgspec.structs.replace(
                found,
                outcome=outcome,
                to_generation=record.lives,
                steps=(*found.steps, *steps),
                total_ms=round(total_ms, 3),
            )
        )
