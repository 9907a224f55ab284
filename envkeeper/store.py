"""Checkpoints on disk: complete and READY, or as if they had never been (promises E2, E6, E8).

    <root>/<sandbox>/tmp/<id>/      being written; the only thing that recovery deletes
    <root>/<sandbox>/ck/<id>/       complete: criu/*, upper.index, upper.pack, manifest.json
    <root>/<sandbox>/READY          {checkpoint id, sha256 of its manifest}
    <root>/<sandbox>/claims/<life>  made with O_EXCL: the one right to restore what this life lost

The order of ``publish`` is the protocol: every byte is on disk (one syncfs: per-file fsync is ten times slower with
many files) and hashed before the folder gets its name, the name is on disk before READY moves. A crash at any point
leaves the previous READY in effect; ``crash tests`` stop after each named step and open the store again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from belayer.errors import CheckpointIncomplete, ClaimTaken, RestoreFailed
from belayer.statefile import fsync_dir, write_bytes
from envkeeper.recipe import Recipe

MANIFEST, READY = "manifest.json", "READY"
FORMAT = 1
Step = Callable[[str], None]


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``nonce_sha256``: of what only the dumped memory of PID 1 holds. ``stdio``: where its descriptors 0-2 led."""

    format: int
    checkpoint_id: str
    sandbox_id: str
    incarnation: str
    boundary: int
    context_digest: str
    parent: str
    made_at: float
    recipe: Recipe
    nonce_sha256: str
    stdio: tuple[str, ...]
    versions: dict[str, str]
    files: dict[str, FileDigest]
    upper_entries: int
    frozen_ms: float
    phases_ms: dict[str, float] = {}

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())


