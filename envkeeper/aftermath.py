"""What a restored sandbox must be told about, because no image of it can carry it. Pure.

A faithful restore may still resume a run whose state, assumptions and effects never were together (the five failure
modes of rollback). State that would be incomplete or of two instants is refused at the checkpoint; an action whose fate
is unknown is never replayed. What is left belongs into the restore's record, for the caller to judge: the clock, which
jumped; credentials, which may have expired meanwhile; a tag that names another image now; and effects outside of the
sandbox, which happened after the boundary and are not undone.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from envkeeper.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Aftermath:
    """``clock_gap_s``: wall seconds between the capture and now. ``stale``: ``kind: sentence`` each."""

    clock_gap_s: float
    stale: tuple[str, ...]


def judge(
    recipe: Recipe, *, captured_at: float, boundary: int, lost_at: int, now: float, image_now: str | None
) -> Aftermath:
    """``boundary``: the one that is served again; ``lost_at``: the last that was committed. ``image_now``: the id that
    the recipe's image name has now, "" when it has none, None when Docker does not say."""
    stale = [f"expired_credential: {name} expired {now - end:.0f} s ago" for name, end in _ends(recipe) if end <= now]
    if recipe.image and image_now is None:
        stale.append(f"unknown_image: Docker does not say what {recipe.image} names now")
    elif recipe.image and image_now != recipe.image_id:
        what = f"names {image_now} now" if image_now else "is gone"
        stale.append(f"changed_image: {recipe.image} {what}; restored from {recipe.image_id}, as captured")
    if recipe.allow:
        reach = ", ".join(recipe.allow)
        stale.append(
            f"outside_effects: what actions after {boundary}, up to {lost_at} and the one in flight, did at {reach} "
            "is not undone"
        )
    return Aftermath(round(max(0.0, now - captured_at), 3), tuple(stale))


def _ends(recipe: Recipe) -> list[tuple[str, float]]:
    """(name, end in seconds of the epoch) of the variables that hold a JSON Web Token with an expiry (RFC 7519)."""
    found = ((name, _expiry(value)) for name, value in sorted(recipe.env.items()))
    return [(name, end) for name, end in found if end is not None]


def _expiry(value: str) -> float | None:
    parts = value.removeprefix("Bearer ").split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):  # three words with dots, but no token
        return None
    end = claims.get("exp") if isinstance(claims, dict) else None
    return float(end) if isinstance(end, int | float) else None
