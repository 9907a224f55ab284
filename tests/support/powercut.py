"""Every disk that a power cut could leave, from the calls that a store made (envkeeper.disk).

The model is stricter than ext4 and xfs: a changed name is certain only after its folder or the file system was synced,
a file's bytes only after the file or the file system was; until then each may be there or not, in any combination. A
rename is atomic. Bytes that were not synced are all there, or all as they were at the last sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path

from envkeeper.disk import Disk

EXHAUSTIVE = 7  # up to so many uncertain changes all combinations; beyond, at most two of them missing or there

Image = dict[Path, bytes | None]  # by relative path; None is a folder


@dataclass(slots=True)
class Inode:
    data: bytes = b""
    certain: bytes = b""


@dataclass(slots=True)
class Change:
    """Of names: "mkdir", "file", "rename", "link", "unlink", "tree" (removed)."""

    kind: str
    path: Path
    new: Path | None = None
    inode: Inode | None = None
    certain: bool = False

    @property
    def folders(self) -> set[Path]:
        """A sync of one of these makes it certain."""
        return {self.path.parent} | ({self.new.parent} if self.new else set())


def _idle() -> None:
    return


@dataclass
class Recorder(Disk):
    """Does everything for real below ``root`` and remembers it; ``look`` is called after every call. ``deaf``: syncs
    ("file", "dir", "all") that are claimed and not done."""

    root: Path
    deaf: frozenset[str] = frozenset()
    look: Callable[[], None] = _idle
    changes: list[Change] = field(default_factory=list)
    _files: dict[Path, Inode] = field(default_factory=dict)

    def mkdir(self, path: Path) -> None:
        if not path.exists():
            super().mkdir(path)
            self._note(Change("mkdir", path))

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data)
        if path not in self._files:
            self._files[path] = Inode(data)
            self._note(Change("file", path, inode=self._files[path]))
        else:
            self._files[path].data = data
            self.look()

    def create(self, path: Path, data: bytes) -> None:
        super().create(path, data)
        self._files[path] = Inode(data)
        self._note(Change("file", path, inode=self._files[path]))

    def sync_file(self, path: Path) -> None:
        super().sync_file(path)
        if "file" not in self.deaf:
            self._files[path].certain = self._files[path].data
        self.look()

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        for change in self.changes:
            change.certain |= "dir" not in self.deaf and path in change.folders
        self.look()

    def sync_all(self, path: Path) -> None:
        if "all" not in self.deaf:
            self.settle()
        self.look()

    def settle(self) -> None:
        """All of it certain, as after minutes of quiet."""
        for change in self.changes:
            change.certain = True
            if change.inode is not None:
                change.inode.certain = change.inode.data

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._files.pop(new, None)
        for path in [p for p in self._files if p == old or old in p.parents]:
            self._files[new / path.relative_to(old)] = self._files.pop(path)
        self._note(Change("rename", old, new))

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self._files[new] = self._files[old]
        self._note(Change("link", old, new))

    def unlink(self, path: Path) -> None:
        there = path.exists()
        super().unlink(path)
        if there:
            self._files.pop(path, None)
            self._note(Change("unlink", path))

    def remove_tree(self, path: Path) -> None:
        super().remove_tree(path)
        for name in [p for p in self._files if path in p.parents]:
            del self._files[name]
        self._note(Change("tree", path))

    def images(self) -> Iterator[Image]:
        """Of this very moment, each once."""
        unsure = [n for n, change in enumerate(self.changes) if not change.certain]
        seen = set()
        for there in _choices(unsure):
            names = self._names(set(there))
            for whole in (True, False):
                image = {p: None if i is None else i.data if whole else i.certain for p, i in names.items()}
                key = frozenset(image.items())
                if key not in seen:
                    seen.add(key)
                    yield image

    def _names(self, there: set[int]) -> dict[Path, Inode | None]:
        names: dict[Path, Inode | None] = {Path(): None}
        for n, change in enumerate(self.changes):
            if change.certain or n in there:
                self._apply(names, change)
        return names

    def _apply(self, names: dict[Path, Inode | None], change: Change) -> None:
        """Nothing comes of a change whose folder or source the cut has taken."""
        path = change.path.relative_to(self.root)
        new = change.new.relative_to(self.root) if change.new else path
        below = [name for name in names if path in name.parents]
        match change.kind:
            case "mkdir" | "file" if path.parent in names:
                names[path] = change.inode
            case "link" if path in names and new.parent in names:
                names[new] = names[path]
            case "rename" if path in names and new.parent in names:
                for name in [path, *below]:
                    names[new / name.relative_to(path)] = names.pop(name)
            case "unlink" | "tree":
                for name in [path, *below]:
                    names.pop(name, None)

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        self.look()


def _choices(unsure: list[int]) -> Iterator[tuple[int, ...]]:
    if len(unsure) <= EXHAUSTIVE:
        sizes = list(range(len(unsure) + 1))
    else:
        sizes = [0, 1, 2, len(unsure) - 2, len(unsure) - 1, len(unsure)]
    yield from chain.from_iterable(combinations(unsure, size) for size in sizes)


def build(image: Image, root: Path) -> None:
    """Put ``image`` below ``root``, which does not exist yet."""
    root.mkdir()
    for path, data in sorted(image.items()):
        if data is None:
            (root / path).mkdir(exist_ok=True, mode=0o700)
        else:
            (root / path).write_bytes(data)
