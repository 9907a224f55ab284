"""Exact copy of an overlay upper layer: capture into one stream while the sandbox is frozen, unpack into a fresh one.

The layer is copied *raw* (not through the merged view): whiteouts stay character devices 0:0, directories keep the
opaque and other trusted.overlay attributes, capabilities and ACLs are attributes like any other; hard links, holes,
sockets, pipes and device nodes stay what they are, times keep their nanoseconds. Inode numbers and
ctimes cannot be kept (declared differences).

Format: ``upper.index`` (msgpack list of entries, parents before children) and ``upper.pack`` (the data of all files in
one stream). One stream, because creating ten thousand files costs ten times their bytes. Large files start on a
4096-byte border, so that a file system with reflinks shares their blocks (FICLONERANGE) instead of copying them.

Never by mtime: a file written through a shared mapping keeps its old one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from belayer.errors import CheckpointIncomplete, CheckpointRefused, RestoreFailed

INDEX, PACK = "upper.index", "upper.pack"
_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_BLOCK = 4096
_LONGEST, _OPEN_FOLDERS = 4000, 64
_SMALL = 65536  # bytes; below it a copy is cheaper than a clone
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS})


@dataclass(slots=True)
class Entry:
    """One inode name. ``link``: target of a symlink, or the first path of the same file when ``kind`` is "hard".
    ``parts``: (offset in the file, offset in the pack, bytes) of each stretch that is not a hole."""

    path: bytes
    kind: str  # dir file link hard node
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    atime_ns: int
    rdev: int = 0
    size: int = 0
    link: bytes = b""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    parts: list[tuple[int, int, int]] = field(default_factory=list)

    def row(self) -> list[object]:
        return [
            *(self.path, self.kind, self.mode, self.uid, self.gid, self.mtime_ns, self.atime_ns),
            *(self.rdev, self.size, self.link, self.xattrs, self.parts),
        ]


@dataclass(slots=True)
class Captured:
    """``cloned``: bytes shared by reflink instead of copied."""

    entries: list[Entry]
    nbytes: int
    cloned: int


def capture(upper: Path, folder: Path) -> Captured:
    """Copy the frozen layer ``upper`` into ``folder/upper.pack``; the index is returned and written by
    ``write_index`` after the thaw. Raises CheckpointRefused for a layer that only holds references (metacopy)."""
    out = os.open(folder / PACK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        pack = _Pack(out)
        top = os.fsencode(upper)
        entries = [_entry(top, b"", os.lstat(top))]
        with _Names(top) as names:
            _walk(names, entries, {}, pack)
        pack.flush()
        return Captured(entries, pack.end, pack.cloned)
    finally:
        os.close(out)


def include(captured: Captured, upper: Path, folder: Path, path: bytes) -> None:
    """Add a name that appeared after ``capture``: CRIU makes one for an open file whose own name was deleted while
    another hard link keeps it alive, and takes it away again when the dump has ended. Parents must be captured."""
    if any(entry.path == path for entry in captured.entries):
        return
    top = os.fsencode(upper)
    info = os.lstat(_join(top, path))
    entry = _entry(_join(top, path), path, info)
    same = (e.path for e in captured.entries if e.kind == "file" and e.size == info.st_size)
    twin = next((name for name in same if os.lstat(_join(top, name)).st_ino == info.st_ino), None)
    if twin is not None:
        entry.kind, entry.link = "hard", twin
    elif entry.kind == "file":
        out = os.open(folder / PACK, os.O_RDWR | os.O_CLOEXEC)
        try:
            pack = _Pack(out)
            pack.end = captured.nbytes
            entry.parts = pack.add(_join(top, path), info)
            pack.flush()
            captured.nbytes = pack.end
        finally:
            os.close(out)
    captured.entries.append(entry)


def times_of(upper: Path, folders: Iterable[str]) -> dict[bytes, tuple[int, int]]:
    """path -> (atime, mtime) in ns of those of ``folders`` (absolute in the sandbox) that the layer has."""
    out = {}
    for folder in folders:
        path = os.fsencode(folder.lstrip("/"))
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            info = os.lstat(_join(os.fsencode(upper), path))
            out[path] = (info.st_atime_ns, info.st_mtime_ns)
    return out


def set_times(upper: Path, times: Mapping[bytes, tuple[int, int]]) -> None:
    for path, both in times.items():
        with contextlib.suppress(FileNotFoundError):  # the sandbox died, and was removed
            os.utime(_join(os.fsencode(upper), path), ns=both, follow_symlinks=False)


def keep_times(captured: Captured, times: Mapping[bytes, tuple[int, int]]) -> None:
    """Folders whose times the dump itself moved: ``times`` is path -> (atime, mtime) in ns from before it."""
    for entry in captured.entries:
        if entry.path in times:
            entry.atime_ns, entry.mtime_ns = times[entry.path]


def write_index(captured: Captured, folder: Path) -> None:
    fd = os.open(folder / INDEX, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgpack.packb([entry.row() for entry in captured.entries], use_bin_type=True))


def read_index(folder: Path) -> list[Entry]:
    """Raises RestoreFailed when it is not an index of ours."""
    data = (folder / INDEX).read_bytes()
    try:
        # Keys of the attribute map are bytes; paths of a sandbox need not be text.
        rows = msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
        entries = [Entry(*row) for row in rows]
    except (ValueError, TypeError, msgpack.UnpackException) as why:
        raise RestoreFailed(f"{folder / INDEX} is no index of an upper layer: {why}") from why
    _check_paths(entries, folder / INDEX)
    return entries


def _check_paths(entries: list[Entry], where: Path) -> None:
    """Every name once, below a folder that the index itself makes before: a link could lead out of the layer, and so
    could a name. Ours are so by construction; a changed index is not."""
    kinds: dict[bytes, str] = {}
    for entry in entries:
        parent, _, name = entry.path.rpartition(b"/")
        inside = kinds.get(parent) == "dir" and name not in (b"", b".", b"..") if kinds else entry.path == b""
        inside = inside and not entry.path.startswith(b"/")
        if not inside or entry.path in kinds or (entry.kind == "hard" and kinds.get(entry.link) in (None, "dir")):
            raise RestoreFailed(f"{where} names a path outside of the layer, or twice: {entry.path!r}")
        kinds[entry.path] = entry.kind


def unpack(folder: Path, upper: Path) -> int:
    """Fill the fresh layer ``upper`` (emptied first: `create` may have put a working directory there). Returns the
    number of entries. Times of directories come last: filling a directory moves its own."""
    entries = read_index(folder)
    top = os.fsencode(upper)
    _empty(top)
    pack = os.open(folder / PACK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _Names(top) as names:
            for entry in entries:
                _create(names, entry, pack)
            for entry in reversed(entries):
                if entry.kind == "dir":
                    _set_times(names.full(entry.path), entry)
    finally:
        os.close(pack)
    return len(entries)


# ---- names ----


class _Names:
    """Full names of entries below ``top``. A sandbox can nest folders deeper than a path may be long (4096 bytes):
    beyond that, names lead through the descriptor of their folder."""

    def __init__(self, top: bytes) -> None:
        self._top, self._folders = top, OrderedDict[bytes, int]()

    def __enter__(self) -> _Names:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._folders.values():
            os.close(fd)

    def full(self, path: bytes) -> bytes:
        if len(self._top) + len(path) < _LONGEST:
            return _join(self._top, path)
        parent, _, name = path.rpartition(b"/")
        return b"/proc/self/fd/%d/%s" % (self._folder(parent), name)

    def _folder(self, path: bytes) -> int:
        """A loop and not a call in a call: from the nearest folder that is open, or has a short name, down."""
        chain: list[bytes] = []
        while (fd := self._folders.get(path)) is None:
            chain.append(path)
            if len(self._top) + len(path) < _LONGEST:
                break
            path = path.rpartition(b"/")[0]
        for at in reversed(chain):
            name = _join(self._top, at) if fd is None else b"/proc/self/fd/%d/%s" % (fd, at.rpartition(b"/")[2])
            fd = self._folders[at] = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if len(self._folders) > _OPEN_FOLDERS:
                os.close(self._folders.popitem(last=False)[1])
        assert fd is not None
        return fd


# ---- capture ----


def _walk(names: _Names, entries: list[Entry], first: dict[tuple[int, int], bytes], pack: _Pack) -> None:
    """Folders from a list and not by calls in calls: depth is the sandbox's to choose."""
    waiting = [b""]
    while waiting:
        below = waiting.pop()
        with os.scandir(names.full(below)) as listing:
            for item in listing:
                path = below + b"/" + item.name if below else item.name
                info = item.stat(follow_symlinks=False)
                entry = _entry(item.path, path, info)
                entries.append(entry)
                if entry.kind == "dir":
                    waiting.append(path)
                    continue
                # Whiteouts share one inode by hard link in newer kernels; as separate nodes they mean the same.
                if info.st_nlink > 1 and not (stat.S_ISCHR(info.st_mode) and info.st_rdev == 0):
                    known = first.setdefault((info.st_dev, info.st_ino), path)
                    if known != path:
                        entry.kind, entry.link = "hard", known
                        continue
                if entry.kind == "file":
                    entry.parts = pack.add(item.path, info)


