"""The gate of the weights, part by part: each rank's must be sealed, of the one version, of the digest that it maps."""

from __future__ import annotations

import msgspec
import pytest

from belayer.errors import BelayerError, OwnerGone, WeightsBroken, WeightsTorn
from belayer.messages.owner import OwnerStatusReply, WeightsInfo
from belayer.messages.worker import WorkerState, WorkerStatusReply
from belayerd import weights_gate as gate


def part(rank: int, **changes: object) -> WeightsInfo:
    whole = WeightsInfo(
        model="m", state="sealed", version=3, nbytes=1, digest=f"digest {rank}", readers=(), load_ms=0.0,
        load_mb_s=0.0, owner_generation=1, rank=rank,
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


def owner(*weights: WeightsInfo) -> OwnerStatusReply:
    return OwnerStatusReply(kind="weights", pid=7, backend="memfd", owner_generation=1, weights=weights)


def worker(*digests: str, version: int = 3) -> WorkerStatusReply:
    return WorkerStatusReply(
        worker_id="w", slot="s", pid=1, state=WorkerState.STANDBY, weight_version=version, weights_digest=digests[0],
        rank_digests=digests[1:],
    )  # fmt: skip


def passes(status: OwnerStatusReply, candidate: WorkerStatusReply, *, held: bool = False) -> None:
    parts = gate.parts_of("m", status)
    gate.settled_or_refuse(parts, held=held)
    gate.same_or_refuse(parts, candidate)


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_weights_pass_in_whatever_order_the_owner_names_its_parts(ranks: int) -> None:
    parts = [part(rank) for rank in reversed(range(ranks))]
    passes(owner(part(0, model="other"), *parts), worker(*(f"digest {rank}" for rank in range(ranks))))


TWO = worker("digest 0", "digest 1")
FAULTS: list[tuple[str, OwnerStatusReply, WorkerStatusReply, type[BelayerError], str]] = [
    ("owner holds nothing", owner(), TWO, OwnerGone, "does not hold m"),
    ("torn rank", owner(part(0), part(1, state="torn")), TWO, WeightsTorn, "torn"),
    ("rank being written", owner(part(0), part(1, state="updating")), TWO, WeightsTorn, "updating"),
    ("rank of another version", owner(part(0), part(1, version=4)), TWO, WeightsTorn, "of versions 3, 4"),
    ("other digest of the leader", owner(part(0, digest="x"), part(1)), TWO, WeightsBroken, r"\(rank 0\).*holds 3"),
    ("other digest of the rank", owner(part(0), part(1, digest="x")), TWO, WeightsBroken, r"\(rank 1\).*holds 3"),
    ("one part only", owner(part(0)), TWO, WeightsBroken, r"maps 2 part\(s\).*holds 1"),
    ("one rank only", owner(part(0), part(1)), worker("digest 0"), WeightsBroken, r"maps 1 part\(s\).*holds 2"),
    ("both older", owner(part(0), part(1)), worker("digest 0", "digest 1", version=2), WeightsBroken, "version 2"),
]


@pytest.mark.parametrize(
    ("status", "candidate", "kind", "said"), [row[1:] for row in FAULTS], ids=[r[0] for r in FAULTS]
)
def test_each_part_that_is_not_whole_fails_the_gate(
    status: OwnerStatusReply, candidate: WorkerStatusReply, kind: type[BelayerError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        passes(status, candidate)


def test_an_open_update_is_waited_for_and_a_version_that_is_only_being_staged_is_not() -> None:
    with pytest.raises(WeightsTorn, match="is open"):
        passes(owner(part(0), part(1)), TWO, held=True)
    passes(owner(part(0, state="updating", staging=5), part(1, state="updating", staging=5)), TWO)
    passes(owner(part(0, state="updating", staging=5), part(1, state="updating")), TWO)  # rank 1: nothing written yet
    with pytest.raises(WeightsTorn, match="torn"):
        passes(owner(part(0, state="updating", staging=5), part(1, state="torn")), TWO)


def test_one_row_for_all_parts_is_sealed_when_each_is_and_has_the_writer_of_any() -> None:
    assert gate.together((part(0), part(1))) == part(0)
    torn = part(1, state="torn", reason="r")
    assert gate.together((part(0), torn)) == torn
    assert gate.together((part(0), part(1, writer="t"))).writer == "t"
