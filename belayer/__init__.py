"""Belayer's shared ground floor and client library.

Nothing here imports a daemon. Import arrows point down only (tests/unit/test_imports.py):
``belayer <- gpuowner <- belayerd.worker``, and belayerd, envkeeper and belayerctl each import belayer only.

Users need ``belayer.Sandbox``, ``belayer.Trajectory``, ``belayer.SandboxLost`` and ``belayer.Trainer``; they are looked
up on first use, so that ``import belayer`` in a daemon costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from belayer.errors import SandboxLost
    from belayer.rollout import Trajectory
    from belayer.sandbox import Sandbox
    from belayer.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Sandbox", "SandboxLost", "Trainer", "Trajectory", "__version__"]

_HOMES = {
    "Sandbox": "belayer.sandbox",
    "SandboxLost": "belayer.errors",
    "Trainer": "belayer.trainer",
    "Trajectory": "belayer.rollout",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'belayer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
