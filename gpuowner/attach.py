"""The worker's side: an open connection per owner, weights mapped read-only, the arena mapped privately
at first.

``ArenaView.promote`` is the moment of a handover: the private copy-on-write view becomes the shared arena
at the same address, so no tensor of the engine moves. It comes after the lease, which the owner grants
only when the last holder has been seen dead (promise R1). Plain buffers only: torch stays out of this
package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from belayer import procs
from belayer.clock import Stopwatch
from belayer.errors import OwnerGone, WeightsBroken
from belayer.messages import owner as m
from belayer.seqpacket import SeqClient
from gpuowner.digest import first_difference
from gpuowner.vmem import MAP_NORESERVE, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, Mapping

R = TypeVar("R", bound=msgspec.Struct)


class OwnerClient:
    """One open connection to an owner; for a lease holder it is the lease, so it is never re-opened
    silently."""

    def __init__(self, path: Path, role: m.Role, who: str, timeout: float = 10.0) -> None:
        self._client = SeqClient(path, timeout)
        self.welcome, _ = self._client.call(m.Hello(role=role, who=who), m.Welcome)
        self._pidfd = os.pidfd_open(self.welcome.pid)

    def call(self, message: msgspec.Struct, reply: type[R]) -> tuple[R, tuple[int, ...]]:
        return self._client.call(message, reply)

    def alive(self) -> bool:
        return not procs.is_dead(self._pidfd)

    def must_live(self) -> None:
        """Raise OwnerGone when the owner of this connection has ended: its arena must not be taken over."""
        if not self.alive():
            raise OwnerGone(f"the owner of {self.welcome.kind} (pid {self.welcome.pid}) has ended")

    def close(self) -> None:
        self._client.close()
        os.close(self._pidfd)


class WeightsView:
    """A sealed model mapped read-only, its bytes checked against the digests of the grant."""

    def __init__(self, client: OwnerClient, model: str) -> None:
        grant, fds = client.call(m.AttachWeights(model=model), m.WeightsGrant)
        try:
            layout = grant.layout or _layout_from(fds[1])
            self.mapping = Mapping(fds[0], grant.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
        finally:
            for fd in fds:
                os.close(fd)
        self.grant = grant
        self.tensors = {spec.name: spec for spec in layout}

    def verify(self) -> float:
        """Hash everything and return the milliseconds. Raises WeightsBroken naming the chunk that differs."""
        watch = Stopwatch()
        bad = first_difference(self.mapping.buffer(), self.grant.chunk_digests)
        if bad is not None:
            raise WeightsBroken(
                f"weights of {self.grant.model} v{self.grant.version}: chunk {bad} differs from its digest",
                kept="nothing of this mapping is used",
                remedy="restart gpuowner@weights so that it loads the model again",
            )
        return watch.ms()


class ArenaView:
    """A slot's arena: private until ``promote``. ``epoch`` is -1 while no lease is held."""

    def __init__(self, client: OwnerClient, slot: str, nbytes: int) -> None:
        self._client, self._slot = client, slot
        grant, fds = client.call(m.OpenArena(slot=slot, nbytes=nbytes), m.ArenaGrant)
        try:
            # Writes copy the page: a standby may warm up here while the main serves from the same pages.
            self.mapping = Mapping(fds[0], nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE)
        finally:
            for fd in fds:
                os.close(fd)
        self.grant, self.epoch = grant, -1

    def promote(self, epoch: int) -> float:
        """Take the lease of ``epoch`` and map the shared arena in place; returns milliseconds.

        Raises LeaseRefused, Fenced or OwnerGone with the private view unchanged. Everything computed in
        the private view is gone afterwards: the caller flushes its prefix cache.
        """
        watch = Stopwatch()
        self._client.must_live()
        _, fds = self._client.call(m.AcquireLease(slot=self._slot, epoch=epoch), m.LeaseGrant)
        try:
            self.mapping.replace(fds[0], PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE)
        finally:
            for fd in fds:
                os.close(fd)
        self.epoch = epoch
        return watch.ms()


def _layout_from(fd: int) -> tuple[m.TensorSpec, ...]:
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=tuple[m.TensorSpec, ...])
