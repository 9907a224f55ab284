"""Keeps the fronts of a router alive: starts each, sees each die, starts it again after a pause that grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from belayer import clock, lastwords, procs
from belayer.errors import HostUnfit, Refused, WorkerGone
from belayer.messages.common import FaultProof
from belayer.messages.router import InjectFrontFault, RouterFront
from belayerd import proof
from belayerd.router import front_zygote as zygote
from belayerd.router.front_door import FrontDoor, Side
from belayerd.router.front_lives import DIED, GIVEN_UP, Lives
from belayerd.router.front_loads import Loads

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STEADY_S = 60.0  # a front that served so long begins with the first pause again
GIVE_UP = 5  # deaths of a front before it has ever served: it will not
STOP_S = 10.0  # from SIGTERM to SIGKILL; a front closes its connections within GRACE_S
_PACKET = 64 << 10
_STOPPED = frozenset("Tt")
_NO_KILLS = lastwords.Kills(0, 0)


def pause_s(failures: int) -> float:
    """Before the next start, after so many deaths in a row (1: the first)."""
    return float(min(FIRST_PAUSE_S * 2.0 ** (failures - 1), LONGEST_PAUSE_S))


@dataclass
class Place:
    """One of the fronts, over all its lives. ``identity`` "": none lives. ``given_up``: why the router ended it;
    ``kills``: of the OOM killer, before it was forked."""

    number: int
    lives: Lives
    identity: str = ""
    pidfd: int = -1
    given_up: str = ""
    given_ups: int = 0
    kills: lastwords.Kills = _NO_KILLS
    failures: int = 0
    ever_served: bool = False
    born_at: float = 0.0
    deaths: int = 0
    starts: asyncio.TimerHandle | None = None


class Fronts:
    """Make it inside the running event loop; ``start``, ``until_serving``, ``watch``; ``stop`` ends them all."""

    def __init__(self, sock: socket.socket, door: FrontDoor, loads: Loads, count: int, log: Any) -> None:
        """``sock``: the router's end of the zygote's socket."""
        self._sock, self._door, self._loads, self._log = sock, door, loads, log
        self.places = [Place(number, Lives(number)) for number in range(count)]
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._gone = asyncio.Event()  # some front has died
        self._stopping = False
        door.serves, door.give_up = self._serves, self._kill
        sock.setblocking(False)
        self._loop.add_reader(sock, self._hear)

    def start(self) -> None:
        for place in self.places:
            self._spawn(place)

    async def until_serving(self) -> None:
        """All of them, once."""
        while not all(side.serving for side in self._door.sides.values()) or not all(
            place.identity for place in self.places
        ):
            self._door.changed.clear()
            await self._door.changed.wait()

    async def watch(self) -> None:
        """Raises HostUnfit for fronts that cannot serve at all, RuntimeError when the zygote has died."""
        await self._broken

    def _spawn(self, place: Place) -> None:
        place.starts = None
        place.identity, place.born_at = f"{place.number}.{secrets.token_hex(4)}", clock.monotonic()
        place.given_up, place.kills = "", lastwords.oom_kills("")
        place.lives.begins(place.identity, place.born_at, clock.wall())
        self._door.expect(place.identity.encode(), place.number)  # before it can say a word
        self._sock.send(msgspec.msgpack.encode(zygote.Spawn(place.number, place.identity)))

    def _hear(self) -> None:
        try:
            data = self._sock.recv(_PACKET)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self._loop.remove_reader(self._sock)
            self._break(RuntimeError("the zygote of the fronts has died, and all fronts with it"))
            return
        said = zygote.read(data)
        place = next((one for one in self.places if one.identity == said.identity), None)
        if place is None:
            return
        if isinstance(said, zygote.Born):
            self._born(place, said.pid)
        else:
            self._died(place, said)

    def _born(self, place: Place, pid: int) -> None:
        with contextlib.suppress(WorkerGone):  # dead already: the zygote says so next
            place.pidfd = procs.open_pidfd(pid, procs.start_time(pid))
            self._loop.add_reader(place.pidfd, self._seen_dead, place)
        side = self._door.sides[place.identity.encode()]
        side.pid = pid
        place.lives.born(pid, clock.monotonic())
        if self._stopping or side.given_up:
            self._kill(place.identity.encode())  # it came too late to be told to stop, or to be killed
        self._log.info("front_starts", front=place.number, pid=pid)

    def _seen_dead(self, place: Place) -> None:
        """By the pidfd, at once: its readers are lost. How it ended, the zygote says when it has reaped it."""
        self._loop.remove_reader(place.pidfd)
        os.close(place.pidfd)
        place.pidfd = -1
        self._lost(place)

    def _lost(self, place: Place) -> None:
        identity = place.identity.encode()
        side = self._door.sides.get(identity)
        if side is None:
            return
        self._loads.away(place.number)
        place.given_up = side.why
        place.lives.lost(self._door.lost(identity), clock.monotonic(), clock.wall())

    def _died(self, place: Place, said: zygote.Died) -> None:
        if place.pidfd >= 0:
            self._seen_dead(place)
        self._lost(place)
        lived = clock.monotonic() - place.born_at
        place.failures = 1 if lived > STEADY_S else place.failures + 1
        place.identity = ""
        place.deaths += 1
        place.given_ups += bool(place.given_up)
        self._gone.set()
        if self._stopping:
            return
        cause, why = self._how(place, said)
        place.lives.ended(cause, why, clock.monotonic(), clock.wall())
        self._log.error("front_died", front=place.number, code=said.code, why=why, lived_s=round(lived, 1))
        if not place.ever_served and (said.code == zygote.EXIT_UNFIT or place.failures >= GIVE_UP):
            self._break(HostUnfit(said.said or f"front {place.number} ended with {said.code} before it ever served"))
            return
        place.starts = self._loop.call_later(pause_s(place.failures), self._spawn, place)

    @staticmethod
    def _how(place: Place, said: zygote.Died) -> tuple[str, str]:
        if place.given_up:
            return GIVEN_UP, f"killed by the router: {place.given_up}"
        ended = lastwords.how(said.code, place.lives.pid, place.kills, lastwords.oom_kills(""))
        return DIED, said.said or ended

    def _serves(self, identity: bytes) -> None:
        for place in self.places:
            if place.identity.encode() == identity:
                place.ever_served = True
                place.lives.serves(clock.monotonic())

    def _break(self, why: Exception) -> None:
        if not self._broken.done():
            self._broken.set_exception(why)

    def _kill(self, identity: bytes) -> None:
        for place in self.places:
            if place.identity.encode() == identity and place.pidfd >= 0:
                signal.pidfd_send_signal(place.pidfd, signal.SIGKILL)

    def view(self) -> tuple[RouterFront, ...]:
        streams = self._door.streams()
        return tuple(self._row(place, streams) for place in self.places)

    def _row(self, place: Place, streams: Counter[bytes]) -> RouterFront:
        identity = place.identity.encode()
        side = self._door.sides.get(identity)
        if side is None:
            return place.lives.view("away")
        return place.lives.view(_state(side), streams[identity], side.added, side.sent - side.read)

    async def inject(self, message: InjectFrontFault) -> FaultProof:
        """Break one on purpose. Raises Refused when there is none to break."""
        place = next((one for one in self.places if one.number == message.front), None)
        if place is None:
            raise Refused(f"no front {message.front}", remedy=f"one of 0 to {len(self.places) - 1}")
        if place.pidfd < 0:
            raise Refused(f"front {message.front} does not live now", remedy="see belayerctl status")
        proof.signal_of(message.kind)
        place.lives.broken_on_purpose()
        proven = await proof.inject(place.pidfd, place.lives.pid, message.kind, f"front {message.front}")
        self._log.warning("injected", fault=message.kind, front=message.front, seen=proven.seen)
        return proven

    async def stop(self) -> None:
        """SIGTERM, so that streams end with an error chunk; SIGKILL for those that are not gone within STOP_S."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        for place in self.places:
            if place.starts is not None:
                place.starts.cancel()
        try:
            async with asyncio.timeout(STOP_S):
                await self._all_gone()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._all_gone()

    def _signal(self, number: signal.Signals) -> None:
        for place in self.places:
            if place.pidfd >= 0:
                signal.pidfd_send_signal(place.pidfd, number)

    async def _all_gone(self) -> None:
        while any(place.identity for place in self.places) and not self._broken.done():
            self._gone.clear()
            await self._gone.wait()

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for place in self.places:
            if place.pidfd >= 0:
                self._loop.remove_reader(place.pidfd)
                os.close(place.pidfd)
        self._broken.cancel()


def _state(side: Side) -> str:
    """As RouterFront has it, of a front that lives as far as is known."""
    if side.given_up:
        return "given up"
    if side.pid and procs.state(side.pid) in _STOPPED:
        return "stopped"
    return "serving" if side.serving else "starting"
