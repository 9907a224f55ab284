"""What a sandbox may know about its own lives: a folder of the host, mounted read-only at /run/belayer.

    incarnation     its name, in 64 bytes whatever its length (an open descriptor of a file whose size changed would
                    fail the restore); it changes with every restore and differs between forks. A program that caches a
                    credential, a connection or a random seed compares it and drops them.
    notes/NNNN      what was handed to this attempt about an abandoned one, oldest first; never changed afterwards

Not in the sandbox's own file system, so that writing it is no part of the upper layer, and written before the life
begins, so that a restored program never reads the name of the life before.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from envkeeper.disk import room

IN_SANDBOX = "/run/belayer"
_NAME_BYTES = 64


class Lives:
    """One folder per incarnation below ``root`` (closed to others; what is mounted from it is open)."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(mode=0o700, exist_ok=True)

    def make(self, incarnation: str, notes: Iterable[str] = ()) -> Path:
        folder = self._root / incarnation
        shutil.rmtree(folder, ignore_errors=True)  # of a restore that failed: nothing is mounted from it any more
        with room(f"the folder of {incarnation}"):
            (folder / "notes").mkdir(parents=True)
            (folder / "incarnation").write_text(f"{incarnation:<{_NAME_BYTES - 1}}\n")
            for number, note in enumerate(notes, 1):
                (folder / "notes" / f"{number:04}").write_text(note)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o444)
        return folder

    def rename(self, old: str, new: str) -> None:
        """The life that was made as ``old`` becomes ``new``. What is mounted follows its folder; the name inside is
        written over in place, and nobody has read it: nothing has run there yet."""
        (self._root / old).rename(self._root / new)
        with (self._root / new / "incarnation").open("r+") as file:
            file.write(f"{new:<{_NAME_BYTES - 1}}\n")

    def remove(self, incarnation: str) -> None:
        shutil.rmtree(self._root / incarnation, ignore_errors=True)

    def sweep(self, living: set[str]) -> None:
        for folder in self._root.iterdir():
            if folder.name not in living:
                self.remove(folder.name)
