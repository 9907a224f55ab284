"""Incidents and transitions of slots on disk (promise O2). A disk that takes nothing, full or broken, costs a record
and no handover: the log says which."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from belayer.errors import Refused
from belayer.messages.control import Incident
from belayer.story import Incidents

_MOST = 10_000  # rows; SQLite takes no number above 64 bits


class Records:
    """The store is opened at its first use, and where it was broken, at each later one."""

    def __init__(self, path: Path, log: Any) -> None:
        self._path, self._log = path, log
        self._store: Incidents | None = None

    def put(self, incident: Incident) -> None:
        self._write(f"incident {incident.incident_id}", lambda store: store.put(incident))

    def transition(self, at: float, who: str, before: str, after: str, event: str, generation: int) -> None:
        work = f"transition of {who} to {after}"
        self._write(work, lambda store: store.transition(at, who, before, after, event, generation))

    def latest(self, limit: int = 50) -> list[Incident]:
        """Newest first, ``_MOST`` of them. Raises Refused when they cannot be read."""
        try:
            return self._opened().latest(min(limit, _MOST))
        except (sqlite3.Error, OSError) as why:
            self._give_up(why)
            raise Refused(f"incidents at {self._path} cannot be read: {why}", remedy="look at that disk") from why

    def outcome(self, incident_id: str) -> str:
        """Of the incident of that id, "" when there is none or it cannot be read."""
        try:
            return self._opened().outcome(incident_id)
        except (sqlite3.Error, OSError) as why:
            self._give_up(why)
            return ""

    def _give_up(self, why: Exception) -> None:
        """A full disk leaves the connection whole, and another one could not be opened on it: what is on record can
        still be read. What is no database needs another one."""
        if not isinstance(why, sqlite3.OperationalError):
            self.close()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self) -> Incidents:
        if self._store is None:
            self._store = Incidents(self._path)
        return self._store

    def _write(self, what: str, work: Callable[[Incidents], None]) -> None:
        try:
            work(self._opened())
        except (sqlite3.Error, OSError) as why:
            self._give_up(why)
            self._log.error("not on record", what=what, path=str(self._path), why=str(why))
