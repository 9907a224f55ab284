"""State that must survive kill -9: write beside, fsync, rename, fsync the directory.

A reader sees the old whole file or the new whole file (rename(2)); "absent" and "damaged" are told apart.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from belayer.errors import BelayerError, ErrorCode

T = TypeVar("T")


class StateDamaged(BelayerError):
    """A state file exists and cannot be read: never treated as absent."""

    code = ErrorCode.BROKEN


def fsync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data`` atomically; with ``durable`` it is on disk when this returns."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if durable:
        fsync_dir(path.parent)


def save(path: Path, value: msgspec.Struct, *, durable: bool = True) -> None:
    write_bytes(path, msgspec.msgpack.encode(value), durable=durable)


def load(path: Path, kind: Any) -> Any:
    """The value, or None when the file does not exist. Raises StateDamaged when it cannot be read as ``kind``."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as why:
        raise StateDamaged(
            f"state file {path} is damaged: {why}",
            kept=f"{len(data)} bytes as they are",
            remedy="move it aside to start without it",
        ) from why
