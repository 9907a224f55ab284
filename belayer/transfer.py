"""Files to and from a sandbox, in messages of bounded size."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from belayer.errors import Refused
from belayer.messages.sandbox import FileIn, PathContent

PART = 4 << 20  # bytes of file content in one message


def parts(source: Path, target: str, user: str) -> Iterator[list[FileIn]]:
    """Messages worth of folders and files, each folder before what is in it: a private one is never open to others,
    not even for a moment. Raises Refused before the first one, for what is neither a regular file nor a folder and for
    a name that is not UTF-8."""
    found = list(_walk(source, target))
    batch, size = list[FileIn](), 0
    for path, name in found:
        for file in _pieces(path, name, user):
            if batch and (size + len(file.data) > PART or len(batch) >= 1000):
                yield batch
                batch, size = [], 0
            batch.append(file)
            size += len(file.data)
    if batch:
        yield batch


def _pieces(path: Path, name: str, user: str) -> Iterator[FileIn]:
    if path.is_dir():
        yield FileIn(path=name, data=b"", mode=path.stat().st_mode, user=user)
        return
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield FileIn(path=name, data=file.read(PART), mode=mode, user=user)
        while data := file.read(PART):
            yield FileIn(path=name, data=data, mode=mode, user=user, append=True)


def _walk(source: Path, target: str) -> Iterator[tuple[Path, str]]:
    try:
        target.encode()
    except UnicodeEncodeError as why:
        said = f"{os.fsencode(source)!r} has a name that is not UTF-8, so it cannot be sent"
        raise Refused(said, kept="nothing was written", remedy="upload an archive and unpack it there") from why
    kind = source.lstat().st_mode
    if stat.S_ISDIR(kind):
        yield source, target.rstrip("/") or "/"
        for name in sorted(os.listdir(source)):
            yield from _walk(source / name, f"{target.rstrip('/')}/{name}")
    elif stat.S_ISREG(kind):
        yield source, target
    else:
        raise Refused(f"{source} is neither a file nor a folder", remedy="upload an archive and unpack it there")


def fetch(read: Callable[[str, int], PathContent], source: str, target: Path) -> int:
    """The number of files. What the sandbox calls its files is never trusted with a place outside of ``target``, which
    must not exist and appears whole, or not at all."""
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists")
    with tempfile.TemporaryDirectory(prefix=".belayer-", dir=target.parent) as beside:
        count = _fetch(read, source, Path(beside) / "part")
        os.rename(Path(beside) / "part", target)
    return count


def _fetch(read: Callable[[str, int], PathContent], source: str, target: Path) -> int:
    seen = read(source, 0)
    if stat.S_ISDIR(seen.mode):
        target.mkdir()
        count = 0
        for name in seen.names:
            if name in (".", "..") or "/" in name or "\0" in name:
                raise Refused(f"{source} lists {name!r}, which is no name")
            count += _fetch(read, f"{source.rstrip('/')}/{name}", target / name)
        return count
    with target.open("xb") as file:
        os.fchmod(file.fileno(), stat.S_IMODE(seen.mode) & 0o777)  # no setuid of a sandbox's making on this host
        offset = 0
        while seen.data:
            file.write(seen.data)
            offset += len(seen.data)
            if offset >= seen.size:
                break
            seen = read(source, offset)
    return 1
