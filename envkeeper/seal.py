"""Encryption of checkpoints at rest (promise E8): a memory image holds every secret that its sandbox has seen.

With a key, a checkpoint is captured on a tmpfs and only its ciphertext is ever written to the store; a restore decrypts
it to the tmpfs and removes it again. (Memory may be swapped: encrypt swap, or have none.) What stays readable is the
manifest: names, sizes, hashes, and the recipe with its environment.

A file: magic, 16 random bytes, then chunks of 1 MiB, each AES-256-GCM under a key that HKDF makes for this file from
the host's key and those bytes. A chunk's nonce is its number and whether it is the last one, so that none can be
moved, dropped or cut off; the associated data names checkpoint and file, so that none can stand for another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from belayer.config import Envkeeper
from belayer.errors import ConfigInvalid, HostUnfit, RestoreFailed
from belayer.paths import Paths

MAGIC = b"BLYSEAL1"
KEY_BYTES, SALT_BYTES, TAG_BYTES = 32, 16, 16
CHUNK = 1 << 20
_TMPFS, _RAMFS = "tmpfs", "ramfs"


class Seal:
    """``scratch``: a folder on a tmpfs for plain files, made here, 0700."""

    def __init__(self, key: bytes, scratch: Path) -> None:
        self._key, self.scratch = key, scratch
        self.key_id = _derive(key, b"", b"belayer key id").hex()[:16]
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = scratch.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise HostUnfit(f"{scratch} is not a folder of ours alone", remedy="remove it")
        if _kind_of(scratch) not in (_TMPFS, _RAMFS):
            raise HostUnfit(
                f"{scratch} is not on a tmpfs: plain memory images would reach a disk", remedy="mount a tmpfs there"
            )

    def close_folder(self, plain: Path, sealed: Path) -> None:
        """Encrypt every file below ``plain`` to the same name below ``sealed``; ``plain`` is kept."""
        names = [path.relative_to(plain) for path in plain.rglob("*") if path.is_file() and not path.is_symlink()]
        self._each(plain, sealed, names, self._close_file)

    def open_folder(self, sealed: Path, plain: Path, names: Iterable[str]) -> None:
        """Raises RestoreFailed naming the file that is not what was sealed here."""
        self._each(sealed, plain, map(Path, names), self._open_file)

    def clear(self, name: str = "") -> None:
        """Remove the plain files below ``scratch/name``."""
        if (self.scratch / name).exists():
            shutil.rmtree(self.scratch / name)

    def leave(self) -> None:
        """At the end of the daemon: no folder stays where nothing is in it."""
        for folder in (*self.scratch.iterdir(), self.scratch):
            with contextlib.suppress(OSError):
                folder.rmdir()

    @staticmethod
    def _each(source: Path, target: Path, names: Iterable[Path], work: Callable[[Path, Path, bytes], None]) -> None:
        listed = sorted(names)
        for folder in sorted({target.parent, target, *(target / name.parent for name in listed)}):
            folder.mkdir(mode=0o700, exist_ok=True)
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:  # AES runs without the interpreter's lock
            list(pool.map(lambda name: work(source / name, target / name, f"{source.name}/{name}".encode()), listed))

    def _close_file(self, source: Path, target: Path, name: bytes) -> None:
        salt = os.urandom(SALT_BYTES)
        cipher = AESGCM(_derive(self._key, salt, b"belayer file"))
        with source.open("rb") as plain, target.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(MAGIC + salt)
            for number, last, data in _chunks(plain.read, CHUNK):
                out.write(cipher.encrypt(_nonce(number, last), data, name))

    def _open_file(self, source: Path, target: Path, name: bytes) -> None:
        with source.open("rb") as sealed, target.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            head = sealed.read(len(MAGIC) + SALT_BYTES)
            if head[: len(MAGIC)] != MAGIC:
                raise RestoreFailed(f"{source} is not sealed", remedy="restore another checkpoint")
            cipher = AESGCM(_derive(self._key, head[len(MAGIC) :], b"belayer file"))
            for number, last, data in _chunks(sealed.read, CHUNK + TAG_BYTES):
                try:
                    out.write(cipher.decrypt(_nonce(number, last), data, name))
                except InvalidTag as why:
                    raise RestoreFailed(
                        f"{source} cannot be opened: another key, or it was changed (chunk {number})",
                        kept="the checkpoint as it is",
                        remedy="give envkeeper.encrypt_key_file the key that sealed it",
                    ) from why


def seal_of(config: Envkeeper, paths: Paths) -> Seal | None:
    """None without a key. The scratch folder is one per root, on /dev/shm. Raises ConfigInvalid, HostUnfit."""
    if not config.encrypt_key_file:
        return None
    root = hashlib.sha256(str(paths.state).encode()).hexdigest()[:16]
    return Seal(load_key(config.encrypt_key_file), Path("/dev/shm") / f"belayer-{root}")


def load_key(where: str) -> bytes:
    """``where``: a file, or "env:NAME". 32 bytes, or 64 hexadecimal digits. Raises ConfigInvalid."""
    if where.startswith("env:"):
        text = os.environ.get(where[4:])
        if text is None:
            raise ConfigInvalid(f"envkeeper.encrypt_key_file: the environment has no {where[4:]}")
        data = text.encode()
    else:
        path = Path(os.path.expandvars(where))  # $CREDENTIALS_DIRECTORY of a systemd unit
        try:
            info = path.stat()
            data = path.read_bytes()
        except OSError as why:
            raise ConfigInvalid(f"envkeeper.encrypt_key_file: {path} cannot be read: {why.strerror}") from why
        if info.st_mode & 0o077:
            raise ConfigInvalid(
                f"envkeeper.encrypt_key_file: {path} is open to other users", remedy=f"chmod 600 {path}"
            )
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigInvalid(
            "envkeeper.encrypt_key_file: a key is 32 bytes, or 64 hexadecimal digits",
            remedy="make one: head -c 32 /dev/urandom",
        )
    return key


def _derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt, info=info).derive(key)


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _chunks(read: Callable[[int], bytes], size: int) -> Iterator[tuple[int, bool, bytes]]:
    """(number, is it the last, bytes); an empty file is one empty last chunk."""
    number, data = 0, read(size)
    while True:
        ahead = read(size) if len(data) == size else b""
        yield number, not ahead, data
        if not ahead:
            return
        number, data = number + 1, ahead


def _kind_of(path: Path) -> str:
    best, kind = "", ""
    real = str(path.resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind
