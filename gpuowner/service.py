"""The owner's socket: typed packets in, grants with descriptors out.

One asyncio loop, one callback per readable connection, no await between reading a packet and answering
it: states never change under a handler. A peer that sends garbage, never reads, or floods loses its own
connection and nothing else. The connection is the lease: its end, or the death of its process, moves the
arena to FENCING before the next packet is read.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from belayer import wire
from belayer.errors import BadMessage, BelayerError, Refused
from belayer.messages import owner as m
from belayer.messages.common import Ping, Pong
from belayer.rpc import to_reply
from gpuowner import core
from gpuowner.vault import Vault

MAX_REQUEST = 64 << 10  # bytes; the largest request names a slot and a reason
MAX_INLINE = 128 << 10  # bytes; a larger layout rides in a memfd (the kernel's packet limit is wmem_max)
_SO_PEERPIDFD = 77  # Linux 6.5, asm-generic/socket.h
_SPARE_FDS = 128
_MOST_FDS = 1 << 16


@dataclass(eq=False)
class Peer:
    """One connection. ``pidfd`` names the process at the other end even after it is gone."""

    number: int
    sock: socket.socket
    pid: int
    pidfd: int
    role: m.Role | None = None
    who: str = ""


def peer_pidfd(sock: socket.socket, pid: int) -> int:
    """pidfd of the process that connected: exact by SO_PEERPIDFD, else by pidfd_open, whose race (a
    reused pid in the microseconds since connect) is closed by checking that the connection is still open.
    Raises ProcessLookupError."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(pid)
    os.set_inheritable(fd, False)
    return fd