class ReadyPointer(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint_id: str
    manifest_sha256: str


def no_step(_: str) -> None:
    return


class Store:
    """Checkpoints of one sandbox. ``step`` is called with its name after each step of ``publish``."""

    def __init__(self, root: Path, sandbox_id: str, step: Step = no_step) -> None:
        self.home = root / sandbox_id
        self._tmp, self._done, self._claims = self.home / "tmp", self.home / "ck", self.home / "claims"
        self._step = step
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.home, self._tmp, self._done, self._claims):
            folder.mkdir(mode=0o700, exist_ok=True)

    def recover(self) -> list[str]:
        """Delete what was being written when a former life ended; the names of what went."""
        gone = sorted(path.name for path in self._tmp.iterdir())
        for name in gone:
            shutil.rmtree(self._tmp / name)
        return gone

    def begin(self, boundary: int) -> Path:
        """A fresh folder to write a checkpoint into; its name is the checkpoint's id."""
        folder = self._tmp / f"k{boundary}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        (folder / "criu").mkdir(mode=0o700)
        return folder

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path, make: Callable[[dict[str, FileDigest]], Manifest]) -> tuple[Manifest, str]:
        """Hash, write the manifest, sync, rename, move READY. ``make`` builds the manifest from the digests.
        Returns it with its own digest."""
        digests = hash_tree(folder)
        self._step("hashed")
        manifest = make(digests)
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        (folder / MANIFEST).write_bytes(data)
        self._step("manifest")
        _close_to_others(folder)
        sync_filesystem(folder)
        self._step("synced")
        os.rename(folder, self._done / folder.name)
        self._step("renamed")
        fsync_dir(self._done)
        self._step("named")
        pointer = ReadyPointer(checkpoint_id=folder.name, manifest_sha256=hashlib.sha256(data).hexdigest())
        write_bytes(self.home / READY, msgspec.json.encode(pointer))
        self._step("ready")
        return manifest, pointer.manifest_sha256

    def ready(self) -> ReadyPointer | None:
        """None when no checkpoint was ever published. Raises CheckpointIncomplete when READY is damaged."""
        try:
            data = (self.home / READY).read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=ReadyPointer)
        except msgspec.DecodeError as why:
            raise CheckpointIncomplete(f"{self.home / READY} is damaged: {why}") from why

    def all(self) -> list[Manifest]:
        """Complete checkpoints, oldest first. A folder whose manifest cannot be read is not one."""
        out = []
        for folder in self._done.iterdir():
            try:
                out.append(msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest))
            except (FileNotFoundError, msgspec.DecodeError):
                continue
        return sorted(out, key=lambda manifest: manifest.made_at)

    def folder(self, checkpoint_id: str) -> Path:
        return self._done / checkpoint_id

    def load(self, checkpoint_id: str) -> tuple[Manifest, str]:
        """The manifest and its digest; checked against READY when it is that one. Raises RestoreFailed."""
        path = self._done / checkpoint_id / MANIFEST
        try:
            data = path.read_bytes()
            manifest = msgspec.json.decode(data, type=Manifest)
        except (FileNotFoundError, msgspec.DecodeError) as why:
            raise RestoreFailed(
                f"checkpoint {checkpoint_id} cannot be read: {why}", remedy="restore an older one by its id"
            ) from why
        digest = hashlib.sha256(data).hexdigest()
        pointer = self.ready()
        if pointer and pointer.checkpoint_id == checkpoint_id and pointer.manifest_sha256 != digest:
            raise RestoreFailed(f"the manifest of {checkpoint_id} is not the one that READY names: it was changed")
        if manifest.format != FORMAT:
            raise RestoreFailed(
                f"checkpoint {checkpoint_id} has format {manifest.format}, this envkeeper reads {FORMAT}"
            )
        return manifest, digest

    def verify(self, manifest: Manifest) -> None:
        """Every file as it was hashed: none missing, none more, none changed. Raises RestoreFailed naming one."""
        # Half of the cores: this runs beside the restore, which needs the others.
        found = hash_tree(self._done / manifest.checkpoint_id, max(1, (os.cpu_count() or 1) // 2))
        found.pop(MANIFEST, None)
        for name in sorted(found.keys() | manifest.files.keys()):
            if found.get(name) != manifest.files.get(name):
                what = "missing" if name not in found else "changed" if name in manifest.files else "not part of it"
                raise RestoreFailed(
                    f"file {name} of checkpoint {manifest.checkpoint_id} is {what}",
                    kept="the other checkpoints",
                    remedy="restore an older one by its id",
                )

    def claim(self, life: str, claimant: str) -> None:
        """Take the one right to restore what ``life`` lost. Raises ClaimTaken."""
        try:
            fd = os.open(self._claims / life, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as why:
            raise ClaimTaken(
                f"the right to restore {life} is taken", kept="the other restorer's sandbox", remedy="wait for it"
            ) from why
        with os.fdopen(fd, "w") as file:
            file.write(claimant)
            file.flush()
            os.fsync(file.fileno())
        fsync_dir(self._claims)

    def release(self, life: str) -> None:
        """Give a claim back: only after what was being made under it has been seen dead."""
        (self._claims / life).unlink(missing_ok=True)

    def prune(self, keep: int) -> list[str]:
        """Remove the oldest beyond ``keep``; READY stays. The names of what went."""
        pointer = self.ready()
        spare = [row.checkpoint_id for row in self.all() if not pointer or row.checkpoint_id != pointer.checkpoint_id]
        gone = spare[: max(0, len(spare) + 1 - keep)]
        for name in gone:
            # First out of sight, in one step: a half deleted folder must not look like a checkpoint.
            os.rename(self._done / name, self._tmp / name)
            shutil.rmtree(self._tmp / name)
        return gone

    def destroy(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)


def hash_tree(folder: Path, at_once: int = os.cpu_count() or 1) -> dict[str, FileDigest]:
    """sha256 of every regular file below ``folder`` by relative name; ``at_once`` of them side by side in threads."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    names = [str(path.relative_to(folder)) for path in paths]
    if sum(path.stat().st_size for path in paths) < 4 << 20:
        return dict(zip(names, map(_hash_file, paths), strict=True))
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return dict(zip(names, pool.map(_hash_file, paths), strict=True))


def _hash_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(size=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())


def _close_to_others(folder: Path) -> None:
    """0700 and 0600: the images hold all memory of the sandbox."""
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


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
