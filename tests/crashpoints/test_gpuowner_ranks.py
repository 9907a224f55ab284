"""The parts of a model that lies in several: adopted, lost and numbered over the lives of the owner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer import statefile
from belayer.errors import WeightsTorn
from belayer.messages import owner as m
from gpuowner import core, recipes
from gpuowner.keeping import Caller
from gpuowner.recipe import Param, Piece, Recipe
from gpuowner.safetensors_file import read_model
from gpuowner.store import end_holder
from gpuowner.vault import Vault
from gpuowner.version import IN_PLACE, Source
from tests.support.owner_deaths import SIZE, Place, Tell, nothing_leaks
from tests.support.owners import tiny_model


def test_ranks_of_a_model_are_allocations_of_their_own(places: Callable[[], Place], tmp_path: Path) -> None:
    """Each rank has its memory, version and writer; all are adopted, and what is lost is known rank by rank."""
    source = Source(tiny_model(tmp_path / "m", 1, SIZE), "float32", IN_PLACE)
    place = places()
    place.sources = {"m": source}

    def life(vault: Vault, tell: Tell) -> None:
        for rank in (0, 1):
            vault.models.load("m", rank, source, lambda done, of, rate: None)
        by = Caller(peer=1, who="trainer", pid=os.getpid(), pidfd=-1)
        begin = m.BeginUpdate(model="m", rank=1, from_version=1, owner_generation=vault.generation)
        vault.models.begin(begin, by)
        tell("updating")

    assert place.live(0, life) == (False, ["updating"])
    vault, store = place.revived()
    states = {key: entry.weights.state.value for key, entry in vault.models.entries.items()}
    assert states == {("m", 0): "sealed", ("m", 1): "torn"}
    grant, fd = vault.models.attach("m", 0, Caller(1, "w", os.getpid(), -1))
    os.close(fd)
    assert grant.rank == 0
    with pytest.raises(WeightsTorn):
        vault.models.attach("m", 1, Caller(1, "w", os.getpid(), -1))
    nothing_leaks(place, vault, store)
    end_holder(place.holder)
    for entry in vault.models.entries.values():
        assert entry.version is not None
        entry.version.memory.close()
    vault, store = place.revived()
    assert {key: row.from_files for key, row in vault.to_load.items()} == {("m", 0): True, ("m", 1): False}
    assert len(vault.lost) == 1, "the torn rank cannot be loaded again as if nothing had happened"
    store.close()


def test_other_parts_of_unchanged_files_keep_their_version(places: Callable[[], Place], tmp_path: Path) -> None:
    """tensor_parallel raised, lowered, and raised over other files: one number for all parts, and another one for other
    bytes only. A death between the parts changes nothing of it."""
    folder, kept, place = tmp_path / "m", tmp_path / "kept", places()
    kept.mkdir()

    def written(seed: int) -> None:
        tiny_model(folder, seed, SIZE)
        tensors = read_model(folder)
        for rank in (0, 1):  # a half each, as it would be vLLM's to say
            count = SIZE // 4 // 2
            piece = Piece("w", "w", (count,), rank * count, (1,), 0, (1,))
            half = Recipe(params=(Param("w", (count,)),), pieces=(piece,))
            statefile.save(recipes.answer_path(folder, tensors, "float32", kept, rank, 2), half)

    def reborn(ranks: int, loads: int) -> dict[int, tuple[int, str]]:
        """Number and digest of each part, in a life that asks for ``ranks`` of them and loads ``loads``."""
        source = Source(folder, "float32", IN_PLACE, ranks=ranks, kept=kept)
        place.sources = {"m": source}
        vault, store = place.revived()
        for rank in range(loads):
            if ("m", rank) not in vault.models.entries:
                vault.models.load("m", rank, source, lambda done, of, rate: None, vault.to_load.get(("m", rank)))
        vault.keeping.save()
        found = {rank: entry.weights.version for (_, rank), entry in vault.models.entries.items()}
        said = {rank: (number, vault.models.entries["m", rank].info().digest) for rank, number in found.items()}
        for entry in vault.models.entries.values():
            assert entry.weights.state is core.WeightsState.SEALED
            assert entry.version is not None
            entry.version.memory.close()
        store.close()
        return said

    written(seed=1)
    one = reborn(ranks=1, loads=1)
    assert {number for number, _ in one.values()} == {1}
    assert set(reborn(ranks=2, loads=1)) == {0}, "this life ends between the two parts"
    two = reborn(ranks=2, loads=2)
    assert {rank: number for rank, (number, _) in two.items()} == {0: 1, 1: 1}
    assert len({digest for _, digest in (*one.values(), *two.values())}) == 3
    assert reborn(ranks=1, loads=1) == one
    written(seed=2)
    other = reborn(ranks=2, loads=2)
    assert {rank: number for rank, (number, _) in other.items()} == {0: 2, 1: 2}
    assert reborn(ranks=1, loads=1)[0][0] == 2
