"""Values that each key may have and that make no sense together, or on any machine. Pure; part of ``config.load``."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from belayer.config import Config

Problem = tuple[str, str]  # key, reason

_LONGEST_S = 366 * 86400.0  # of a bound in seconds; timers of the kernel take no infinity, and nobody waits that long
_EVERY = frozenset({"0.0.0.0", "*", "[::]", "::"})  # addresses that stand for all


def problems(config: Config) -> Iterator[Problem]:
    for name in config.__struct_fields__:
        value = getattr(config, name)
        rows = value if isinstance(value, tuple) else (value,)
        for index, row in enumerate(rows):
            yield from _seconds(f"{name}[{index}]" if isinstance(value, tuple) else name, row)
    yield from _addresses(config)
    for index, slot in enumerate(config.slot):
        if slot.max_num_batched_tokens < slot.max_num_seqs:
            yield (
                f"slot[{index}].max_num_batched_tokens",
                f"{slot.max_num_batched_tokens} must not be below max_num_seqs = {slot.max_num_seqs}: "
                "in one step each running request computes a token",
            )


def _seconds(where: str, row: msgspec.Struct) -> Iterator[Problem]:
    for key in row.__struct_fields__:
        value: Any = getattr(row, key)
        if isinstance(value, float) and not (math.isfinite(value) and value <= _LONGEST_S):
            yield f"{where}.{key}", f"{value:g} is not a number up to {_LONGEST_S:.0f} (366 days)"


def _addresses(config: Config) -> Iterator[Problem]:
    host = config.router.host
    if not is_host(host):
        yield "router.host", f"{host!r} is neither an IP address of this host nor localhost"
    for index, slot in enumerate(config.slot):
        if config.fleet.listen and slot.url_port and meet(config.fleet.listen, f"{host}:{slot.url_port}"):
            yield f"slot[{index}].url_port", f"{slot.url_port} is the port of the fleet (fleet.listen)"


def is_host(text: str) -> bool:
    """Whether the router can listen there and knows whether others can reach it."""
    if text == "localhost":
        return True
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def meet(one: str, other: str) -> bool:
    """True when two sockets cannot both be bound: one port, and one address or one that stands for all."""
    (host, _, port), (host2, _, port2) = one.rpartition(":"), other.rpartition(":")
    return port == port2 and (host == host2 or not {host, host2}.isdisjoint(_EVERY))
