"""The way to a peer: where its name leads, the socket for questions, and what is wrong when no question gets there.

Names are looked up here and not by ZeroMQ: its one thread would wait for a name server, and every link with it. And
where a key was refused ZeroMQ never knocks again, so a key that is listed later would never count.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable

import zmq
import zmq.asyncio
import zmq.utils.monitor

LOOK_S = 2.0  # between two looks at a peer that does not answer

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Way:
    """``socket`` is dressed and not connected. ``silent``: whether the peer does not answer; ``hint`` is told why, as
    long as that is so."""

    def __init__(
        self,
        peer: str,
        address: str,
        socket: zmq.asyncio.Socket,
        silent: Callable[[], bool],
        hint: Callable[[str], None],
    ) -> None:
        self.socket, self.where = socket, ""
        self._peer, self._silent, self._hint = peer, silent, hint
        self._host, _, self._port = address.rpartition(":")
        self._monitor = socket.get_monitor_socket(_FAILED)
        if _is_literal(self._host):
            self._lead(address)

    def _lead(self, where: str) -> None:
        if self.where:
            with contextlib.suppress(zmq.ZMQError):  # it has given the connection up already
                self.socket.disconnect(f"tcp://{self.where}")
        self.where = where
        self.socket.set(zmq.IPV6, int("[" in where))
        self.socket.connect(f"tcp://{where}")

    async def keep(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            if not _is_literal(self._host):
                group.create_task(self._look())

    async def _look(self) -> None:
        while True:
            if self._silent():
                try:
                    where = await _look_up(self._host, self._port)
                except (OSError, UnicodeError) as why:
                    said = why.strerror if isinstance(why, OSError) else str(why)
                    self._hint(f"its name {self._host} does not resolve: {said}")
                else:
                    if where != self.where:
                        self._lead(where)
            await asyncio.sleep(LOOK_S)

    async def _watch(self) -> None:
        while True:
            said = await zmq.utils.monitor.recv_monitor_message(self._monitor)
            if said["event"] != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._hint(
                    f"what answers at {self.where} does not prove to be {self._peer}: it has another key than is "
                    "listed here (belayerctl keys show there, belayerctl keys add here), or is no router"
                )
                continue
            self._hint("it does not let this host in: it has another key of it, or none (belayerctl keys add there)")
            await asyncio.sleep(LOOK_S)
            self._lead(self.where)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.socket.close()


async def _look_up(host: str, port: str) -> str:
    """ADDRESS:PORT as ZeroMQ takes it; IPv4 first. Raises OSError or UnicodeError."""
    rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = {str(row[4][0]) for row in rows if row[0] == socket.AF_INET}
    if found:
        return f"{min(found)}:{port}"
    return f"[{min(str(row[4][0]) for row in rows)}]:{port}"


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
