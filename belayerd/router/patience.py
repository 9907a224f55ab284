"""uvicorn's HTTP protocol with bounds on clients: one that sends a byte a minute holds a connection for nothing, one
that sends headers without end all memory, and one that never reads its answer both, and what runs for it.

uvicorn stops a stream whose client does not read (above 64 KiB in its own buffer, beside the kernel's), for ever. A
slow reader looks like none for a while: the kernel takes more from us in pieces of some hundred KiB. So what counts is
what the client's kernel has acknowledged, and it is looked at only while something waits here.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 1 << 20  # bytes; session headers and tokens take some thousand
_LOOKS = 8  # at a client that does not read, within the bound; counted, so that our own standstill is not taken for its
_ACKED = struct.Struct("@Q"), 120  # tcp_info.tcpi_bytes_acked (linux/tcp.h)


def acknowledged(sock: Any) -> int:
    """Bytes that the other side's kernel has taken so far."""
    form, offset = _ACKED
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + form.size)
    return int(form.unpack_from(info, offset)[0])


def patient(seconds: float, dropped: Counter[str], unread_s: float) -> type[HttpToolsProtocol]:
    """A protocol class that closes a connection whose next request has not been announced within ``seconds``, or
    whose head goes on beyond ``MOST_HEAD`` bytes; and breaks one whose client took nothing of what waits for it for
    ``unread_s``."""

    class Patient(HttpToolsProtocol):
        _limit: asyncio.TimerHandle | None = None
        _look: asyncio.TimerHandle | None = None
        _head = -1  # bytes of the head that is coming, -1: none is
        _taken = -1  # acknowledged by the client at the last look, -1: nothing was waiting
        _still = 0  # looks since it took something

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()
            self._look_again()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head < 0 or self.transport.is_closing():
                return
            self._head += len(data)
            if self._head > MOST_HEAD:
                dropped["head_too_large"] += 1
                self.transport.close()

        def on_message_begin(self) -> None:
            self._head = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head = -1
            self._stop()
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            another = bool(self.pipeline)  # its head has come already
            super().on_response_complete()
            if not another:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def _look_again(self) -> None:
            self._look = self.loop.call_later(unread_s / _LOOKS, self._look_at_client)

        def _look_at_client(self) -> None:
            waiting = self.transport.get_write_buffer_size() > 0
            taken = acknowledged(self.transport.get_extra_info("socket")) if waiting else -1
            self._still = self._still + 1 if waiting and taken == self._taken else 0
            self._taken = taken
            if self._still < _LOOKS:
                self._look_again()
                return
            dropped["answer_not_read"] += 1
            self.transport.abort()  # closing would wait for the client; this frees what runs for it

        def _wait(self) -> None:
            self._stop()
            self._limit = self.loop.call_later(seconds, self._late)

        def _stop(self) -> None:
            if self._limit is not None:
                self._limit.cancel()
                self._limit = None

        def _late(self) -> None:
            if not self.transport.is_closing():
                dropped["head_too_slow"] += 1
                self.transport.close()

    return Patient
