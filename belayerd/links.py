"""belayerd's wires to the others: workers (zmq), the zygote and the owners (SEQPACKET). No decisions here."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from belayer import progress, wire
from belayer.clock import monotonic
from belayer.errors import BelayerError, DaemonUnreachable, OwnerComing, WorkerFailed, WorkerGone
from belayer.messages.owner import (
    ArenaInfo,
    BeginFence,
    EndFence,
    Hello,
    OwnerStatus,
    OwnerStatusReply,
    QuarantineArena,
    RestoreArena,
    Role,
    Welcome,
)
from belayer.messages.worker import HowEnded, Spawned, SpawnWorker, WorkerEnd
from belayer.paths import Paths
from belayer.rpc import decode_reply
from belayer.seqpacket import SeqClient

R = TypeVar("R", bound=msgspec.Struct)
Moving = Callable[[], object]

_PATIENCE = 0.8  # of a step's deadline: an owner that stays away is the error, not the deadline that it ran into
_AGAIN_S = 0.05
_GLANCE_S = 0.5  # at how far a worker is that takes long
_IDENTITY = b"belayerd"  # the worker tells its control peer from router fronts by this


def still() -> object:
    """Of a worker that is not looked at: a call's time is all that counts."""
    return None


class WorkerLink:
    """Control plane of one worker. Its socket is the worker's only one, so a worker inside a step answers after it."""

    def __init__(self, context: zmq.asyncio.Context, path: Path) -> None:
        self._path = path
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IDENTITY, _IDENTITY)
        self._socket.set(zmq.RECONNECT_IVL, 20)  # ms; the worker binds its endpoint while we already wait
        self._socket.set(zmq.RECONNECT_IVL_MAX, 200)
        self._socket.connect(f"ipc://{path}")
        # The identity is that of every belayerd before us: an answer to a call of a killed one reaches us, and must
        # not be taken for the answer to ours.
        self._life = secrets.token_bytes(8)
        self._next = 0
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._gone = False
        self._reader = asyncio.create_task(self._receive())

    async def call(self, message: msgspec.Struct, reply: type[R], within: float, moving: Moving = still) -> R:
        """Raises WorkerFailed after ``within`` seconds, WorkerGone as soon as the worker has ended. ``moving``: differs
        whenever the worker has got on with what it was asked; ``within`` then counts how long that stood still."""
        if self._gone:
            raise self._has_ended()
        self._next += 1
        call = self._life + self._next.to_bytes(8, "little")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        try:
            async with asyncio.timeout(within):
                await self._socket.send_multipart([b"ctl", call, wire.encode(message)])
            data = await _while_moving(future, within, moving)
        except TimeoutError as why:
            stood = f", and stood still at {moving()!r}" if moving is not still else ""
            raise WorkerFailed(
                f"worker at {self._path.stem} did not answer {type(message).__name__} in {within:g} s{stood}"
            ) from why
        finally:
            self._waiting.pop(call, None)
        return decode_reply(data, reply)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            future = self._waiting.get(frames[1]) if len(frames) == 3 and frames[0] == b"ctl" else None
            if future is not None and not future.done():
                future.set_result(frames[2])

    def gone(self) -> None:
        """The worker has ended: nobody will answer, and whoever waits is told now, not at its deadline. An update that
        waited those two minutes would hold the successor at the gate meanwhile."""
        self._gone = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self._has_ended())

    def _has_ended(self) -> WorkerGone:
        return WorkerGone(f"worker at {self._path.stem} has ended")

    def close(self) -> None:
        self.gone()
        self._reader.cancel()
        self._socket.close()


async def _while_moving(future: asyncio.Future[bytes], within: float, moving: Moving) -> bytes:
    seen, since = moving(), monotonic()
    while not future.done():
        if (now := moving()) != seen:
            seen, since = now, monotonic()
        left = since + within - monotonic()
        if left <= 0:
            raise TimeoutError
        await asyncio.wait({future}, timeout=min(left, _GLANCE_S))
    return future.result()


def spawn(paths: Paths, message: SpawnWorker, within: float) -> tuple[Spawned, int]:
    """Ask the zygote for a worker; returns its reply and the child's pidfd. Blocking."""
    client = SeqClient(paths.zygote_sock, within)
    try:
        reply, fds = client.call(message, Spawned)
    finally:
        client.close()
    if len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise DaemonUnreachable(f"the zygote sent {len(fds)} descriptors with Spawned, expected the pidfd")
    return reply, fds[0]


