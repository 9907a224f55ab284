"""A model that lies in two parts, over the lives of its owner: one version, of both parts or of none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer import statefile
from belayer.errors import Fenced, Refused, WeightsBroken, WeightsTorn
from belayer.messages import owner as m
from gpuowner import core, recipes
from gpuowner.digest import chunk_digests, root_digest
from gpuowner.keeping import Caller
from gpuowner.recipe import Param, Piece, Recipe
from gpuowner.safetensors_file import read_model
from gpuowner.store import HolderStore, end_holder
from gpuowner.vault import Vault
from gpuowner.version import IN_PLACE, SWAP, Job, Source
from gpuowner.vmem import MAP_SHARED, PROT_READ, PROT_WRITE, Mapping
from tests.support.owner_deaths import SIZE, Body, Place, Tell, every_death, nothing_leaks
from tests.support.owners import tiny_model

RANKS = (0, 1)
TRAINER = Caller(peer=1, who="trainer", pid=os.getpid(), pidfd=-1)


def in_halves(folder: Path, kept: Path, seed: int = 1) -> Path:
    """A model of one tensor, half of it in each part, as it would be vLLM's to say."""
    tiny_model(folder, seed, SIZE)
    tensors = read_model(folder)
    kept.mkdir(exist_ok=True)
    count = SIZE // 4 // 2
    for rank in RANKS:
        piece = Piece("w", "w", (count,), rank * count, (1,), 0, (1,))
        half = Recipe(params=(Param("w", (count,)),), pieces=(piece,))
        statefile.save(recipes.answer_path(folder, tensors, "float32", kept, rank, 2), half)
    return folder


def halves(root: Path, mode: str) -> Source:
    return Source(in_halves(root / "m", root / "kept"), "float32", mode, ranks=2, kept=root / "kept")


def no_progress(*_: object) -> None:
    pass


def load(vault: Vault, source: Source) -> None:
    for rank in RANKS:
        if ("m", rank) not in vault.models.entries:
            vault.models.load("m", rank, source, no_progress, vault.to_load.get(("m", rank)))


def run(job: Job) -> m.WeightsInfo:
    return job.finish(job.work())


def states(vault: Vault) -> set[str]:
    """One, or the parts have come apart."""
    return {f"{part.weights.state.value} {part.weights.version}" for part in vault.models.parts("m")}


def begin(vault: Vault, version: int, mode: str, ranks: tuple[int, ...] = RANKS) -> list[m.UpdateGrant]:
    """An update over ``version``, with one byte of each of ``ranks`` written."""
    asked = m.BeginUpdate(model="m", from_version=version, owner_generation=vault.generation, mode=mode, whole=True)
    granted = [vault.models.begin(asked, TRAINER)]
    part = m.UpdatePart(model="m", version=version + 1, owner_generation=vault.generation, rank=1)
    granted.append(vault.models.part(part, TRAINER))
    for grant, fds in granted:
        if grant.rank in ranks:
            mapping = Mapping(fds[0], grant.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED)
            mapping.buffer()[5] ^= 1 + version
            mapping.close()
        for fd in fds:
            os.close(fd)
    return [grant for grant, _ in granted]


def said(vault: Vault, grants: list[m.UpdateGrant]) -> m.CommitUpdate:
    """A commit that tells the truth about what was written."""
    digests = []
    for part, grant in zip(vault.models.parts("m"), grants, strict=True):
        target = part.next or part.version
        assert target is not None
        fd = target.memory.reader_fd()
        mapping = Mapping(fd, grant.nbytes, PROT_READ, MAP_SHARED)
        chunks = tuple(chunk_digests(mapping.buffer()))
        mapping.close()
        os.close(fd)
        digests.append(m.PartDigests(chunk_digests=chunks, digest=root_digest(chunks, grant.nbytes)))
    return m.CommitUpdate(
        model="m", version=grants[0].version, owner_generation=vault.generation, others=tuple(digests[1:]),
        chunk_digests=digests[0].chunk_digests, digest=digests[0].digest,
    )  # fmt: skip


def life_of(mode: str, source: Source) -> Body:
    def life(vault: Vault, tell: Tell) -> None:
        models = vault.models
        load(vault, source)
        tell("sealed 1")
        grants = begin(vault, 1, mode)
        tell("updating 1")
        run(models.commit(said(vault, grants), TRAINER))
        tell("sealed 2")
        begin(vault, 2, mode)
        tell("updating 2")
        run(models.abort(m.AbortUpdate(model="m", version=3, owner_generation=vault.generation), TRAINER))
        tell("given up 2")
        if mode == IN_PLACE:
            again = m.RepublishWeights(model="m", version=2, owner_generation=vault.generation)
            run(models.republish(again, no_progress))
            tell("sealed 3")

    return life


