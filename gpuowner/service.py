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
from pathlib import Path
from typing import Any

import msgspec

from belayer import wire
from belayer.daemon import notify
from belayer.errors import BadMessage, BelayerError, Refused
from belayer.messages import owner as m
from belayer.messages.common import Ping, Pong
from belayer.rpc import to_reply
from belayer.seqpacket import recv_fds
from gpuowner.arenas import ArenaEntry
from gpuowner.handlers import MAX_INLINE, Answer, Handlers, Peer
from gpuowner.keeping import Store, StoreLost
from gpuowner.store import HolderStore
from gpuowner.vault import Vault
from gpuowner.version import Job

MAX_REQUEST = 128 << 10  # bytes; the largest request is a commit: 34 bytes for each 64 MiB of a model
_SO_PEERPIDFD = 77  # Linux 6.5, asm-generic/socket.h
_SPARE_FDS = 128
_MOST_FDS = 1 << 16
_RENEW_S, _LONGEST_RENEW_S = 0.5, 60.0  # between two tries to give copies to a holder


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


def _filled(reopen: Callable[[], HolderStore], held: dict[str, int]) -> HolderStore:
    store = reopen()
    try:
        for name, fd in held.items():
            store.put(name, fd)
    except StoreLost:
        store.close()
        raise
    return store


