"""Handover step 2, "owners": are the weights that a candidate maps those that the owner holds, in every part? Pure."""

from __future__ import annotations

import msgspec

from belayer.errors import OwnerGone, WeightsBroken, WeightsTorn
from belayer.messages.owner import OwnerStatusReply, WeightsInfo
from belayer.messages.worker import WorkerStatusReply

Parts = tuple[WeightsInfo, ...]


def parts_of(model: str, owner: OwnerStatusReply) -> Parts:
    """One for each tensor-parallel rank, in order. Raises OwnerGone, and WeightsTorn when they are not of one
    version."""
    parts = tuple(sorted((row for row in owner.weights if row.model == model), key=lambda row: row.rank))
    if not parts:
        raise OwnerGone(f"the weights owner (pid {owner.pid}) does not hold {model}")
    versions = sorted({part.version for part in parts})
    if len(versions) > 1:
        raise WeightsTorn(
            f"the parts of {model} are of versions {', '.join(map(str, versions))}", remedy="publish the weights again"
        )
    return parts


def together(parts: Parts) -> WeightsInfo:
    """One row for all: sealed when every part is, written while one is."""
    row = next((part for part in parts if part.state != "sealed"), parts[0])
    return msgspec.structs.replace(row, writer=next((part.writer for part in parts if part.writer), ""))


def settled_or_refuse(parts: Parts, *, held: bool) -> None:
    """Raises WeightsTorn while a part is written in place, or torn: the next sealed version is waited for; requests
    wait within their bound. ``held``: an update of the model is open."""
    whole = {"sealed", "updating"} if any(part.staging for part in parts) else {"sealed"}  # written beside them
    unsettled = [part for part in parts if part.state not in whole]
    if held or unsettled:
        state = unsettled[0].state if unsettled else parts[0].state
        raise WeightsTorn(f"an update of {parts[0].model} is open ({state})", remedy="end the update, or publish again")


def same_or_refuse(parts: Parts, worker: WorkerStatusReply) -> None:
    """Raises WeightsBroken naming the part that a rank maps otherwise than the owner holds it."""
    mapped = (worker.weights_digest, *worker.rank_digests)
    if len(mapped) != len(parts):
        raise WeightsBroken(
            f"{worker.worker_id} maps {len(mapped)} part(s) of the weights, the owner holds {len(parts)}"
        )
    for part, digest in zip(parts, mapped, strict=True):
        if digest != part.digest or worker.weight_version != part.version:
            rank = f" (rank {part.rank})" if len(parts) > 1 else ""
            raise WeightsBroken(
                f"{worker.worker_id}{rank} maps version {worker.weight_version} ({digest[:12]}), "
                f"the owner holds {part.version} ({part.digest[:12]})"
            )
