"""A model that lies in several parts, one for each tensor-parallel rank, has one version. Pure.

All parts begin, end and give up an update by the same event, in one step that either all of them take or none; the
ledger that names the outcome is one file, written once. So the commit of a version is one rename(2), however many
parts it has: before it every part is the last version (or torn, in place), after it every part is the next one. What
can still come apart comes apart when a life of the owner begins (memory of one part lost, bytes that differ from their
digests, files changed meanwhile): then the model is torn as a whole, and is published again as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from belayer.errors import Refused, WeightsTorn
from gpuowner import core
from gpuowner.core import Weights, WeightsState


def step(parts: Sequence[Weights], event: core.WeightsEvent) -> tuple[Weights, ...]:
    """All parts after ``event``. Raises as ``core.weights_step`` of the first that refuses, none of them stepped."""
    return tuple(core.weights_step(part, event) for part in parts)


def levelled(parts: Sequence[Weights]) -> tuple[Weights, ...]:
    """The parts of a model that was adopted or loaded, in order of rank: as they are, or torn as one."""
    version = max(part.version for part in parts)
    why = _apart(parts)
    if not why:
        return tuple(parts)
    event = core.SiblingTorn(version=version, reason=why)
    return tuple(
        part if part.state is WeightsState.TORN and part.version == version else core.weights_step(part, event)
        for part in parts
    )


def _apart(parts: Sequence[Weights]) -> str:
    torn = [(rank, part.reason) for rank, part in enumerate(parts) if part.state is WeightsState.TORN]
    if torn:
        rank, reason = torn[0]
        return f"the part of rank {rank} is torn" + (f": {reason}" if reason else "")
    versions = sorted({part.version for part in parts})
    return f"their parts are of versions {', '.join(map(str, versions))}" if len(versions) > 1 else ""


def readable(parts: Sequence[Weights]) -> None:
    """Raise WeightsTorn unless the bytes of every part are whole and of one version (promise R4): a reader of one part
    computes with all of them."""
    for part in parts:
        core.readable(part)
    why = _apart(parts)
    if why:
        raise WeightsTorn(f"weights of {parts[0].model}: {why}", remedy="publish a whole version first")


def writing(part: Weights, stamp: core.Stamp, peer: int) -> None:
    """Raise Fenced (a stale stamp) or Refused unless the update under way is that of connection ``peer``."""
    core.gate(f"next version of {part.model}", core.Stamp(part.owner, part.version + 1), stamp)
    if part.state is not WeightsState.UPDATING or part.peer != peer:
        raise Refused(f"weights of {part.model} are {part.state.value}: no update of this connection is open")
