"""The few ways in which the store changes its disk, one call each: a test records them and builds, for every moment,
the disks that a power cut could leave (only what was synced is certain; the rest may be there or not).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from belayer import statefile
from belayer.errors import Refused

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # of the disk, or of what its operator gave us of it


class Disk:
    """Plain calls. ``write`` and the changes of names are certain only after a sync of the file, the folder, or the
    whole file system (ext4 and xfs promise no more)."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """A new file, or the old one cut and written again."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)

    def create(self, path: Path, data: bytes) -> None:
        """Raises FileExistsError: the one atomic test-and-set of a file system."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)

    def sync_file(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sync_dir(self, path: Path) -> None:
        statefile.fsync_dir(path)

    def sync_all(self, path: Path) -> None:
        """syncfs(2) of the file system that holds ``path``."""
        sync_filesystem(path)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def replace(self, path: Path, data: bytes) -> None:
        """Old whole or new whole, and on disk when this returns."""
        beside = path.with_name(f".{path.name}.new")
        try:
            self.write(beside, data)
            self.sync_file(beside)
            self.rename(beside, path)
        except OSError:
            self.unlink(beside)
            raise
        self.sync_dir(path.parent)

    def create_durable(self, path: Path, data: bytes) -> None:
        self.create(path, data)
        self.sync_file(path)
        self.sync_dir(path.parent)


@contextmanager
def room(what: str) -> Iterator[None]:
    """A full disk is an expected fault: Refused, saying that ``what`` could not be written."""
    try:
        yield
    except OSError as why:
        if why.errno not in FULL:
            raise
        raise Refused(f"{what} could not be written: {why.strerror}", remedy="free disk space below the root") from why


def is_full(folder: Path) -> bool:
    """Not even a MiB can be written below ``folder``. Tried, because a quota is in no figure of the file system."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return file.write(bytes(1 << 20)) < 1 << 20
    except OSError as why:
        if why.errno not in FULL:
            raise
        return True


def sync_filesystem(path: Path) -> None:
    """syncfs(2) of the file system that holds ``path``. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(fd)
