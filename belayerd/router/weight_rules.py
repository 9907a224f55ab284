"""Which weights may go on with tokens of others, and which are good enough for a new request (promise R4). Pure.

Versions that are numbers grow with each update. A trainer's own words have no order: only the same word is the same
weights, and nothing is known of the rest.
"""

from __future__ import annotations

from collections.abc import Collection


def continues(version: str, tokens_of: str) -> bool:
    """True when weights ``version`` are those that made the tokens, or newer ones."""
    if version.isdecimal() and tokens_of.isdecimal():
        return int(version) >= int(tokens_of)
    return version == tokens_of


def same_bytes(version: str, digest: str, other: str, other_digest: str) -> bool:
    """False when both are called by the same version, and the bytes of the other are not known to be those of the
    first. A first one whose digest is not known is like any."""
    return version != other or not version or not digest or digest == other_digest


def serves_new(version: str, serving: Collection[str], last: Collection[str]) -> bool:
    """True when another host's weights ``version`` are at least this host's newest. ``serving``: what its slots serve
    now; ``last``: what each of them serves or served last, so that a host whose newest slot is away falls back to
    nothing older. A host that never had weights takes all."""
    own = serving or last
    if not own:
        return True
    if all(one.isdecimal() for one in own):
        return version.isdecimal() and int(version) >= max(int(one) for one in (*own, *last) if one.isdecimal())
    return version in own
