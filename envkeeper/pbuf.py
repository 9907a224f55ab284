"""The little of the protocol-buffers wire format that CRIU's RPC needs: varints and length-delimited fields.

Encoding rules: protobuf.dev "Encoding"; field numbers of CRIU's messages are in ``criu.py``. Pure.
"""

from __future__ import annotations

Value = int | bool | str | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class PbufError(ValueError):
    """Bytes that are no message."""


def varint(number: int) -> bytes:
    """Base-128, least significant group first; negative numbers as 64-bit two's complement."""
    number &= (1 << 64) - 1
    out = bytearray()
    while True:
        group, number = number & 0x7F, number >> 7
        if not number:
            out.append(group)
            return bytes(out)
        out.append(group | 0x80)


def encode(fields: list[tuple[int, Value]]) -> bytes:
    """Fields in the given order; a repeated field is given several times."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, str):
            value = value.encode()
        if isinstance(value, bytes):
            out += varint(number << 3 | _BYTES) + varint(len(value)) + value
        else:
            out += varint(number << 3 | _VARINT) + varint(int(value))
    return bytes(out)


def decode(data: bytes) -> dict[int, list[int | bytes]]:
    """All fields by number, in order. Raises PbufError on a torn message."""
    out: dict[int, list[int | bytes]] = {}
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _read_varint(data, at)
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            size = {_FIXED32: 4, _FIXED64: 8}.get(kind, -1)
            if size < 0:
                size, at = _read_varint(data, at)
            if at + size > len(data):
                raise PbufError(f"field {number} is cut short")
            value, at = data[at : at + size], at + size
        else:
            raise PbufError(f"field {number} has the unknown wire type {kind}")
        out.setdefault(number, []).append(value)
    return out


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise PbufError("a number is cut short")
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
