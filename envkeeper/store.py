"""Checkpoints on disk: complete and READY, or as if they had never been (promises E2, E6, E8).

    <root>/<sandbox>/tmp/<id>/      being written or removed; the only thing that recovery deletes
    <root>/<sandbox>/ck/<id>/       complete: criu/*, upper.index, upper.pack, manifest.json
    <root>/<sandbox>/READY          {checkpoint id, sha256 of its manifest}
    <root>/<sandbox>/claims/<life>  made with O_EXCL: the one right to restore what this life lost
    <root>/<sandbox>/lineage        where its lives came from (envkeeper.lineage)
    <root>/<sandbox>/lock           flock of claims and removals

The order of ``publish`` is the protocol: every byte is on disk (one syncfs: per-file fsync is ten times slower with
many files) and hashed before the folder gets its name, the name is on disk before READY moves. A crash at any point
leaves the previous READY in effect; crash tests stop after each named step, and build the disks that a power cut could
leave from the calls of ``disk``.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from belayer.errors import CheckpointIncomplete, RestoreFailed
from envkeeper.claims import Claim, Claims
from envkeeper.disk import Disk
from envkeeper.failpoints import Point, reach
from envkeeper.recipe import Recipe
from envkeeper.seal import Seal

MANIFEST, READY = "manifest.json", "READY"
FORMAT = 1
_LARGE = 1 << 20  # bytes; from here on a file is worth a thread of its own
_TRIES = 100  # to remove a folder
ANCESTORS = 64
Step = Callable[[str], None]


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``nonce_sha256``: of what only the dumped memory of PID 1 holds. ``stdio``: where its descriptors 0-2 led.
    ``parent``: READY before it; ``ancestors``: that one and those before it, the nearest last: only they are the same
    attempt (what a rewind left behind is not). ``key_id``: of the key it is sealed with, "" for none."""

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
    key_id: str = ""
    ancestors: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())


class ReadyPointer(msgspec.Struct, frozen=True, kw_only=True):
    """``ancestors``: those of its manifest, for the day on which that one cannot be read."""

    checkpoint_id: str
    manifest_sha256: str
    ancestors: tuple[str, ...] = ()


def publish_step(name: str) -> None:
    reach(Point(f"publish.{name}"))


