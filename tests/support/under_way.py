"""Streams of a host that are caught in their middle, for a fault that must come there."""

from __future__ import annotations

from collections.abc import Callable

from belayer.localhost import LocalHost
from tests.support.streams import Stream
from tests.support.wait import eventually

_TRIES = 10


def busy_slots(host: LocalHost) -> list[str]:
    """Those whose main runs something by its own beat, which comes a moment after the tokens and after an end."""
    return [row.slot for row in host.status().slots if any(w.role == "main" and w.running for w in row.workers)]


def on_one_slot(host: LocalHost, make: Callable[[], Stream]) -> tuple[Stream, str]:
    """A stream that has begun and not ended, and the slot that it runs on. Another one, where it had ended before it
    was looked at. Nothing else may run."""
    for _ in range(_TRIES):
        stream, found = make(), list[str]()
        eventually(lambda stream=stream: len(stream.seen.token_ids) >= 8 or not stream.is_alive(), what="tokens")

        def told(stream: Stream = stream, found: list[str] = found) -> bool:
            found[:] = busy_slots(host)
            return len(found) == 1 or not stream.is_alive()

        eventually(told, what="one main runs it")
        if len(found) == 1 and stream.is_alive():
            return stream, found[0]
        assert not stream.result().errors
    raise AssertionError(f"{_TRIES} streams had ended before anybody looked at them")
