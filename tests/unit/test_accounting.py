"""``belayerctl owners``: whose memory it is and what a shadow costs, from the ledger and the kernel, on 80 columns."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from rich.console import Console

from belayer.messages import owner as o
from belayer.messages.control import HostStatusReply, SlotView, WorkerView
from belayerctl import accounting, render
from belayerd.footprint import look

MIB = 2**20


def worker(role: str, mapped_mb: float, pss_mb: float, private_mb: float) -> WorkerView:
    return WorkerView(
        worker_id=f"rollout-0-{role[0]}234abcd", pid=123456, role=role, state="S", mapped_mb=mapped_mb, pss_mb=pss_mb,
        private_mb=private_mb,
    )  # fmt: skip


def host() -> HostStatusReply:
    readers = (
        o.ReaderInfo(who="rollout-0-m234abcd", pid=1, version=7),
        o.ReaderInfo(who="rollout-0-s234abcd", pid=2, version=6),
    )
    weights = o.WeightsInfo(
        model="qwen3-8b-instruct", state="updating", version=7, nbytes=16000 * MIB, resident=16000 * MIB,
        staging=9000 * MIB, digest="0123456789abcdef", readers=readers,
    )  # fmt: skip
    arena = o.ArenaInfo(
        slot="rollout-0", state="leased", epoch=1048576, nbytes=4096 * MIB, resident=1000 * MIB,
        holder="rollout-0-m234abcd",
    )  # fmt: skip
    slot = SlotView(
        slot="rollout-0", state="protected", generation=3, protected=True, model="qwen3-8b-instruct", device="cpu",
        weight_version=7, handovers=2,
        workers=(
            worker("main", 18000, 9500, 700),
            worker("shadow", 17000, 8300, 300),
        ),
    )  # fmt: skip
    owner = o.OwnerStatusReply(kind="weights", pid=4242, owner_generation=2, backend="memfd", connections=3)
    return HostStatusReply(
        host="node-17", pid=1, instance="i", at=0.0, slots=(slot,), router="up", router_url="http://10.0.0.17:8000",
        owners=(
            msgspec.structs.replace(owner, weights=(weights,), store="holder pid 999"),
            msgspec.structs.replace(
                owner, kind="kv", owner_generation=5, arenas=(arena, msgspec.structs.replace(arena, rank=1)),
                store_reason="the holder has ended", lost=("arena rollout-1: its memory died with the last owner",),
            ),
        ),
    )  # fmt: skip


def shown(status: HostStatusReply | None = None) -> list[str]:
    console = Console(width=80, no_color=True, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render.owners(status or host()))
    return console.export_text().splitlines()


def test_what_a_shadow_costs_is_what_would_be_free_without_it() -> None:
    (cost,) = accounting.shadow_costs(host())
    assert (cost.shadow, cost.second_engine) == (300, 17000 + 2 * 1000)


def test_every_allocation_has_its_holders_and_old_readers() -> None:
    weights, first, second = accounting.held(host())
    assert (weights.count, weights.old) == ("v7 012345", ("rollout-0-s234abcd v6",))
    assert (first.rank, second.rank) == (0, 1)
    assert first.holders == ("rollout-0-m234abcd",)


def test_it_can_be_read_on_80_columns() -> None:
    lines = shown()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for said in (
        "weights 4242 2 3 holder pid 999",
        "kv 4242 5 3 nothing: the holder has ended",
        "lost: arena rollout-1: its memory died with the last owner",
        "qwen3-8b-instruct updating v7 012345 16000/16000+9000 2 readers",
        "rollout-0-s234abcd v6 of qwen3-8b-instruct is an old version",
        "rollout-0/1 leased e1048576 1000/4096 rollout-0-m234abcd",
        "its shadow costs 300 MiB; a second full engine would cost 19000",
    ):
        assert said in text, f"{said!r} is not in\n" + "\n".join(lines)


def test_memory_of_a_gpu_is_named_and_no_cost_is_made_up_for_it() -> None:
    seen = host()
    owners = tuple(msgspec.structs.replace(owner, backend="cuda_vmm") for owner in seen.owners)
    slots = tuple(msgspec.structs.replace(slot, device="gpu") for slot in seen.slots)
    lines = shown(msgspec.structs.replace(seen, owners=owners, slots=slots))
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "weights (cuda_vmm) 4242 2 3 holder pid 999" in text
    assert "qwen3-8b-instruct updating v7 012345 16000/16000+9000 2 readers" in text
    assert "its shadow costs" not in text


def test_a_footprint_is_what_the_kernel_says(tmp_path: Path) -> None:
    """Private memory of this process grows by what it writes; a process that has ended has none."""
    before = look(os.getpid())
    block = bytearray(os.urandom(32 * MIB))
    after = look(os.getpid())
    assert before is not None
    assert after is not None
    assert after.private - before.private >= 30 * 1024
    assert after.private <= after.pss <= after.rss
    del block
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert look(pid) is None
