"""What memory a host's owners hold, for whom, and what one more shadow costs. Pure: from belayerd's status.

Bytes of weights and arenas are the owners' own ledger; what a worker costs beside them is what the kernel says of it
(belayerd reads smaps_rollup). A second full engine is what the shadow maps in all, plus an arena as full as the main's:
what it would take if nothing of it were shared.
"""

from __future__ import annotations

import msgspec

from belayer.messages.control import HostStatusReply, SlotView, WorkerView


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation. ``kind``: "weights" or "kv". ``count``: version and digest, or epoch. ``resident``: bytes of it
    that exist; ``staging``: bytes of a next version beside it; ``old``: readers that have not left an earlier one."""

    kind: str
    name: str
    rank: int
    state: str
    count: str
    nbytes: int
    resident: int
    staging: int = 0
    holders: tuple[str, ...] = ()
    old: tuple[str, ...] = ()


class ShadowCost(msgspec.Struct, frozen=True, kw_only=True):
    """MiB; ``shadow``: free again without it. ``second_engine``: without anything shared. 0 before belayerd looked."""

    slot: str
    shadow: float
    second_engine: float


def held(status: HostStatusReply) -> tuple[Held, ...]:
    rows = []
    for owner in status.owners:
        for model in owner.weights:
            old = tuple(f"{row.who} v{row.version}" for row in model.readers if row.version != model.version)
            rows.append(
                Held(
                    kind=owner.kind, name=model.model, rank=model.rank, state=model.state,
                    count=f"v{model.version} {model.digest[:6]}", nbytes=model.nbytes, resident=model.resident,
                    staging=model.staging, holders=tuple(row.who for row in model.readers), old=old,
                )
            )  # fmt: skip
        for arena in owner.arenas:
            rows.append(
                Held(
                    kind=owner.kind, name=arena.slot, rank=arena.rank, state=arena.state, count=f"e{arena.epoch}",
                    nbytes=arena.nbytes, resident=arena.resident, holders=(arena.holder,) if arena.holder else (),
                )
            )  # fmt: skip
    return tuple(rows)


def shadow_costs(status: HostStatusReply) -> tuple[ShadowCost, ...]:
    """One row for each slot on a CPU whose shadow was looked at: the kernel counts no memory of a GPU."""
    arenas = {slot.slot: 0.0 for slot in status.slots}
    for row in held(status):
        if row.kind == "kv" and row.name in arenas:
            arenas[row.name] += row.resident / 2**20
    return tuple(
        ShadowCost(slot=slot.slot, shadow=worker.private_mb, second_engine=worker.mapped_mb + arenas[slot.slot])
        for slot in status.slots
        for worker in shadows(slot)
        if worker.mapped_mb and slot.device == "cpu"
    )


def shadows(slot: SlotView) -> tuple[WorkerView, ...]:
    return tuple(worker for worker in slot.workers if worker.role == "shadow")
