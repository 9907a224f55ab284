"""uvicorn's HTTP protocol with a bound on how long the head of a request may take: a client that sends a byte a minute
holds a connection for nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def patient(seconds: float, dropped: Counter[str]) -> type[HttpToolsProtocol]:
    """A protocol class that closes a connection whose next request has not been announced within ``seconds``."""

    class Patient(HttpToolsProtocol):
        _limit: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
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