class Store:
    """Checkpoints of one sandbox. ``step`` is called with its name after each step of ``publish``. With ``seal``,
    what lies here is encrypted, and ``begin`` gives a folder on a tmpfs. Without ``make`` no folder is made: for who
    only looks, beside a ``destroy`` that what is looked at must not come back from (FileNotFoundError then)."""

    def __init__(
        self,
        root: Path,
        sandbox_id: str,
        step: Step = publish_step,
        *,
        disk: Disk | None = None,
        seal: Seal | None = None,
        make: bool = True,
    ) -> None:
        self.home, self.sandbox_id = root / sandbox_id, sandbox_id
        self._tmp, self._done = self.home / "tmp", self.home / "ck"
        self._step, self._disk, self._seal = step, disk or Disk(), seal
        self.claims = Claims(self.home / "claims", self.home / "lock", self._disk)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.home, self._tmp, self._done, self.home / "claims") if make else ():
            self._disk.mkdir(folder)

    def recover(self) -> list[str]:
        """Delete what was being written or removed when a former life ended; the names of what went."""
        gone = sorted(path.name for path in self._tmp.iterdir())
        for name in gone:
            self._disk.remove_tree(self._tmp / name)
        if self._seal is not None:
            self._seal.clear(self.sandbox_id)
        return gone

    # ---- publication ----

    def begin(self, boundary: int) -> Path:
        """A fresh folder to write a checkpoint into; its name is the checkpoint's id."""
        name = f"k{boundary}-{secrets.token_hex(6)}"
        folder = self._tmp / name if self._seal is None else self._seal.scratch / self.sandbox_id / name
        for path in (folder.parent, folder, folder / "criu"):  # `parents` would make them open to others
            self._disk.mkdir(path)
        return folder

    def discard(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._tmp / folder.name, ignore_errors=True)

    def publish(self, folder: Path, make: Callable[[dict[str, FileDigest]], Manifest]) -> tuple[Manifest, str]:
        """Hash, write the manifest, sync, rename, move READY. ``make`` builds the manifest from the digests.
        Returns it with its own digest."""
        if self._seal is not None:
            self._seal.close_folder(folder, self._tmp / folder.name)
            shutil.rmtree(folder)
            folder = self._tmp / folder.name
        digests = hash_tree(folder)
        self._step("hashed")
        key_id = "" if self._seal is None else self._seal.key_id
        manifest = msgspec.structs.replace(make(digests), key_id=key_id, ancestors=self._ancestors())
        data = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        self._disk.write(folder / MANIFEST, data)
        self._step("manifest")
        _close_to_others(folder)
        self._disk.sync_all(folder)
        self._step("synced")
        self._disk.rename(folder, self._done / folder.name)
        self._step("renamed")
        self._disk.sync_dir(self._done)
        self._step("named")
        self._point(manifest, data)
        self._step("ready")
        return manifest, hashlib.sha256(data).hexdigest()

    def _ancestors(self) -> tuple[str, ...]:
        pointer = self.ready()
        if pointer is None:
            return ()
        try:
            before, _ = self.load(pointer.checkpoint_id)
        except RestoreFailed:
            return (pointer.checkpoint_id,)
        return (*before.ancestors, pointer.checkpoint_id)[-ANCESTORS:]

    def point(self, checkpoint_id: str) -> str:
        """READY to a complete checkpoint; its digest. After a rewind, what lies after it is an abandoned attempt, and a
        later restore must not bring that back. Raises RestoreFailed when it is gone."""
        manifest, digest = self.load(checkpoint_id)
        self._point(manifest, (self._done / checkpoint_id / MANIFEST).read_bytes())
        return digest

    def point_at_nothing(self) -> None:
        """No checkpoint is READY: the sandbox began again from its image."""
        self._disk.unlink(self.home / READY)
        self._disk.sync_dir(self.home)

    def take_from(self, other: Store, checkpoint_id: str) -> None:
        """Share a checkpoint of another sandbox (hard links: no bytes are copied) and make it READY here. It stays
        whole when the other one is removed. Raises RestoreFailed when it is gone."""
        source, target = other.folder(checkpoint_id), self._tmp / checkpoint_id
        with other.claims.locked():  # nothing of it is removed meanwhile
            if not (source / MANIFEST).exists():
                raise RestoreFailed(f"{other.sandbox_id} has no checkpoint {checkpoint_id}")
            for path in sorted([source, *source.rglob("*")]):
                name = target / path.relative_to(source)
                if path.is_dir():
                    self._disk.mkdir(name)
                else:
                    self._disk.link(path, name)
        for folder in (*(path for path in target.rglob("*") if path.is_dir()), target, self._tmp):
            self._disk.sync_dir(folder)  # its links and its own name, before it is moved to where it counts
        self._disk.rename(target, self._done / checkpoint_id)
        for folder in (self._done, self.home, self.home.parent):
            self._disk.sync_dir(folder)
        self.point(checkpoint_id)

    def _point(self, manifest: Manifest, data: bytes) -> None:
        pointer = ReadyPointer(
            checkpoint_id=manifest.checkpoint_id,
            manifest_sha256=hashlib.sha256(data).hexdigest(),
            ancestors=manifest.ancestors,
        )
        self._disk.replace(self.home / READY, msgspec.json.encode(pointer))

    # ---- reading ----

    def ready(self) -> ReadyPointer | None:
        """None when no checkpoint was ever published. Raises CheckpointIncomplete when READY is damaged."""
        try:
            data = (self.home / READY).read_bytes()
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(data, type=ReadyPointer)
        except msgspec.DecodeError as why:
            raise CheckpointIncomplete(
                f"{self.home / READY} is damaged: {why}", remedy="restore a checkpoint by its id"
            ) from why

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
        try:
            pointer = self.ready()
        except CheckpointIncomplete:
            pointer = None  # READY is damaged: a checkpoint can still be named by its id
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

    @contextmanager
    def opened(self, manifest: Manifest, user: str) -> Iterator[Path]:
        """The checkpoint's files in the plain, below a folder: its own, or for a sealed one a decrypted copy on the
        tmpfs for ``user`` (an incarnation), removed afterwards. Raises RestoreFailed."""
        if not manifest.key_id:
            yield self.folder(manifest.checkpoint_id)
            return
        if self._seal is None or self._seal.key_id != manifest.key_id:
            raise RestoreFailed(
                f"checkpoint {manifest.checkpoint_id} is sealed with key {manifest.key_id}, which is not configured",
                kept="the checkpoint",
                remedy="name that key in envkeeper.encrypt_key_file",
            )
        name = f"{self.sandbox_id}/for-{user}"
        try:
            plain = self._seal.scratch / name
            self._seal.open_folder(self.folder(manifest.checkpoint_id), plain, manifest.files)
            yield plain
        finally:
            self._seal.clear(name)

    # ---- claims and removal ----

    def claim(self, life: str, checkpoint_id: str, claimant: str) -> Claim:
        """Take the one right to restore what ``life`` lost ("" names no checkpoint: from the image). Raises ClaimTaken,
        or RestoreFailed when the checkpoint has gone."""
        with self.claims.locked():
            if checkpoint_id and not (self._done / checkpoint_id / MANIFEST).exists():
                raise RestoreFailed(f"checkpoint {checkpoint_id} is gone", remedy="restore another one")
            return self.claims.take(life, checkpoint_id, claimant)

    def remove(self, checkpoint_id: str) -> bool:
        """False when a claim protects it (or it is gone already): then nothing was touched."""
        with self.claims.locked():
            if self.claims.protects(checkpoint_id) or not (self._done / checkpoint_id).exists():
                return False
            # Out of sight in one step: a half deleted folder must not look like a checkpoint.
            self._disk.rename(self._done / checkpoint_id, self._tmp / f"{checkpoint_id}.gone")
        self._disk.remove_tree(self._tmp / f"{checkpoint_id}.gone")
        return True

    def protects(self, checkpoint_id: str) -> bool:
        with self.claims.locked():
            return self.claims.protects(checkpoint_id)

    def destroy(self) -> None:
        """The whole store of an ended sandbox. Forks keep what they share."""
        for _ in range(_TRIES):  # who looks at it meanwhile may make its lock anew, until its folder is gone
            shutil.rmtree(self.home, ignore_errors=True)
            if not self.home.exists():
                break
        if self._seal is not None:
            self._seal.clear(self.sandbox_id)