def outcome(mode: str, text: str) -> str:
    """What the next life makes of a state that was told."""
    word, _, version = text.rpartition(" ")
    return f"sealed {version}" if word == "sealed" or mode == SWAP else f"torn {version}"


# load: put and save of each part; begin: save; commit: save (swap: put, put, save, drop, drop); begin, abort: save
# each; republish: put, put, save, drop, drop
@pytest.mark.parametrize(("mode", "effects"), [(SWAP, 12), (IN_PLACE, 13)])
def test_all_parts_are_of_one_version_or_torn_wherever_the_owner_died(
    places: Callable[[], Place], tmp_path: Path, mode: str, effects: int
) -> None:
    source = halves(tmp_path, mode)

    def check(place: Place, told: list[str], whole: list[str]) -> None:
        place.sources = {"m": source}
        vault, store = place.revived()
        if not told and len(vault.models.entries) < len(RANKS):
            return nothing_leaks(place, vault, store)  # nobody had been told of the model, and the next life loads it
        allowed = {outcome(mode, text) for text in (*told[-1:], *whole[len(told) : len(told) + 1])}
        found = states(vault)
        assert len(found) == 1, found
        assert found <= allowed, (told, allowed)
        for part in vault.models.parts("m"):
            assert part.version is not None
            if part.weights.whole:
                assert part.version.difference() is None
            else:
                with pytest.raises(WeightsTorn):
                    vault.models.attach("m", part.rank, TRAINER)
        return nothing_leaks(place, vault, store)

    assert every_death(places, life_of(mode, source), check) == 2 * effects


@pytest.mark.parametrize("mode", [SWAP, IN_PLACE])
def test_a_commit_that_one_part_fails_seals_none(places: Callable[[], Place], tmp_path: Path, mode: str) -> None:
    """Of rank 1: a false digest, another connection, a writable mapping that is left, no digest at all; then a disk
    that is full. And what is left of each is nothing."""
    place = places()
    store = HolderStore(place.holder)
    vault = place.vault(store)
    models, write = vault.models, vault.keeping.write
    load(vault, halves(tmp_path, mode))
    descriptors = len(os.listdir("/proc/self/fd"))
    before = {part.rank: part.info().digest for part in models.parts("m")}
    given_up = "sealed 1" if mode == SWAP else "torn 1"

    grants = begin(vault, 1, mode)
    whole = said(vault, grants)
    stranger = Caller(peer=2, who="other", pid=os.getpid(), pidfd=-1)
    with pytest.raises(Refused, match="no update of this connection"):
        models.part(m.UpdatePart(model="m", version=2, owner_generation=1, rank=1), stranger)
    with pytest.raises(Fenced):
        models.commit(whole, stranger)
    with pytest.raises(Refused, match=r"tells of 1 part\(s\), m lies in 2"):
        models.commit(m.CommitUpdate(
            model="m", version=2, owner_generation=1, chunk_digests=whole.chunk_digests, digest=whole.digest
        ), TRAINER)  # fmt: skip
    if mode == SWAP:
        staged = models.entry("m", 1).next
        assert staged is not None
        left = staged.memory.map_writable()
        with pytest.raises(Refused, match="writable mapping"):
            models.commit(whole, TRAINER)
        left.close()
    assert states(vault) == {"updating 1"}
    wrong = b"\0" * 32
    false = m.PartDigests(chunk_digests=(wrong,), digest=root_digest((wrong,), grants[1].nbytes))
    with pytest.raises(WeightsBroken, match="version 2 of m: rank 1: chunk 0 differs"):
        run(models.commit(m.CommitUpdate(
            model="m", version=2, owner_generation=1, chunk_digests=whole.chunk_digests, digest=whole.digest,
            others=(false,),
        ), TRAINER))  # fmt: skip
    assert states(vault) == {given_up}

    grants = begin(vault, 1, mode, ranks=())
    for part in models.parts("m"):  # a whole rewrite writes every byte; here they are those of version 1
        assert part.writer == "trainer"
    job = models.commit(said(vault, grants), TRAINER)
    vault.keeping.write = full_disk
    with pytest.raises(Refused, match="No space left"):
        run(job)
    vault.keeping.write = write
    assert states(vault) == {given_up}
    assert len(os.listdir("/proc/self/fd")) == descriptors
    vault.keeping.save()
    if mode == SWAP:
        assert {part.rank: part.info().digest for part in models.parts("m")} == before
    nothing_leaks(place, vault, store)


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def test_what_one_part_lost_is_refused_for_all_and_comes_back_for_all(
    places: Callable[[], Place], tmp_path: Path
) -> None:
    """Rank 1's bytes change behind the owner's back between two lives: rank 0 alone is no model."""
    source, place = halves(tmp_path, IN_PLACE), places()
    place.sources = {"m": source}

    def life(vault: Vault, tell: Tell) -> None:
        load(vault, source)
        tell("sealed 1")

    assert place.live(0, life) == (False, ["sealed 1"])
    store = HolderStore(place.holder)
    for name, fd in store.all().items():
        if name.startswith("weights.m.1."):
            mapping = Mapping(fd, os.fstat(fd).st_size, PROT_READ | PROT_WRITE, MAP_SHARED)
            mapping.buffer()[9] ^= 1
            mapping.close()
        os.close(fd)
    store.close()
    vault, store = place.revived()
    assert states(vault) == {"torn 1"}
    assert "the part of rank 1 is torn" in vault.models.entry("m", 0).info().reason
    for rank in RANKS:
        with pytest.raises(WeightsTorn):
            vault.models.attach("m", rank, TRAINER)
    again = m.RepublishWeights(model="m", version=1, owner_generation=vault.generation)
    info = run(vault.models.republish(again, no_progress))
    assert (info.state, info.version) == ("sealed", 2)
    assert states(vault) == {"sealed 2"}
    grant, fd = vault.models.attach("m", 1, TRAINER)
    os.close(fd)
    assert (grant.rank, grant.version) == (1, 2)
    nothing_leaks(place, vault, store)


