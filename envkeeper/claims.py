"""Claims: the one right to restore what a life lost, and the guard that keeps a claimed checkpoint (promise E6).

A claim is a file made with O_EXCL, named for the life, carrying a UUID and the checkpoint it is for. It is *spent*, not
removed, when its restorer has won: a late racer of the same life still finds it. Claims and removals of one sandbox
take one flock, so that no checkpoint can go between being looked at and being claimed; the kernel frees that lock
when its holder is killed.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from belayer.clock import wall
from belayer.errors import ClaimTaken
from envkeeper.disk import Disk


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """``claimant``: for people. ``spent``: its restore is over and won; it protects nothing any more."""

    uuid: str
    life: str
    checkpoint_id: str
    claimant: str
    at: float
    spent: bool = False


class Claims:
    """The claims of one sandbox below ``folder``; ``lock`` is a file beside it."""

    def __init__(self, folder: Path, lock: Path, disk: Disk) -> None:
        self._folder, self._lock, self._disk = folder, lock, disk

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Between all processes; short calls only."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def take(self, life: str, checkpoint_id: str, claimant: str) -> Claim:
        """Under ``locked``. Raises ClaimTaken."""
        claim = Claim(
            uuid=str(uuid.uuid4()), life=life, checkpoint_id=checkpoint_id, claimant=claimant, at=round(wall(), 3)
        )
        try:
            self._disk.create_durable(self._folder / life, msgspec.json.encode(claim))
        except FileExistsError as why:
            held = self._read(life)
            by = f" by {held.claimant}" if held else ""
            raise ClaimTaken(
                f"the right to restore {life} is taken{by}", kept="the other restorer's sandbox", remedy="wait for it"
            ) from why
        except OSError:  # made and not written (a full disk): nobody would hold it, and nobody get it
            self._disk.unlink(self._folder / life)
            raise
        return claim

    def change(self, claim: Claim, *, checkpoint_id: str | None = None, spent: bool = False) -> Claim:
        """Write ``claim`` anew. Raises ClaimTaken when it is not ours any more."""
        with self.locked():
            held = self._read(claim.life)
            if held is None or held.uuid != claim.uuid:
                raise ClaimTaken(f"the claim on {claim.life} is no longer ours")
            changed = msgspec.structs.replace(claim, spent=spent, checkpoint_id=checkpoint_id or claim.checkpoint_id)
            self._disk.replace(self._folder / claim.life, msgspec.json.encode(changed))
        return changed

    def spend(self, claim: Claim) -> None:
        """Its restorer has won. Until this is written (a full disk) the checkpoint stays protected, no more."""
        self.change(claim, spent=True)

    def release(self, claim: Claim) -> None:
        """Give it back: only after what was being made under it has been seen dead."""
        with self.locked():
            held = self._read(claim.life)
            if held is not None and held.uuid == claim.uuid:
                self._disk.unlink(self._folder / claim.life)

    def settle(self, living: str) -> None:
        """After a former life of envkeeper, of which there is one at a time: what it claimed for ``living`` is free
        again, what it had won for older lives is spent."""
        with self.locked():
            for name in self._names():
                held = self._read(name)
                if name == living or held is None:
                    self._disk.unlink(self._folder / name)
                elif not held.spent:
                    done = msgspec.structs.replace(held, spent=True)
                    self._disk.replace(self._folder / name, msgspec.json.encode(done))

    def protects(self, checkpoint_id: str) -> bool:
        """Under ``locked``. A claim that cannot be read (its holder is writing it, or was killed) protects all."""
        return any(
            held is None or (not held.spent and held.checkpoint_id == checkpoint_id)
            for held in map(self._read, self._names())
        )

    def _names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir() if not path.name.startswith(".")]

    def _read(self, life: str) -> Claim | None:
        try:
            return msgspec.json.decode((self._folder / life).read_bytes(), type=Claim)
        except (FileNotFoundError, msgspec.DecodeError):
            return None
