"""``belayer_*`` of the host's memory on the router's /metrics: what the owners hold, for whom, and what workers cost.

Read when scraped from the status file that belayerd replaces once a second: the router asks nobody, and a belayerd
that is down shows as an age that grows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from belayer import statefile
from belayer.clock import wall
from belayer.messages.control import HostStatusReply, SlotView
from belayer.messages.owner import OwnerStatusReply

# metric -> what it says, its labels; each row below fills one of them
_GAUGES: dict[str, tuple[str, list[str]]] = {
    "belayer_status_age_seconds": ("Since belayerd last wrote its status", []),
    "belayer_owner_generation": ("Lives of an owner", ["kind"]),
    "belayer_owner_outlived": ("1 while copies of the owner's descriptors would outlive its kill", ["kind"]),
    "belayer_owner_lost": ("Things that died with the owner's last life", ["kind"]),
    "belayer_memory_bytes": ("Size of an allocation", ["kind", "name", "rank"]),
    "belayer_memory_resident_bytes": ("Bytes of an allocation that exist", ["kind", "name", "rank"]),
    "belayer_memory_staging_bytes": ("Bytes of a next version beside the last one", ["kind", "name", "rank"]),
    "belayer_memory_holders": ("Readers of weights, or 1 while an arena is held", ["kind", "name", "rank"]),
    "belayer_weights_version": ("Last sealed version", ["name", "rank"]),
    "belayer_weights_old_readers": ("Readers that have not left an earlier version", ["name", "rank"]),
    "belayer_arena_epoch": ("Leases of an arena", ["name", "rank"]),
    "belayer_worker_mapped_bytes": ("All that a worker maps and that exists", ["slot", "role"]),
    "belayer_worker_share_bytes": ("A worker's fair share of what it maps with others (PSS)", ["slot", "role"]),
    "belayer_worker_looked_at": ("1 when the memory of a worker was read; before, it has no figures", ["slot", "role"]),
    "belayer_worker_private_bytes": ("What would be free again without a worker", ["slot", "role"]),
}

Row = tuple[str, list[str], float]
_MIB = 2**20


class HostMetrics(Collector):
    """A collector in prometheus-client's default registry. ``status``: belayerd's file."""

    def __init__(self, status: Path) -> None:
        self._status = status
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        found: HostStatusReply | None = statefile.load(self._status, HostStatusReply)
        if found is None:
            return
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _GAUGES.items()}
        for name, labels, value in rows(found, wall()):
            families[name].add_metric(labels, value)
        yield from families.values()


def rows(status: HostStatusReply, now: float) -> Iterator[Row]:
    """(metric, label values, value) of everything that the status tells."""
    yield "belayer_status_age_seconds", [], max(0.0, now - status.at)
    for owner in status.owners:
        yield from _owner(owner)
    for slot in status.slots:
        yield from _workers(slot)


def _owner(owner: OwnerStatusReply) -> Iterator[Row]:
    yield "belayer_owner_generation", [owner.kind], owner.owner_generation
    yield "belayer_owner_outlived", [owner.kind], float(bool(owner.store))
    yield "belayer_owner_lost", [owner.kind], len(owner.lost)
    for model in owner.weights:
        name = [model.model, str(model.rank)]
        yield from _memory(owner.kind, name, model.nbytes, model.resident, len(model.readers))
        yield "belayer_memory_staging_bytes", [owner.kind, *name], model.staging
        yield "belayer_weights_version", name, model.version
        yield "belayer_weights_old_readers", name, sum(row.version != model.version for row in model.readers)
    for arena in owner.arenas:
        name = [arena.slot, str(arena.rank)]
        yield from _memory(owner.kind, name, arena.nbytes, arena.resident, int(arena.holder_alive))
        yield "belayer_arena_epoch", name, arena.epoch


def _memory(kind: str, name: list[str], nbytes: int, resident: int, holders: int) -> Iterator[Row]:
    yield "belayer_memory_bytes", [kind, *name], nbytes
    yield "belayer_memory_resident_bytes", [kind, *name], resident
    yield "belayer_memory_holders", [kind, *name], holders


def _workers(slot: SlotView) -> Iterator[Row]:
    for worker in slot.workers:
        where = [slot.slot, worker.role]
        yield "belayer_worker_looked_at", where, float(bool(worker.mapped_mb))  # 0: its figures are not known yet
        if worker.mapped_mb:
            yield "belayer_worker_mapped_bytes", where, worker.mapped_mb * _MIB
            yield "belayer_worker_share_bytes", where, worker.pss_mb * _MIB
            yield "belayer_worker_private_bytes", where, worker.private_mb * _MIB
