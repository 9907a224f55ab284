"""After a dump that hung, no other of that sandbox for a while (the paper's cooldown): under heavy load another attempt
would only add to it, and a sandbox that cannot be dumped would be frozen up to the deadline again and again."""

from __future__ import annotations

import threading

from belayer.clock import monotonic
from belayer.errors import CheckpointIncomplete

COOLDOWN_S = 20.0


class Rests:
    """Sandbox id -> when it may be dumped again. For several threads."""

    def __init__(self, cooldown_s: float = COOLDOWN_S) -> None:
        self._cooldown_s, self._until, self._lock = cooldown_s, dict[str, float](), threading.Lock()

    def begin(self, sandbox_id: str) -> None:
        with self._lock:
            self._until[sandbox_id] = monotonic() + self._cooldown_s

    def check(self, sandbox_id: str) -> None:
        """Raises CheckpointIncomplete while it rests: nothing is known against the sandbox."""
        with self._lock:
            left = self._until.get(sandbox_id, 0.0) - monotonic()
            if left <= 0:
                self._until.pop(sandbox_id, None)
                return
        raise CheckpointIncomplete(
            f"the last dump of {sandbox_id} hung: no other for {left:.0f} s",
            kept="the sandbox runs on and the previous checkpoint stays READY",
            remedy="checkpoint again after that",
        )