def test_parts_that_are_lost_inside_an_update_are_torn_until_they_are_published(
    places: Callable[[], Place], tmp_path: Path
) -> None:
    source, place = halves(tmp_path, IN_PLACE), places()
    place.sources = {"m": source}

    def life(vault: Vault, tell: Tell) -> None:
        load(vault, source)
        begin(vault, 1, IN_PLACE, ranks=(1,))
        tell("updating")

    assert place.live(0, life) == (False, ["updating"])
    vault, store = place.revived()
    assert states(vault) == {"torn 1"}, "one byte of one part was written"
    nothing_leaks(place, vault, store)
    end_holder(place.holder)
    for part in vault.models.parts("m"):
        assert part.version is not None
        part.version.memory.close()
    vault, store = place.revived()
    assert {key: row.from_files for key, row in vault.to_load.items()} == {("m", 0): False, ("m", 1): False}
    assert len(vault.lost) == 2, "torn weights cannot be loaded again as if nothing had happened"
    load(vault, source)
    assert states(vault) == {"torn 1"}
    info = run(
        vault.models.republish(m.RepublishWeights(model="m", version=1, owner_generation=vault.generation), no_progress)
    )
    assert (info.state, info.version, states(vault)) == ("sealed", 2, {"sealed 2"})
    nothing_leaks(place, vault, store)


def test_parts_of_a_load_that_a_death_cut_short_are_loaded_again_together(
    places: Callable[[], Place], tmp_path: Path
) -> None:
    """The files change in between: a part of the old ones beside a part of the new ones would be one version of two."""
    source, place = halves(tmp_path, SWAP), places()
    place.sources = {"m": source}

    def life(vault: Vault, tell: Tell) -> None:
        vault.models.load("m", 0, source, no_progress)

    assert place.live(0, life) == (False, [])
    in_halves(tmp_path / "m", tmp_path / "kept", seed=2)
    fresh = [source.load("m", no_progress, rank) for rank in RANKS]
    for n in range(2):  # also when the next life ends at the same place
        vault, store = place.revived()
        assert vault.models.entries == {}
        vault.models.load("m", 0, source, no_progress, vault.to_load.get(("m", 0)))
        if n == 1:
            load(vault, source)
            assert states(vault) == {"sealed 1"}
            assert [part.info().digest for part in vault.models.parts("m")] == [one.digest for one in fresh]
            nothing_leaks(place, vault, store)
        else:
            store.close()
    for one in fresh:
        one.mapping.close()
        one.memory.close()


def test_other_parts_of_unchanged_files_keep_their_version(places: Callable[[], Place], tmp_path: Path) -> None:
    """tensor_parallel raised, lowered, and raised over other files: one number for all parts, and another one for other
    bytes only. A death between the parts changes nothing of it."""
    folder, kept, place = tmp_path / "m", tmp_path / "kept", places()

    def written(seed: int) -> None:
        in_halves(folder, kept, seed)

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
