"""Names of things, checked once at the border.

A worker id names one incarnation of a worker and is never used twice: everything that is keyed by it (endpoint,
heartbeat file, cgroup, log) can be swept once the worker has been seen dead.
"""

from __future__ import annotations

import re
import secrets
from typing import NewType

SlotName = NewType("SlotName", str)
WorkerId = NewType("WorkerId", str)
SandboxId = NewType("SandboxId", str)
CheckpointId = NewType("CheckpointId", str)

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,47}\Z")


def is_name(text: str) -> bool:
    """True for what may name a slot, model or sandbox: 1-48 of ``a-z 0-9 _ . -``, safe as a file name."""
    return _NAME.match(text) is not None


def new_worker_id(slot: str) -> WorkerId:
    return WorkerId(f"{slot}-{secrets.token_hex(4)}")


def new_sandbox_id() -> SandboxId:
    return SandboxId(f"sb-{secrets.token_hex(6)}")


def new_incident_id() -> str:
    return f"inc-{secrets.token_hex(4)}"


def slot_of(worker_id: str) -> SlotName:
    """The slot that a worker id was made for."""
    return SlotName(worker_id.rsplit("-", 1)[0])
