"""Checkpoints without a sandbox, for tests of the store."""

from __future__ import annotations

import hashlib

from envkeeper.recipe import Recipe
from envkeeper.store import FORMAT, FileDigest, Manifest

RECIPE = Recipe(image_id="sha256:0", agent="/a", hostname="h", memory_mb=1, cpus=1.0, pids=1, env={})


def manifest_of(checkpoint_id: str, boundary: int, files: dict[str, FileDigest], made_at: float = 0.0) -> Manifest:
    return Manifest(
        format=FORMAT,
        checkpoint_id=checkpoint_id,
        sandbox_id="sb",
        incarnation="sb.1",
        boundary=boundary,
        context_digest=f"L{boundary}",
        parent="",
        made_at=made_at or float(boundary),
        recipe=RECIPE,
        nonce_sha256=hashlib.sha256(b"n").hexdigest(),
        stdio=("/dev/null", "pipe:[1]", "pipe:[2]"),
        versions={},
        files=files,
        upper_entries=0,
        frozen_ms=1.0,
    )
