"""Stories: every transition with who, from, to, event, cause and time; incidents kept on disk (promise O2).

SQLite (stdlib, WAL) holds the incidents: readable while the daemon is down, torn-write safe by itself.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from belayer.messages.control import Incident


class Incidents:
    """The incident store of one host. Written by belayerd (slots) and envkeeper (sandboxes); any reader."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, isolation_level=None)
        path.chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        # No fsync per commit: this runs inside a handover. kill -9 loses nothing; a power cut may lose the last rows.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS incidents "
            "(id TEXT PRIMARY KEY, at REAL NOT NULL, slot TEXT NOT NULL, body BLOB NOT NULL)"
        )
        # Ten thousand handovers later the newest ones are still found without reading all the bodies.
        self._db.execute("CREATE INDEX IF NOT EXISTS incidents_at ON incidents (at)")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS transitions (n INTEGER PRIMARY KEY, at REAL NOT NULL, who TEXT NOT NULL, "
            "before TEXT NOT NULL, after TEXT NOT NULL, event TEXT NOT NULL, generation INTEGER NOT NULL)"
        )

    def put(self, incident: Incident) -> None:
        self._db.execute(
            "INSERT INTO incidents VALUES (?, ?, ?, ?) ON CONFLICT(id) DO UPDATE SET body = excluded.body",
            (incident.incident_id, incident.at, incident.slot, msgspec.msgpack.encode(incident)),
        )

    def transition(self, at: float, who: str, before: str, after: str, event: str, generation: int) -> None:
        self._db.execute(
            "INSERT INTO transitions (at, who, before, after, event, generation) VALUES (?, ?, ?, ?, ?, ?)",
            (at, who, before, after, event, generation),
        )

    def latest(self, limit: int = 50) -> list[Incident]:
        """Newest first."""
        rows = self._db.execute("SELECT body FROM incidents ORDER BY at DESC LIMIT ?", (limit,))
        return [msgspec.msgpack.decode(body, type=Incident) for (body,) in rows]

    def outcome(self, incident_id: str) -> str:
        """Of the incident of that id, "" when there is none."""
        row = self._db.execute("SELECT body FROM incidents WHERE id = ?", (incident_id,)).fetchone()
        return "" if row is None else msgspec.msgpack.decode(row[0], type=Incident).outcome

    def open_of(self, slot: str) -> Incident | None:
        """The incident of ``slot`` (or sandbox) that has not ended, if there is one."""
        rows = self._db.execute(
            "SELECT body FROM incidents WHERE slot = ? ORDER BY at DESC LIMIT 1", (slot,)
        ).fetchall()
        found = [msgspec.msgpack.decode(body, type=Incident) for (body,) in rows]
        return found[0] if found and found[0].outcome == "open" else None

    def story(self, who: str, limit: int = 200) -> list[tuple[float, str, str, str, int]]:
        """Transitions of ``who``, oldest first: (at, before, after, event, generation)."""
        rows = self._db.execute(
            "SELECT at, before, after, event, generation FROM transitions WHERE who = ? ORDER BY n DESC LIMIT ?",
            (who, limit),
        )
        return list(reversed(rows.fetchall()))

    def close(self) -> None:
        self._db.close()