def how_ended(paths: Paths, worker_id: str, within: float) -> str:
    """What the zygote knows of a worker that has ended, "" when there is nobody to ask. Blocking."""
    try:
        client = SeqClient(paths.zygote_sock, within)
    except DaemonUnreachable:
        return ""
    try:
        return client.call(HowEnded(worker_id=worker_id), WorkerEnd)[0].said
    except BelayerError:
        return ""
    finally:
        client.close()


class OwnerLink:
    """Admin connection to one owner; made anew for each call, so that an owner's restart is no special case. An owner
    that is away is waited for: it comes back with everything, and a handover that gave up would quarantine its slot.

    How long depends on what it says of itself (belayer.progress): one that is on the way and gets on is OwnerComing,
    however long that takes; one that stands still for ``stands_s``, or that nobody has started, is unreachable."""

    def __init__(self, paths: Paths, kind: str, within: float, stands_s: float) -> None:
        self._path, self._within = paths.owner_sock(kind), within
        self._progress, self._patience = paths.owner_progress(kind), progress.Patience(stands_s)
        self._called = f"gpuowner@{kind}"

    async def status(self, *, wait: bool = True) -> OwnerStatusReply:
        return await self._call(OwnerStatus(), OwnerStatusReply, wait)

    def coming(self) -> str:
        """How far an owner is that does not answer yet, "" when none is on the way."""
        seen = progress.read(self._progress)
        return f"{self._called} is coming back: {seen}" if self._patience.moves(seen, monotonic()) else ""

    # Each of these carries what the caller saw: where the owner, or the arena, has moved on since, it is Fenced.

    async def begin_fence(self, seen: ArenaInfo) -> ArenaInfo:
        return await self._call(BeginFence(**_seen(seen)), ArenaInfo)

    async def end_fence(self, seen: ArenaInfo) -> ArenaInfo:
        return await self._call(EndFence(**_seen(seen)), ArenaInfo)

    async def quarantine(self, seen: ArenaInfo, reason: str) -> ArenaInfo:
        return await self._call(QuarantineArena(**_seen(seen), reason=reason), ArenaInfo)

    async def restore(self, seen: ArenaInfo) -> ArenaInfo:
        return await self._call(RestoreArena(**_seen(seen)), ArenaInfo)

    async def arena(self, slot: str) -> ArenaInfo | None:
        status = await self.status()
        mine = [arena for arena in status.arenas if arena.slot == slot]
        return min(mine, key=lambda arena: arena.rank, default=None)  # the ranks' arenas are leased as one

    async def arenas(self, slot: str) -> list[ArenaInfo]:
        """All of a slot's: one for each tensor-parallel rank."""
        return [arena for arena in (await self.status()).arenas if arena.slot == slot]

    async def _call(self, message: Any, reply: type[R], wait: bool = True) -> R:
        """Asking again is safe: what the last life did do is Fenced in the next one by its owner generation."""
        end = monotonic() + (_PATIENCE * self._within if wait else 0.0)
        while True:
            try:
                return await asyncio.to_thread(self._blocking, message, reply)
            except DaemonUnreachable as why:
                coming = self.coming()
                if monotonic() >= end:
                    raise self._away(coming, why) from why
            await asyncio.sleep(_AGAIN_S)

    def _away(self, coming: str, why: DaemonUnreachable) -> DaemonUnreachable:
        if coming:
            return OwnerComing(coming, kept="all that it holds", remedy="nothing: it is waited for")
        seen = progress.read(self._progress)
        if seen is None:
            return why
        stood = f"{self._called} does not get on: {seen}, for {self._patience.stood_s(monotonic()):.0f} s now"
        return DaemonUnreachable(
            stood, kept="what its store holds", remedy=f"kill pid {seen.pid}: the next life adopts"
        )

    def _blocking(self, message: Any, reply: type[R]) -> R:
        client = SeqClient(self._path, self._within)
        try:
            client.call(Hello(role=Role.ADMIN, who="belayerd"), Welcome)
            answer, fds = client.call(message, reply)
        finally:
            client.close()
        for fd in fds:
            os.close(fd)
        return answer


def _seen(arena: ArenaInfo) -> dict[str, Any]:
    return {
        "slot": arena.slot, "rank": arena.rank, "epoch": arena.epoch, "owner_generation": arena.owner_generation
    }  # fmt: skip
