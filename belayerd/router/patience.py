"""uvicorn's HTTP protocol with bounds on the head of a request, in time and size: a client that sends a byte a minute
holds a connection for nothing, and one that sends headers without end all memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 1 << 20  # bytes; session headers and tokens take some thousand


def patient(seconds: float, dropped: Counter[str]) -> type[HttpToolsProtocol]:
    """A protocol class that closes a connection whose next request has not been announced within ``seconds``, or
    whose head goes on beyond ``MOST_HEAD`` bytes."""

    class Patient(HttpToolsProtocol):
        _limit: asyncio.TimerHandle | None = None
        _head = -1  # bytes of the head that is coming, -1: none is

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

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
            super().connection_lost(exc)

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
