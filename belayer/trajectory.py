"""The digest that ties an LLM context to a sandbox boundary (paper section 2: the prefix (L_k, E_k))."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec


def context_digest(messages: Sequence[Any]) -> str:
    """sha256 (hex) over the MessagePack of a list of messages: strings, numbers, lists and string-keyed maps.

    Keys are sorted, so that two equal contexts have one digest whatever order their maps were built in.
    """
    data = msgspec.msgpack.Encoder(order="deterministic").encode(list(messages))
    return hashlib.sha256(data).hexdigest()