def _entry(full: bytes, path: bytes, info: os.stat_result) -> Entry:
    mode = info.st_mode
    kind = "dir" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "link" if stat.S_ISLNK(mode) else "node"
    xattrs: dict[bytes, bytes] = {}
    for name in os.listxattr(full, follow_symlinks=False):
        if name == "trusted.overlay.metacopy":
            raise CheckpointRefused(
                f"the upper layer holds only the metadata of {path.decode(errors='replace')} (overlay metacopy)",
                remedy="mount overlay without metacopy=on",
            )
        xattrs[os.fsencode(name)] = os.getxattr(full, name, follow_symlinks=False)
    return Entry(
        path=path,
        kind=kind,
        mode=mode,
        uid=info.st_uid,
        gid=info.st_gid,
        mtime_ns=info.st_mtime_ns,
        atime_ns=info.st_atime_ns,
        rdev=info.st_rdev if kind == "node" else 0,
        size=info.st_size if kind == "file" else 0,
        link=os.readlink(full) if kind == "link" else b"",
        xattrs=xattrs,
    )


class _Pack:
    """Appends files to the stream; small ones are gathered in memory and written together."""

    def __init__(self, fd: int) -> None:
        self.fd, self.end, self.cloned = fd, 0, 0
        self._gathered: list[bytes] = []
        self._waiting = 0
        self._reflink = True

    def add(self, path: bytes, info: os.stat_result) -> list[tuple[int, int, int]]:
        if info.st_size == 0:
            return []
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if info.st_size <= _SMALL:
                return [(0, self._gather(_read_all(fd, info.st_size, path)), info.st_size)]
            self.flush()
            whole = info.st_blocks * 512 >= info.st_size
            stretches = [(0, info.st_size)] if whole else _data_stretches(fd, info.st_size)
            return [(start, self._large(fd, start, size, path), size) for start, size in stretches]
        finally:
            os.close(fd)

    def flush(self) -> None:
        if not self._gathered:
            return
        _write_all(self.fd, b"".join(self._gathered), self.end - self._waiting)
        self._gathered, self._waiting = [], 0

    def _gather(self, data: bytes) -> int:
        at = self.end
        self._gathered.append(data)
        self.end += len(data)
        self._waiting += len(data)
        if self._waiting > 8 << 20:
            self.flush()
        return at

    def _large(self, fd: int, start: int, size: int, path: bytes) -> int:
        at = -(-self.end // _BLOCK) * _BLOCK
        if not (self._reflink and start % _BLOCK == 0 and self._clone(fd, start, size, at)):
            _copy(fd, start, self.fd, at, size, path)
        else:
            self.cloned += size
        self.end = at + size
        return at

    def _clone(self, fd: int, start: int, size: int, at: int) -> bool:
        # The end of a file may be a part of a block; anywhere else whole blocks are asked for.
        length = -(-size // _BLOCK) * _BLOCK if start + size < os.fstat(fd).st_size else size
        done = clone_range(fd, start, length, self.fd, at)
        self._reflink = done
        return done


def clone_range(source: int, start: int, size: int, target: int, at: int) -> bool:
    """Share blocks between two files; false where the file system cannot (or they are on two)."""
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("<qQQQ", source, start, size, at))
    except OSError as why:
        if why.errno in _NO_REFLINK:
            return False
        raise
    return True


def shares_blocks(source: Path, target: Path) -> bool:
    """True when files below the folder ``source`` can be cloned to ``target`` (reflinks). Leaves nothing behind."""
    with tempfile.TemporaryFile(dir=source) as here, tempfile.TemporaryFile(dir=target) as there:
        here.write(bytes(2 * _BLOCK))
        here.flush()
        return clone_range(here.fileno(), 0, 2 * _BLOCK, there.fileno(), 0)


def _data_stretches(fd: int, size: int) -> list[tuple[int, int]]:
    """What is not a hole, by SEEK_DATA and SEEK_HOLE (lseek(2))."""
    out, at = [], 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as why:
            if why.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        out.append((start, min(at, size) - start))
    return out


# ---- unpack ----


def _create(names: _Names, entry: Entry, pack: int) -> None:
    full = names.full(entry.path)
    if entry.kind == "hard":
        os.link(names.full(entry.link), full, follow_symlinks=False)
        return
    if entry.kind == "dir":
        if entry.path:
            os.mkdir(full, 0o700)
    elif entry.kind == "link":
        os.symlink(entry.link, full)
    elif entry.kind == "node":
        os.mknod(full, entry.mode, entry.rdev)
    else:
        _fill(full, entry, pack)
    os.chown(full, entry.uid, entry.gid, follow_symlinks=False)
    if entry.kind != "link":
        os.chmod(full, stat.S_IMODE(entry.mode))
    for name, value in entry.xattrs.items():  # after chown, which drops security.capability
        os.setxattr(full, name, value, follow_symlinks=False)
    if entry.kind != "dir":
        _set_times(full, entry)


def _fill(full: bytes, entry: Entry, pack: int) -> None:
    fd = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for start, at, size in entry.parts:
            aligned = size > _SMALL and start % _BLOCK == 0 and at % _BLOCK == 0
            last = os.fstat(pack).st_size == at + size
            if not (aligned and clone_range(pack, at, size if last else -(-size // _BLOCK) * _BLOCK, fd, start)):
                _copy(pack, at, fd, start, size, full)
        os.ftruncate(fd, entry.size)
    finally:
        os.close(fd)


def _empty(top: bytes) -> None:
    for item in list(os.scandir(top)):
        if item.is_dir(follow_symlinks=False):
            _empty(item.path)
            os.rmdir(item.path)
        else:
            os.unlink(item.path)
    for name in os.listxattr(top):
        if not name.startswith("security.selinux"):
            os.removexattr(top, name)


def _set_times(full: bytes, entry: Entry) -> None:
    os.utime(full, ns=(entry.atime_ns, entry.mtime_ns), follow_symlinks=False)


# ---- bytes ----


def _join(top: bytes, path: bytes) -> bytes:
    return top + b"/" + path if path else top


def _read_all(fd: int, size: int, path: bytes) -> bytes:
    data = os.pread(fd, size, 0)
    if len(data) != size:
        raise CheckpointIncomplete(f"{path!r} ended after {len(data)} of {size} bytes although it was frozen")
    return data


def _write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def _copy(source: int, start: int, target: int, at: int, size: int, path: bytes) -> None:
    """Through one buffer: where blocks cannot be shared, copy_file_range(2) goes page by page and costs a third more,
    and space that is asked for at once is found at once."""
    if size >= len(_buffer()):
        os.posix_fallocate(target, at, size)
    while size:
        part = _buffer()[: min(size, len(_buffer()))]
        done = os.preadv(source, [part], start)
        if done == 0:
            raise CheckpointIncomplete(f"{path!r} is {size} bytes shorter than it was")
        _write_all(target, part[:done], at)
        start, at, size = start + done, at + done, size - done


_local = threading.local()


def _buffer() -> memoryview:
    """1 MiB, of this thread."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(1 << 20))
    found: memoryview = _local.buffer
    return found
