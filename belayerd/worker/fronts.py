"""The data plane of a worker: what router fronts say, each message answered or ended by name.

A front is its client index. Its hello carries a token that names one link of one life of that front. A new token means
that whatever was under way for the front has been lost on the way: it is dropped here before ``ready`` goes out, so
that all that follows ``ready`` belongs to the new link, and the front gives its requests again with their output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from belayerd.worker.adapter.core import Core

logger = structlog.get_logger(daemon="worker")

Send = Callable[[list[Any]], None]


class Fronts:
    """``main``: whether requests are taken now; ``seq``: the number of a front's next message; ``version`` and
    ``digest``: of the weights; ``announce``: tells the heartbeat that a call runs in the loop, and the seconds that its
    caller gave it (None: none)."""

    def __init__(
        self,
        send: Send,
        core: Core,
        main: Callable[[], bool],
        seq: Callable[[int], int],
        version: Callable[[], str],
        digest: Callable[[], str],
        announce: Callable[[str, float | None], None],
    ) -> None:
        self._send, self._core, self._main, self._seq, self._version = send, core, main, seq, version
        self._digest, self._announce = digest, announce
        self._requests = MsgpackDecoder(EngineCoreRequest)
        self._plain = MsgpackDecoder()
        self._tokens: dict[int, bytes] = {}
        self._got: dict[int, int] = defaultdict(int)  # messages of the link that the token names

    def take(self, front: bytes, kind: bytes, rest: list[bytes]) -> None:
        client = int.from_bytes(front, "little")
        if kind != b"hello":
            self._got[client] += 1
        try:
            if kind == b"hello":
                self._hello(front, client, rest)
            elif kind == b"add" and len(rest) >= 2:
                self._add(client, rest[0], rest[1:])
            elif kind == b"abort" and rest:
                self._core.abort(msgspec.msgpack.decode(rest[0], type=list[str]))
            elif kind == b"util" and rest:
                _, call, method, args = self._plain.decode(rest)
                self._announce(f"call {method}", _said_s(method, args))
                self._core.utility((client, call, method, args))
        # A peer's bytes concern that message alone; vLLM's decoder raises whatever its hooks raise.
        except Exception as why:  # noqa: BLE001
            logger.warning("message_dropped", kind=repr(kind[:16]), front=client, why=repr(why))

    def _hello(self, front: bytes, client: int, rest: list[bytes]) -> None:
        token = rest[0] if rest else b""
        if token and self._tokens.get(client) != token:
            self._tokens[client], self._got[client] = token, 0
            dropped = self._core.drop(client)
            if dropped:
                logger.info("front_is_new", front=client, dropped=len(dropped))
        standing: dict[str, Any] = {"seq": self._seq(client), "weight_version": self._version()}
        standing["weights_digest"] = self._digest()
        if len(rest) > 1:
            standing |= {"got": self._got[client], "told": msgspec.msgpack.decode(rest[1], type=int)}
        ready = msgspec.msgpack.encode(self._core._make_ready_response())
        self._send([front, b"ready", ready, token, msgspec.msgpack.encode(standing)])

    def _add(self, client: int, prefix: bytes, frames: list[bytes]) -> None:
        try:
            request: EngineCoreRequest = self._requests.decode(frames)
            output = msgspec.msgpack.decode(prefix, type=list[int]) if prefix else []
        # As above; but the front waits for this one, so it gets an answer.
        except Exception as why:  # noqa: BLE001
            request_id = msgspec.msgpack.decode(frames[0], type=list[Any])[0]
            logger.warning("request_unreadable", request=request_id, front=client, why=repr(why))
            self._core.refuse_id(str(request_id), client)
            return
        request.client_index = client
        if not self._main():
            logger.warning("request_refused", request=request.request_id, why="this worker is not main")
            self._core.refuse(request)
            return
        self._core.add(request, output)


def _said_s(method: str, args: Any) -> float | None:
    """The timeout that a caller of /collective_rpc gave (its second argument): the engine does not keep it, so it says
    how long the call may take."""
    given = args[1] if method == "collective_rpc" and len(args) > 1 else None
    return float(given) if isinstance(given, int | float) and given > 0 else None
