"""The only encode and decode: plain MessagePack, typed by msgspec, capped in size.

Unknown fields are ignored here (a newer peer may send more) and refused in configuration (belayer.config).
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from belayer.errors import BadMessage

MAX_MESSAGE = 16 << 20  # bytes; the largest real message is a layout of some thousand tensors (~1 MiB)

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes one type or tagged union; anything else is a BadMessage that names the reason."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes) -> T:
        if len(data) > MAX_MESSAGE:
            raise BadMessage(f"message of {len(data)} bytes is over the cap of {MAX_MESSAGE}")
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as why:
            raise BadMessage(f"not a message of this socket: {why}") from why