def hash_tree(folder: Path, at_once: int = os.cpu_count() or 1) -> dict[str, FileDigest]:
    """sha256 of every regular file below ``folder`` by relative name. Large ones ``at_once`` side by side in threads;
    for the forty small images of a checkpoint threads and Path objects would cost more than the hashing."""
    if not folder.is_dir():
        return {}
    found: dict[str, FileDigest] = {}
    large: dict[str, str] = {}
    for name, entry in _below(os.fspath(folder)):
        if entry.is_file(follow_symlinks=False):
            if entry.stat(follow_symlinks=False).st_size >= _LARGE:
                large[name] = entry.path
            else:
                found[name] = _hash_small(entry.path)
    if len(large) > 1:
        with ThreadPoolExecutor(max_workers=at_once) as pool:
            found |= dict(zip(large, pool.map(_hash_file, large.values()), strict=True))
    else:
        found |= {name: _hash_file(path) for name, path in large.items()}
    return {name: found[name] for name in sorted(found)}


def _below(top: str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(relative name, entry) of everything below ``top``; links are not followed."""
    with os.scandir(os.path.join(top, prefix)) as listing:
        for entry in listing:
            name = f"{prefix}{entry.name}"
            yield name, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _below(top, f"{name}/")


def _hash_small(path: str) -> FileDigest:
    """At once: ``file_digest`` clears a quarter of a MiB for each file, which costs more than most images do."""
    with open(path, "rb", buffering=0) as file:
        data = file.readall()
    return FileDigest(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _hash_file(path: str) -> FileDigest:
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(size=os.fstat(file.fileno()).st_size, sha256=digest.hexdigest())


def _close_to_others(folder: Path) -> None:
    """0700 and 0600: the images hold all memory of the sandbox."""
    for _, entry in _below(os.fspath(folder)):
        os.chmod(entry.path, 0o700 if entry.is_dir(follow_symlinks=False) else 0o600)
