"""What each request does, and which role may ask for it. The socket is in ``service``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from belayer import wire
from belayer.errors import Refused
from belayer.messages import owner as m
from gpuowner import core
from gpuowner.keeping import Caller
from gpuowner.vault import Vault
from gpuowner.version import Job

MAX_INLINE = 128 << 10  # bytes; a larger layout rides in a memfd (the kernel's packet limit is wmem_max)

Answer = tuple[msgspec.Struct | Job, tuple[int, ...]]

WEIGHTS, KV = "weights", "kv"
W, L, A = m.Role.WORKER, m.Role.LOADER, m.Role.ADMIN

# request -> the kind of owner that answers it, and the roles that may ask
RIGHTS: dict[type, tuple[str, frozenset[m.Role]]] = {
    m.AttachWeights: (WEIGHTS, frozenset({W, L})),
    m.RejoinWeights: (WEIGHTS, frozenset({W, L})),
    m.BeginUpdate: (WEIGHTS, frozenset({L})),
    m.UpdatePart: (WEIGHTS, frozenset({L})),
    m.CommitUpdate: (WEIGHTS, frozenset({L})),
    m.AbortUpdate: (WEIGHTS, frozenset({L})),
    m.RepublishWeights: (WEIGHTS, frozenset({L, A})),
    m.OpenArena: (KV, frozenset({W})),
    m.AcquireLease: (KV, frozenset({W})),
    m.ReclaimLease: (KV, frozenset({W})),
    m.BeginFence: (KV, frozenset({A})),
    m.EndFence: (KV, frozenset({A})),
    m.QuarantineArena: (KV, frozenset({A})),
    m.RestoreArena: (KV, frozenset({A})),
}


@dataclass(eq=False)
class Peer:
    """One connection. ``pidfd`` names the process at the other end even after it is gone."""

    number: int
    sock: socket.socket
    pid: int
    pidfd: int
    role: m.Role | None = None
    who: str = ""


class Handlers:
    def __init__(self, kind: str, vault: Vault, log: Callable[..., None]) -> None:
        self._kind, self._vault, self._log = kind, vault, log

    def handle(self, peer: Peer, message: Any) -> Answer:
        """Raises BelayerError; nothing has changed then, unless the message says so."""
        if isinstance(message, m.Hello):
            return self._hello(peer, message), ()
        self._allowed(peer, message)
        by = Caller(peer=peer.number, who=peer.who, pid=peer.pid, pidfd=peer.pidfd)
        return self._weights(by, message) if self._kind == WEIGHTS else self._kv(by, message)

    def _hello(self, peer: Peer, message: m.Hello) -> m.Welcome:
        if peer.role is not None:
            raise Refused("this connection has said Hello before")
        peer.role, peer.who = message.role, message.who[:64]
        return m.Welcome(kind=self._kind, owner_generation=self._vault.generation, pid=os.getpid())

    def _allowed(self, peer: Peer, message: Any) -> None:
        name = type(message).__name__
        if peer.role is None:
            raise Refused(f"{name} before Hello")
        kind, roles = RIGHTS[type(message)]
        if peer.role not in roles:
            raise Refused(f"{name} needs role {' or '.join(sorted(roles))}, this connection is {peer.role}")
        if kind != self._kind:
            raise Refused(f"this is the owner of {self._kind}, ask the owner of {kind}")

    def _weights(self, by: Caller, message: Any) -> Answer:
        models = self._vault.models
        match message:
            case m.AttachWeights():
                grant, fd = models.attach(message.model, message.rank, by)
                return _with_layout(grant, (fd,))
            case m.RejoinWeights():
                info = models.rejoin(message, by)
                self._log("rejoined", model=message.model, version=message.version, who=by.who)
                return info, ()
            case m.BeginUpdate():
                granted, fds = models.begin(message, by)
                self._log("updating", model=message.model, version=granted.version, mode=granted.mode, who=by.who)
                return _with_layout(granted, fds)
            case m.UpdatePart():
                return _with_layout(*models.part(message, by))
            case m.CommitUpdate():
                return self._told(models.commit(message, by)), ()
            case m.AbortUpdate():
                return self._told(models.abort(message, by)), ()
            case m.RepublishWeights():
                return self._told(models.republish(message, lambda done, of, rate: None)), ()
        raise Refused(f"{type(message).__name__} is not handled here")

    def _told(self, job: Job) -> Job:
        def finish(result: object) -> m.WeightsInfo:
            info = job.finish(result)
            self._log("weights", model=info.model, state=info.state, version=info.version, digest=info.digest[:12])
            return info

        return Job(job.work, finish)

    def _kv(self, by: Caller, message: Any) -> Answer:
        arenas = self._vault.arenas
        match message:
            case m.OpenArena(slot=slot, rank=rank, nbytes=nbytes):
                entry, fd = arenas.open(slot, rank, nbytes)
                now = entry.arena
                grant = m.ArenaGrant(
                    slot=slot, epoch=now.epoch, nbytes=now.nbytes, owner_generation=now.owner, rank=rank
                )
                return grant, (fd,)
            case m.AcquireLease(slot=slot, rank=rank, epoch=epoch):
                fd = arenas.acquire(slot, rank, core.Stamp(message.owner_generation, epoch), by)
                self._log("leased", slot=slot, rank=rank, epoch=epoch, who=by.who)
                return m.LeaseGrant(slot=slot, epoch=epoch, rank=rank), (fd,)
            case m.ReclaimLease(slot=slot, rank=rank, epoch=epoch):
                entry = arenas.reclaim(slot, rank, core.Stamp(message.owner_generation, epoch), by)
                self._log("reclaimed", slot=slot, rank=rank, epoch=epoch, who=by.who)
                return entry.info(), ()
        return self._fence(message), ()

    def _fence(self, message: Any) -> m.ArenaInfo:
        arenas = self._vault.arenas
        entry = arenas.entry(message.slot, message.rank)
        stamp = core.Stamp(message.owner_generation, message.epoch)
        event: core.ArenaEvent
        match message:
            case m.BeginFence():
                event = core.FenceBegun(stamp)
            case m.EndFence():
                event = core.FenceEnded(stamp, entry.holder_alive())
            case m.QuarantineArena(reason=reason):
                event = core.Quarantined(stamp, reason[:256])
            case m.RestoreArena():
                event = core.Restored(stamp, entry.holder_alive())
            case _:
                raise Refused(f"{type(message).__name__} is not handled here")
        before = entry.arena
        after = arenas.fence(message.slot, message.rank, event).arena
        self._log("arena", slot=before.slot, was=before.state.value, now=after.state.value, epoch=after.epoch)
        return entry.info()


def _with_layout(grant: m.WeightsGrant | m.UpdateGrant, fds: tuple[int, ...]) -> Answer:
    """A layout that is too large for a packet goes last, in a memfd."""
    if len(wire.encode(grant)) <= MAX_INLINE:
        return grant, fds
    return msgspec.structs.replace(grant, layout=()), (*fds, _in_memfd(msgspec.msgpack.encode(grant.layout)))


def _in_memfd(data: bytes) -> int:
    fd = os.memfd_create("belayer-layout", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd
