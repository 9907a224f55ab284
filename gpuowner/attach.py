"""The worker's side: an open connection per owner, weights mapped read-only, the arena mapped privately
at first.

``ArenaView.promote`` is the moment of a handover: the private copy-on-write view becomes the shared arena
at the same address, so no tensor of the engine moves. It comes after the lease, which the owner grants
only when the last holder has been seen dead (promise R1). Plain buffers only: torch stays out of this
package.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from belayer import procs
from belayer.clock import Stopwatch
from belayer.errors import BelayerError, DaemonUnreachable, OwnerGone, Refused, WeightsBroken
from belayer.messages import owner as m
from belayer.seqpacket import SeqClient
from gpuowner.digest import Told, first_difference, nobody
from gpuowner.vmem import MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, Mapping

R = TypeVar("R", bound=msgspec.Struct)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0  # between two tries to reach an owner that is away


Rejoin = Callable[[SeqClient, int], None]  # open connection, generation of the owner behind it


def _nothing() -> None:
    pass


class OwnerClient:
    """One open connection to an owner; for a lease holder it is the lease.

    An owner that dies comes back with the same memory and with another generation. ``keep`` starts a thread that sees
    the end of the connection at once, connects again, and lets every view say what it still maps or holds. The
    engine's own thread is not asked: what it has mapped stays as it is."""

    def __init__(self, path: Path, role: m.Role, who: str, timeout: float = 10.0) -> None:
        self._path, self._role, self._who, self._timeout = path, role, who, timeout
        self._lock = threading.RLock()
        self._rejoins: list[weakref.WeakMethod[Rejoin]] = []
        self._closed = False
        self._keeper: threading.Thread | None = None
        self._open()

    def _open(self) -> None:
        client = SeqClient(self._path, self._timeout)
        try:
            self.welcome, _ = client.call(m.Hello(role=self._role, who=self._who), m.Welcome)
            self._pidfd = os.pidfd_open(self.welcome.pid)
        except (BelayerError, OSError) as why:
            client.close()
            raise DaemonUnreachable(f"the owner at {self._path} ended while it was asked: {why}") from why
        self._client = client

    def call(
        self, message: msgspec.Struct, reply: type[R], sent: Callable[[], None] = _nothing
    ) -> tuple[R, tuple[int, ...]]:
        with self._lock:
            return self._client.call(message, reply, sent)

    def alive(self) -> bool:
        return not procs.is_dead(self._pidfd)

    def must_live(self) -> None:
        """Raise OwnerGone when the owner of this connection has ended and none has taken its place: its arena must
        not be taken over."""
        with self._lock:
            if self.alive():
                return
            try:
                self._mend()
            except DaemonUnreachable as why:
                raise OwnerGone(f"the owner of {self.welcome.kind} (pid {self.welcome.pid}) has ended") from why

    def on_return(self, rejoin: Rejoin) -> None:
        """Call the method ``rejoin`` on each connection that replaces a broken one, before it is used for anything
        else; for as long as its object lives, which holds us and is not held by us."""
        with self._lock:
            self._rejoins.append(weakref.WeakMethod(rejoin))

    def keep(self, told: Callable[[str], None]) -> None:
        """Hold the connection for as long as the process lives; ``told`` gets a sentence whenever it was mended, or a
        view could not rejoin."""
        name = f"owner-{self.welcome.kind}"
        self._keeper = threading.Thread(target=self._watch, args=(told,), daemon=True, name=name)
        self._keeper.start()

    def _watch(self, told: Callable[[str], None]) -> None:
        pause, again = _FIRST_PAUSE_S, threading.Event()
        while not self._closed:
            if not self._ended():
                continue
            try:
                with self._lock:
                    if not self._closed and self._ended(0):  # the engine's thread may have mended it meanwhile
                        told(self._mend())
                pause = _FIRST_PAUSE_S
            except DaemonUnreachable:  # it is on its way back, or gone for good: belayerd tells which
                again.wait(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _ended(self, wait_s: float = 1.0) -> bool:
        """Wait until the connection ends, at most ``wait_s``; reads nothing, so answers to the engine stay its own."""
        poll = select.poll()
        poll.register(self._client.fileno(), select.POLLRDHUP)
        return bool(poll.poll(wait_s * 1000))

    def _mend(self) -> str:
        """A new connection in place of the broken one. Raises DaemonUnreachable with the old one as it was."""
        broken, pidfd, was = self._client, self._pidfd, self.welcome.owner_generation
        self._open()
        broken.close()
        os.close(pidfd)
        said = [f"owner of {self.welcome.kind} generation {was} -> {self.welcome.owner_generation}"]
        for rejoin in filter(None, [one() for one in self._rejoins]):
            try:
                rejoin(self._client, self.welcome.owner_generation)
            except BelayerError as why:  # refused by name: what is mapped stays mapped, and belayerd sees the refusal
                said.append(str(why))
        return "; ".join(said)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._client.hang_up()  # wakes the keeper
        if self._keeper is not None:
            self._keeper.join()
        self._client.close()
        os.close(self._pidfd)


class WeightsView:
    """A sealed model mapped read-only, its bytes checked against the digests of the grant."""

    def __init__(self, client: OwnerClient, model: str, rank: int = 0) -> None:
        self._client = client
        grant, layout, fd = attach_weights(client, model, rank)
        try:
            self.mapping = Mapping(fd, grant.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
            self._memory = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        client.on_return(self._rejoin)
        self.grant = grant
        self.tensors = {spec.name: spec for spec in layout}

    def _mapped(self, owner_generation: int) -> m.RejoinWeights:
        grant = self.grant
        return m.RejoinWeights(
            model=grant.model, rank=grant.rank, version=grant.version, digest=grant.digest,
            owner_generation=owner_generation,
        )  # fmt: skip

    def _rejoin(self, client: SeqClient, owner_generation: int) -> None:
        client.call(self._mapped(owner_generation), m.WeightsInfo)

    def verify(self) -> float:
        """Hash everything and return the milliseconds. Raises WeightsBroken naming the chunk that differs."""
        watch = Stopwatch()
        _equal_or_refuse(self.mapping, self.grant)
        return watch.ms()

    def verify_version(self, threads: int = 1) -> bool:
        """Whether what is mapped here is the owner's last version, whole, hashed anew; ``grant`` then says which.

        True also after an update in place: the bytes below the mapping have changed, and the new digests fit them.
        False after a swap: the version mapped here is still whole, and older. Raises WeightsTorn while an update is
        open or when it was torn, WeightsBroken when the bytes differ from their digests."""
        grant, _, fd = attach_weights(self._client, self.grant.model, self.grant.rank)
        try:
            same = os.fstat(fd).st_ino == self._memory
        finally:
            os.close(fd)
        _equal_or_refuse(self.mapping, grant if same else self.grant, threads)
        if same:
            self.grant = grant
        else:  # the owner is to know which version is read here, not which one was looked at
            self._client.call(self._mapped(self._client.welcome.owner_generation), m.WeightsInfo)
        return same

    def follow(self, threads: int = 1, told: Told = nobody) -> bool:
        """Map the owner's last version at the same address; False when it was mapped already. ``told`` hears how much
        of it is verified.

        Its bytes are verified before they take the place of the old ones, which nothing may read meanwhile. Raises as
        ``verify_version``, and WeightsBroken when the tensors of the new version lie elsewhere; the mapping is then as
        it was."""
        grant, layout, fd = attach_weights(self._client, self.grant.model, self.grant.rank)
        try:
            if os.fstat(fd).st_ino == self._memory:
                _equal_or_refuse(self.mapping, grant, threads, told)
                self.grant = grant
                return False
            if grant.nbytes != self.grant.nbytes or {spec.name: spec for spec in layout} != self.tensors:
                raise WeightsBroken(
                    f"weights of {grant.model} v{grant.version} lie otherwise than v{self.grant.version}",
                    kept=f"v{self.grant.version} as it is mapped",
                    remedy="start a new worker: this one's tensors cannot follow",
                )
            beside = Mapping(fd, grant.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
            try:
                _equal_or_refuse(beside, grant, threads, told)
            finally:
                beside.close()
            self.mapping.replace(fd, PROT_READ, MAP_SHARED | MAP_NORESERVE)
            self.grant, self._memory = grant, os.fstat(fd).st_ino
            return True
        finally:
            os.close(fd)


def attach_weights(
    client: OwnerClient, model: str, rank: int, backend: str = "memfd"
) -> tuple[m.WeightsGrant, tuple[m.TensorSpec, ...], int]:
    """Grant, layout and descriptor of the last version. Raises Refused, with nothing held, when it lies in other memory
    than ``backend``: its bytes would be read by the wrong means."""
    grant, fds = client.call(m.AttachWeights(model=model, rank=rank), m.WeightsGrant)
    keep = 0
    try:
        if grant.backend != backend:
            raise Refused(
                f"weights of {model} are in {grant.backend}, this process reads {backend}",
                remedy="memory in [gpuowner] and device of the slot must fit each other",
            )
        layout = grant.layout or layout_from(fds[1])
        keep = 1
    finally:
        for fd in fds[keep:]:
            os.close(fd)
    return grant, layout, fds[0]


def _equal_or_refuse(mapping: Mapping, grant: m.WeightsGrant, threads: int = 1, told: Told = nobody) -> None:
    bad = first_difference(mapping.buffer(), grant.chunk_digests, threads, told)
    if bad is not None:
        raise WeightsBroken(
            f"weights of {grant.model} v{grant.version}: chunk {bad} differs from its digest",
            kept="nothing of this mapping is used",
            remedy="restart gpuowner@weights so that it loads the model again",
        )


class ArenaView:
    """A slot's arena: private until ``promote``. ``epoch`` is -1 while no lease is held."""

    def __init__(self, client: OwnerClient, slot: str, nbytes: int, rank: int = 0) -> None:
        self._client, self._slot, self._rank = client, slot, rank
        grant, fds = client.call(m.OpenArena(slot=slot, rank=rank, nbytes=nbytes), m.ArenaGrant)
        try:
            # Writes copy the page: a standby may warm up here while the main serves from the same pages.
            self.mapping = Mapping(fds[0], nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE)
        finally:
            for fd in fds:
                os.close(fd)
        self.grant, self.epoch = grant, -1
        client.on_return(self._reclaim)

    def promote(self, epoch: int, owner_generation: int = 0) -> float:
        """Take the lease of ``epoch`` and map the shared arena in place; returns milliseconds.
        ``owner_generation``: of the owner that said so to the caller; 0 is the one of this connection.

        Raises LeaseRefused, Fenced or OwnerGone with the private view unchanged. Everything computed in
        the private view is gone afterwards: the caller flushes its prefix cache.
        """
        watch = Stopwatch()
        self._client.must_live()
        owner = owner_generation or self._client.welcome.owner_generation
        message = m.AcquireLease(slot=self._slot, rank=self._rank, epoch=epoch, owner_generation=owner)
        _, fds = self._client.call(message, m.LeaseGrant)
        try:
            self.mapping.replace(fds[0], PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE)
        finally:
            for fd in fds:
                os.close(fd)
        self.epoch = epoch
        return watch.ms()

    def _reclaim(self, client: SeqClient, owner_generation: int) -> None:
        if self.epoch >= 0:
            message = m.ReclaimLease(
                slot=self._slot, rank=self._rank, epoch=self.epoch, owner_generation=owner_generation
            )
            client.call(message, m.ArenaInfo)


def layout_from(fd: int) -> tuple[m.TensorSpec, ...]:
    """The layout of a grant that was too large for its packet."""
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=tuple[m.TensorSpec, ...])