class Service:
    """Listens at ``path``; ``log(event, **fields)`` gets one call per transition."""

    def __init__(
        self,
        kind: str,
        path: Path,
        vault: Vault,
        instance: str,
        log: Callable[..., None],
        reopen: Callable[[], HolderStore] | None = None,
    ) -> None:
        """``reopen``: makes another holder when the one there is has died; None where systemd keeps the copies."""
        self._kind, self._path, self.vault, self._instance, self._log = kind, path, vault, instance, log
        self._handlers = Handlers(kind, vault, log)
        self._reopen = reopen
        self._renewal: asyncio.Task[None] | None = None
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
        for entry in self.vault.orphans():  # they have no connection whose end would tell
            pidfd = os.dup(entry.holder_pidfd)  # the entry closes its own when the arena is free again
            loop.add_reader(pidfd, self._orphan_died, entry, entry.pid, pidfd)
        self._watch_store()
        self._feed_watchdog(loop, int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6)
        try:
            await self._broken_invariant(loop)
        finally:
            if self._renewal is not None:
                self._renewal.cancel()
            loop.remove_reader(self._listener)
            self._listener.close()
            # No lease and no update ends here: the next life looks for each holder by its process.
            for peer in self._peers.values():
                loop.remove_reader(peer.sock)
                loop.remove_reader(peer.pidfd)
                peer.sock.close()
                os.close(peer.pidfd)
            self._path.unlink(missing_ok=True)

    def _feed_watchdog(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """sd_watchdog_enabled(3): an owner whose loop stands still is killed, as its next life has everything again."""
        if limit_s > 0:
            notify("WATCHDOG=1")
            loop.call_later(limit_s / 3, self._feed_watchdog, loop, limit_s)

    @staticmethod
    async def _broken_invariant(loop: asyncio.AbstractEventLoop) -> None:
        """Until cancelled, or until a callback raises what nobody expected: then this life ends with its traceback, and
        the next one adopts what is held. asyncio alone would only log it and leave a peer without an answer."""
        broken: asyncio.Future[None] = loop.create_future()

        def ended(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            if not broken.done():
                broken.set_exception(context.get("exception") or RuntimeError(context["message"]))

        loop.set_exception_handler(ended)
        await broken

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as why:  # the newcomer has left, or there is no descriptor for it now: nobody else suffers
            if not isinstance(why, BlockingIOError | ConnectionAbortedError):
                self._log("not_accepted", why=str(why))
            return
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (os.getuid(), 0) or len(self._peers) >= self._max_peers:
            self._log("refused", pid=pid, uid=uid, peers=len(self._peers))
            sock.close()
            return
        try:
            pidfd = peer_pidfd(sock, pid)
        except OSError:  # it has ended already, or there is no descriptor to watch it by
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
            data, fds, flags = recv_fds(peer.sock, MAX_REQUEST, 1)
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

    def _watch_store(self) -> None:
        store = self.vault.keeping.store
        if isinstance(store, HolderStore):
            self.vault.keeping.on_lost = self._store_lost
            ended = f"{store.describe()} has ended"
            asyncio.get_running_loop().add_reader(store.fileno(), self.vault.keeping.lost, ended)
        elif store is None:  # it was lost while models were loaded
            self._renewal = asyncio.create_task(self._renew_store())

    def _store_lost(self, store: Store) -> None:
        if isinstance(store, HolderStore):
            asyncio.get_running_loop().remove_reader(store.fileno())
            store.close()
            self._renewal = asyncio.create_task(self._renew_store())

    async def _renew_store(self) -> None:
        """Until a holder has copies of everything again. In a thread: a holder that hangs must hold nobody up."""
        pause = _RENEW_S
        while self._reopen is not None:
            held = {name: os.dup(fd) for name, fd in self.vault.keeping.held.items()}
            store: HolderStore | None = None
            try:
                store = await asyncio.to_thread(_filled, self._reopen, held)
                self.vault.keeping.renew(store, set(held))
            except (StoreLost, OSError) as why:
                self.vault.keeping.reason = str(why)
                if store is not None:
                    store.close()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_RENEW_S)
            else:
                self._log("store_renewed", store=store.describe())
                self._watch_store()
                return
            finally:
                for fd in held.values():
                    os.close(fd)

    def _orphan_died(self, entry: ArenaEntry, pid: int, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        if entry.pid == pid and self.vault.arenas.process_gone(entry):
            self._log("holder_lost", slot=entry.arena.slot, epoch=entry.arena.epoch, who=entry.arena.who, why="it died")

    def _answer(self, peer: Peer, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except BadMessage as why:
            self._refuse_bytes(peer, why)
            return
        name = type(message).__name__
        if isinstance(message, Ping):
            pong = Pong(daemon=f"gpuowner-{self._kind}", pid=os.getpid(), instance=self._instance)
            self._send(peer, pong, ())
        elif isinstance(message, m.OwnerStatus):
            self._send(peer, self._status(), ())
        else:
            self._reply(peer, name, lambda: self._handlers.handle(peer, message))

    def _reply(self, peer: Peer, name: str, make: Callable[[], Answer]) -> None:
        """Send what ``make`` gives, or the error that it raises; a job's answer comes when the job is done."""
        fds: tuple[int, ...] = ()
        reply: msgspec.Struct | Job
        try:
            reply, fds = make()
        except BelayerError as why:
            self._log("declined", who=peer.who, message=name, why=why.message)
            reply = to_reply(why)
        except OSError as why:  # out of memory or descriptors: this request fails, the vault is as it was
            self._log("failed", who=peer.who, message=name, why=str(why))
            reply = to_reply(Refused(f"{name}: {why}", kept="the state as it was"))
        if isinstance(reply, Job):
            self._run(peer, name, reply)
        else:
            self._send(peer, reply, fds)

    def _run(self, peer: Peer, name: str, job: Job) -> None:
        """The peer is not listened to until its answer is out; its death is still seen, by its pidfd."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(peer.sock)
        done = loop.run_in_executor(None, job.work)
        done.add_done_callback(lambda future: self._job_done(peer, name, job, future))

    def _job_done(self, peer: Peer, name: str, job: Job, future: asyncio.Future[object]) -> None:
        if future.cancelled():
            return
        result = future.result()
        self._reply(peer, name, lambda: (job.finish(result), ()))
        if peer.number in self._peers:
            asyncio.get_running_loop().add_reader(peer.sock, self._readable, peer)

    def _refuse_bytes(self, peer: Peer, why: BadMessage) -> None:
        self._send(peer, to_reply(why), ())
        self._drop(peer, why.message)

    def _send(self, peer: Peer, reply: msgspec.Struct, fds: tuple[int, ...]) -> None:
        try:
            if peer.number not in self._peers:
                return  # it died while its job ran
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
        for entry in self.vault.arenas.peer_gone(peer.number):
            self._log("holder_lost", slot=entry.arena.slot, epoch=entry.arena.epoch, who=peer.who, why=why)
        for model in self.vault.models.peer_gone(peer.number):
            state = model.weights.state.value
            self._log("writer_lost", model=model.weights.model, state=state, who=peer.who, why=why)
        os.close(peer.pidfd)
        if peer.role is not None and peer.role is not m.Role.ADMIN:  # the supervisor asks once a second
            self._log("left", who=peer.who, pid=peer.pid, why=why)

    def _status(self) -> m.OwnerStatusReply:
        keeping = self.vault.keeping
        return m.OwnerStatusReply(
            kind=self._kind,
            pid=os.getpid(),
            owner_generation=self.vault.generation,
            backend=self.vault.maker.name,
            weights=tuple(entry.info() for entry in self.vault.models.entries.values()),
            arenas=tuple(entry.info() for entry in self.vault.arenas.entries.values()),
            connections=len(self._peers),
            store=keeping.store.describe() if keeping.store else "",
            store_reason=keeping.reason,
            adopted=tuple(self.vault.adopted),
            lost=tuple(self.vault.lost),
        )
