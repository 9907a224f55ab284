"""What became of a model's tensors in one engine: views of the owner's memory, and named private copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Copied:
    """A tensor that this engine holds privately, ``nbytes`` as it lies in the owner's memory."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Bound:
    """What became of the model's tensors: ``views`` of the owner's memory, and the copies. ``packed_bytes``: of views
    that are held in a packed form too."""

    views: int
    view_bytes: int
    copies: tuple[Copied, ...]
    packed_bytes: int = 0

    def say(self) -> dict[str, Any]:
        return {
            "views": self.views,
            "view_mb": round(self.view_bytes / 1e6, 1),
            "copies": [f"{row.name} ({row.why})" for row in self.copies],
            "copy_mb": round(sum(row.nbytes for row in self.copies) / 1e6, 1),
            "packed_mb": round(self.packed_bytes / 1e6, 1),
        }
