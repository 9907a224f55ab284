"""Where the lives of a sandbox came from, and what was noted for them. One small file in its store, written whole."""

from __future__ import annotations

from pathlib import Path

import msgspec

from belayer import statefile
from belayer.errors import Refused
from belayer.messages.sandbox import Birth
from envkeeper.disk import room

MAX_NOTE = 16 << 10  # bytes of UTF-8
MAX_NOTES = 64


class _File(msgspec.Struct, frozen=True, kw_only=True):
    births: tuple[Birth, ...] = ()


class Lineage:
    """Births in order, a fork's beginning with those that its checkpoint's maker had."""

    def __init__(self, home: Path) -> None:
        self._path = home / "lineage"

    def births(self) -> tuple[Birth, ...]:
        """Raises StateDamaged."""
        found = statefile.load(self._path, _File)
        return found.births if found else ()

    def add(self, *births: Birth) -> None:
        """An incarnation that is there already (its restore was cut short) is written over."""
        new = {birth.incarnation for birth in births}
        kept = tuple(birth for birth in self.births() if birth.incarnation not in new)
        with room("the lineage"):
            statefile.save(self._path, _File(births=(*kept, *births)))

    def notes(self) -> tuple[str, ...]:
        """Oldest first; of more than ``MAX_NOTES`` the newest."""
        return tuple(birth.note for birth in self.births() if birth.note)[-MAX_NOTES:]


def check_note(note: str) -> str:
    """Raises Refused."""
    size = len(note.encode())
    if size > MAX_NOTE:
        raise Refused(f"a note of {size} bytes", remedy=f"at most {MAX_NOTE}")
    return note
