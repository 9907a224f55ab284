"""Asking and breaking a host with one slot of two tensor-parallel ranks: who is who, what each rank holds and maps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from belayer import procs
from belayer.localhost import LocalHost
from belayer.messages import owner as o
from belayer.messages.control import HostStatusReply, SlotView
from belayer.seqpacket import SeqClient
from gpuowner.loader import load
from tests.support.wait import eventually


def view_of(status: HostStatusReply) -> SlotView:
    (view,) = status.slots
    return view


def leader(view: SlotView, role: str = "main") -> tuple[str, int]:
    """Worker id and pid."""
    return next((worker.worker_id, worker.pid) for worker in view.workers if worker.role == role)


def rank_of(pid: int) -> int:
    """The process of rank 1: the leader's first child, which was forked before any other."""
    return procs.children(pid)[0]


def group_of(host: LocalHost, worker: str, pid: int) -> set[int]:
    cgroups = procs.Cgroups(procs.tag_of(host.paths.run))
    return set(cgroups.pids(worker) if cgroups.base is not None else procs.session_pids(pid))


def arenas(host: LocalHost) -> list[o.ArenaInfo]:
    client = SeqClient(host.paths.owner_sock("kv"))
    try:
        return sorted(client.call(o.OwnerStatus(), o.OwnerStatusReply)[0].arenas, key=lambda row: row.rank)
    finally:
        client.close()


def descriptors(host: LocalHost) -> int:
    """Of the owners, which hold the memory, the pidfds and the connections of every rank."""
    return sum(len(os.listdir(f"/proc/{host.pid(name)}/fd")) for name in ("gpuowner@weights", "gpuowner@kv"))


def send(pid: int, number: signal.Signals) -> None:
    """The fault, and its proof."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        if number is signal.SIGKILL:
            eventually(lambda: procs.is_dead(pidfd), what=f"death of {pid}")
        else:
            eventually(lambda: procs.state(pid) in ("T", "", "Z"), what=f"{pid} is stopped", every=0.001)
    finally:
        os.close(pidfd)


def weights(host: LocalHost) -> list[o.WeightsInfo]:
    """The parts, in order; they are never of different versions."""
    client = SeqClient(host.paths.owner_sock("weights"))
    try:
        rows = sorted(client.call(o.OwnerStatus(), o.OwnerStatusReply)[0].weights, key=lambda row: row.rank)
    finally:
        client.close()
    assert len({(row.state, row.version) for row in rows}) == 1, rows
    return rows


def read(rows: list[o.WeightsInfo]) -> dict[tuple[int, int], int]:
    """By rank and pid, the version that a process maps, of its part."""
    return {(row.rank, reader.pid): reader.version for row in rows for reader in row.readers}


def all_follow(host: LocalHost, version: int) -> HostStatusReply:
    """Every rank of main and shadow maps ``version``, and nothing is paused."""

    def fact(status: HostStatusReply) -> bool:
        view = view_of(status)
        mapped = read([row for owner in status.owners for row in owner.weights])
        groups = [[worker.pid, *(rank.pid for rank in worker.ranks)] for worker in view.workers]
        followed = [mapped.get((rank, pid)) for group in groups for rank, pid in enumerate(group)]
        going = view.protected and all(worker.phase != "paused" for worker in view.workers)
        return going and view.weight_version == version and followed == [version] * 4

    return host.until(f"all ranks at v{version}", fact, 240.0)


def laid_out(host: LocalHost, folder: Path) -> list[str]:
    """Digests of both parts of a folder, loaded here."""
    digests = []
    for rank in (0, 1):
        kept = host.paths.state / "recipes"
        loaded = load("parts", folder, "float32", lambda *_: None, kept=kept, rank=rank, ranks=2, seal=False)
        digests.append(loaded.digest)
        loaded.mapping.close()
        loaded.memory.close()
    return digests