class Service:
    """Listens at ``path``; ``log(event, **fields)`` gets one call per transition."""

    def __init__(self, kind: str, path: Path, vault: Vault, instance: str, log: Callable[..., None]) -> None:
        self._kind, self._path, self.vault, self._instance, self._log = kind, path, vault, instance, log
        self._decoder: wire.Decoder[Any] = wire.Decoder(m.Request)
        self._peers: dict[int, Peer] = {}
        self._count = 0
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        hard = min(hard, _MOST_FDS) if hard != resource.RLIM_INFINITY else _MOST_FDS
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        # Two descriptors per peer; the rest is for grants. Beyond it a newcomer is closed at once, nobody
        # else suffers.
        self._max_peers = max(8, (hard - _SPARE_FDS) // 2)
        self._listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )

    def listen(self) -> None:
        """From here on peers can connect; they are answered once ``serve`` runs."""
        self._path.unlink(missing_ok=True)  # of a killed life; that only one runs is the lock's business
        old = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(old)
        self._listener.listen(1024)

    async def serve(self) -> None:
        """Run until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener, self._accept)
        try:
            await asyncio.Event().wait()
        finally:
            loop.remove_reader(self._listener)
            self._listener.close()
            for peer in list(self._peers.values()):
                self._drop(peer, "the owner stops")
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0) or len(self._peers) >= self._max_peers:
            self._log("refused", pid=pid, uid=uid, peers=len(self._peers))
            sock.close()
            return
        try:
            pidfd = peer_pidfd(sock, pid)
        except ProcessLookupError:
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_INLINE)
        self._count += 1
        peer = self._peers[self._count] = Peer(self._count, sock, pid, pidfd)
        loop = asyncio.get_running_loop()
        loop.add_reader(sock, self._readable, peer)
        # The socket may be held open by a forked child of the peer; the process itself is what holds a lease.
        loop.add_reader(pidfd, self._drop, peer, "its process died")

    def _readable(self, peer: Peer) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(peer.sock, MAX_REQUEST, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as why:
            self._drop(peer, f"its connection broke: {why.strerror}")
            return
        for fd in fds:  # no request of ours carries one
            os.close(fd)
        if not data:
            self._drop(peer, "its connection ended")
        elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._refuse_bytes(peer, BadMessage(f"packet over {MAX_REQUEST} bytes"))
        else:
            self._answer(peer, data)

    def _answer(self, peer: Peer, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except BadMessage as why:
            self._refuse_bytes(peer, why)
            return
        try:
            reply, fds = self._handle(peer, message)
        except BelayerError as why:
            self._log("declined", who=peer.who, message=type(message).__name__, why=why.message)
            reply, fds = to_reply(why), ()
        except OSError as why:  # out of memory or descriptors: this request fails, the vault is as it was
            self._log("failed", who=peer.who, message=type(message).__name__, why=str(why))
            reply, fds = to_reply(Refused(f"{type(message).__name__}: {why}", kept="the state as it was")), ()
        self._send(peer, reply, fds)

    def _refuse_bytes(self, peer: Peer, why: BadMessage) -> None:
        self._send(peer, to_reply(why), ())
        self._drop(peer, why.message)

    def _send(self, peer: Peer, reply: msgspec.Struct, fds: tuple[int, ...]) -> None:
        try:
            socket.send_fds(peer.sock, [wire.encode(reply)], list(fds))
        except (BlockingIOError, OSError) as why:
            self._drop(peer, f"it does not take its answer: {why}")
        finally:
            for fd in fds:
                os.close(fd)

    def _drop(self, peer: Peer, why: str) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.sock)
        loop.remove_reader(peer.pidfd)
        peer.sock.close()
        for entry in self.vault.peer_gone(peer.number):
            self._log("holder_lost", slot=entry.arena.slot, epoch=entry.arena.epoch, who=peer.who, why=why)
        os.close(peer.pidfd)
        if peer.role is not None and peer.role is not m.Role.ADMIN:  # the supervisor asks once a second
            self._log("left", who=peer.who, pid=peer.pid, why=why)

    def _handle(self, peer: Peer, message: Any) -> tuple[msgspec.Struct, tuple[int, ...]]:
        match message:
            case Ping():
                return Pong(daemon=f"gpuowner-{self._kind}", pid=os.getpid(), instance=self._instance), ()
            case m.Hello():
                return self._hello(peer, message), ()
            case m.OwnerStatus():
                return self._status(), ()
        if peer.role is None:
            raise Refused(f"{type(message).__name__} before Hello")
        match message:
            case m.AttachWeights(model=model):
                self._only("weights")
                return self._attach(peer, model)
            case m.OpenArena(slot=slot, nbytes=nbytes):
                self._only("kv")
                entry, fd = self.vault.open_arena(slot, nbytes)
                arena = entry.arena
                grant = m.ArenaGrant(
                    slot=slot, epoch=arena.epoch, nbytes=arena.nbytes, owner_generation=self.vault.generation
                )
                return grant, (fd,)
            case m.AcquireLease(slot=slot, epoch=epoch):
                self._only("kv")
                fd = self.vault.acquire(slot, epoch, peer.number, peer.who, peer.pidfd)
                self._log("leased", slot=slot, epoch=epoch, who=peer.who)
                return m.LeaseGrant(slot=slot, epoch=epoch), (fd,)
        return self._admin(peer, message), ()

    def _hello(self, peer: Peer, message: m.Hello) -> m.Welcome:
        if peer.role is not None:
            raise Refused("this connection has said Hello before")
        peer.role, peer.who = message.role, message.who[:64]
        return m.Welcome(kind=self._kind, owner_generation=self.vault.generation, pid=os.getpid())

    def _attach(self, peer: Peer, model: str) -> tuple[msgspec.Struct, tuple[int, ...]]:
        grant, fd = self.vault.attach(model, peer.number, peer.who)
        if len(wire.encode(grant)) <= MAX_INLINE:
            return grant, (fd,)
        return msgspec.structs.replace(grant, layout=()), (
            fd,
            _in_memfd(msgspec.msgpack.encode(grant.layout)),
        )

    def _admin(self, peer: Peer, message: Any) -> m.ArenaInfo:
        if peer.role is not m.Role.ADMIN:
            raise Refused(f"{type(message).__name__} needs role admin, this connection is {peer.role}")
        self._only("kv")
        entry = self.vault.entry(message.slot)
        event: core.ArenaEvent
        match message:
            case m.BeginFence(epoch=epoch):
                event = core.FenceBegun(epoch)
            case m.EndFence(epoch=epoch):
                event = core.FenceEnded(epoch, entry.holder_alive())
            case m.QuarantineArena(epoch=epoch, reason=reason):
                event = core.Quarantined(epoch, reason[:256])
            case m.RestoreArena(epoch=epoch):
                event = core.Restored(epoch, entry.holder_alive())
            case _:
                raise Refused(f"{type(message).__name__} is not handled here")
        before = entry.arena
        after = self.vault.fence(message.slot, event)
        self._log(
            "arena",
            slot=before.slot,
            was=before.state.value,
            now=after.arena.state.value,
            epoch=after.arena.epoch,
        )
        return after.info()

    def _only(self, kind: str) -> None:
        if kind != self._kind:
            raise Refused(f"this is the owner of {self._kind}, ask the owner of {kind}")

    def _status(self) -> m.OwnerStatusReply:
        return m.OwnerStatusReply(
            kind=self._kind,
            pid=os.getpid(),
            owner_generation=self.vault.generation,
            backend="memfd",
            weights=tuple(entry.info() for entry in self.vault.weights.values()),
            arenas=tuple(entry.info() for entry in self.vault.arenas.values()),
            connections=len(self._peers),
        )


def _in_memfd(data: bytes) -> int:
    fd = os.memfd_create("belayer-layout", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd
