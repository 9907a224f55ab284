"""How much of the time this process listened: silence of others counts for no longer than that. Pure.

A router that was stopped, or whose host stood still, wakes to answers that wait unread. The clock says that all others
were silent; what is true is that nobody listened.
"""

from __future__ import annotations


class Attention:
    """``gap_s``: how much of the time between two looks counts at most. A slow listener is late, and not deaf."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._looked_at: float | None = None

    def missed(self, now: float) -> float:
        """Seconds since the last look in which nobody listened; call it before anything that was heard is taken in."""
        before, self._looked_at = self._looked_at, now
        return 0.0 if before is None else max(0.0, now - before - self._gap_s)
