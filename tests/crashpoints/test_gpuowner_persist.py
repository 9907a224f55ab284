"""The owner is killed before and after every effect of what it does, on a real holder process and a real ledger file.

Each run forks a life of the owner that kills itself at point n (SIGKILL), for n = 1, 2, ... until a run ends alive.
The next life must find what was told, or what was being done, and nothing else; and the holder must keep exactly what
the ledger names.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from belayer import statefile
from belayer.errors import Refused, WeightsTorn
from belayer.messages import owner as m
from gpuowner import core, ledger, recipes
from gpuowner.digest import chunk_digests, root_digest
from gpuowner.keeping import Caller, Store
from gpuowner.recipe import Param, Piece, Recipe
from gpuowner.safetensors_file import read_model
from gpuowner.store import HolderStore, end_holder
from gpuowner.vault import Vault
from gpuowner.version import IN_PLACE, SWAP, Job, Source
from gpuowner.vmem import MAP_SHARED, PROT_READ, PROT_WRITE, Mapping
from tests.support.owners import tiny_model

SIZE = 1 << 16
Tell = Callable[[str], None]
Body = Callable[[Vault, Tell], None]


@dataclass
class Points:
    """Kills this process at the ``die_at``-th place between two effects."""

    die_at: int
    count: int = 0

    def reach(self) -> None:
        self.count += 1
        if self.count == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class SteppingStore:
    inner: HolderStore
    points: Points

    def describe(self) -> str:
        return self.inner.describe()

    def put(self, name: str, fd: int) -> None:
        self.points.reach()
        self.inner.put(name, fd)
        self.points.reach()

    def drop(self, name: str) -> None:
        self.points.reach()
        self.inner.drop(name)
        self.points.reach()


@dataclass
class Place:
    """Where lives of an owner follow each other."""

    folder: Path
    generation: int = 0
    sources: dict[str, Source] = field(default_factory=dict)
    slots: frozenset[str] | None = None

    @property
    def holder(self) -> Path:
        return self.folder / "holder.sock"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def vault(self, store: Store) -> Vault:
        self.generation += 1
        return Vault(self.generation, self.ledger, store, slots=self.slots)

    def revived(self) -> tuple[Vault, HolderStore]:
        """The next life, in this process."""
        store = HolderStore(self.holder)
        vault = self.vault(store)
        vault.revive(store.all(), self.sources)
        return vault, store

    def live(self, die_at: int, body: Body) -> tuple[bool, list[str]]:
        """One life that ends at a point. (whether it was killed, what it had told)"""
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                points = Points(die_at)
                vault = self.vault(SteppingStore(HolderStore(self.holder), points))
                write = vault.keeping.write

                def stepping() -> None:
                    points.reach()
                    write()
                    points.reach()

                vault.keeping.write = stepping
                body(vault, lambda text: void(os.write(tell, text.encode() + b"\n")))
                code = 0
            finally:
                os._exit(code)
        self.generation += 1
        os.close(tell)
        with os.fdopen(told) as pipe:
            said = pipe.read().splitlines()
        _, status = os.waitpid(pid, 0)
        killed = os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        assert killed or status == 0, f"point {die_at}: the life failed, it had told {said}"
        return killed, said


def void(_: object) -> None:
    pass


@pytest.fixture
def places() -> Iterator[Callable[[], Place]]:
    made: list[Place] = []
    with tempfile.TemporaryDirectory(prefix="blc-", dir="/tmp") as root:

        def place() -> Place:
            folder = Path(root) / str(len(made))
            folder.mkdir()
            made.append(Place(folder))
            return made[-1]

        yield place
        for one in made:
            end_holder(one.holder)


def nothing_leaks(place: Place, vault: Vault, store: HolderStore) -> None:
    found = store.all()
    for fd in found.values():
        os.close(fd)
    saved = ledger.last(place.ledger)
    assert saved is not None
    named = {row.memory for row in saved.arenas} | {row.memory for row in saved.weights}
    assert set(found) == named == set(vault.keeping.held)
    store.close()


def every_death(places: Callable[[], Place], body: Body, check: Callable[[Place, list[str], list[str]], None]) -> int:
    """Run ``body`` to each of its points; ``check`` gets what had been told, and what a whole life tells."""
    killed, whole = places().live(0, body)
    assert not killed
    n = 0
    while True:
        n += 1
        place = places()
        killed, told = place.live(n, body)
        assert told == whole[: len(told)]
        if not killed:
            assert told == whole
            return n - 1
        check(place, told, whole)


# --- arenas ---


def me() -> Caller:
    """The holder of the leases is the test itself: it outlives every life of the owner."""
    pid = os.getppid()
    return Caller(peer=1, who="main", pid=pid, pidfd=os.pidfd_open(pid))


def arena_life(vault: Vault, tell: Tell) -> None:
    arenas, by, owner = vault.arenas, me(), vault.generation

    def said(text: str) -> None:
        info = arenas.entry("slot0", 0).info()
        assert text == f"{info.state} {info.epoch}"
        tell(text)

    arenas.open("slot0", 0, SIZE)
    said("free 0")
    arenas.acquire("slot0", 0, core.Stamp(owner, 0), by)
    said("leased 0")
    arenas.peer_gone(1)
    said("fencing 0")
    arenas.fence("slot0", 0, core.FenceEnded(core.Stamp(owner, 0), holder_alive=False))
    said("free 1")
    arenas.acquire("slot0", 0, core.Stamp(owner, 1), by)
    said("leased 1")
    arenas.fence("slot0", 0, core.FenceBegun(core.Stamp(owner, 1)))
    said("fencing 1")
    arenas.fence("slot0", 0, core.Quarantined(core.Stamp(owner, 1), "bad"))
    said("quarantined 1")
    arenas.fence("slot0", 0, core.Restored(core.Stamp(owner, 1), holder_alive=False))
    said("free 2")


def check_arena(place: Place, told: list[str], whole: list[str]) -> None:
    vault, store = place.revived()
    allowed = {*told[-1:], whole[len(told)] if len(told) < len(whole) else ""}
    if not told and not vault.arenas.entries:
        pass  # nobody had been told of an arena
    else:
        info = vault.arenas.entry("slot0", 0).info()
        assert f"{info.state} {info.epoch}" in allowed
        assert info.owner_generation == place.generation
        if info.state == "leased":
            assert (info.holder_pid, info.holder_alive) == (os.getpid(), True)
    assert vault.lost == []
    nothing_leaks(place, vault, store)


def test_an_arena_is_found_as_it_was_told_wherever_the_owner_died(places: Callable[[], Place]) -> None:
    # put and save of the first open, then one save each: two points for every effect
    assert every_death(places, arena_life, check_arena) == 2 * (2 + 7)


# --- weights ---


def model_life(mode: str, source: Source) -> Body:
    def life(vault: Vault, tell: Tell) -> None:
        models = vault.models
        by = Caller(peer=1, who="trainer", pid=os.getpid(), pidfd=-1)
        models.load("m", 0, source, lambda done, of, rate: None)
        tell("sealed 1")

        def begin(version: int) -> m.UpdateGrant:
            asked = m.BeginUpdate(
                model="m", from_version=version, owner_generation=vault.generation, mode=mode, whole=True
            )
            grant, fds = models.begin(asked, by)
            mapping = Mapping(fds[0], grant.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED)
            mapping.buffer()[5] = version  # half of the bytes are the new ones
            mapping.close()
            for fd in fds:
                os.close(fd)
            tell(f"updating {version}")
            return grant

        def commit(grant: m.UpdateGrant) -> None:
            entry = models.entry("m", 0)
            target = entry.next or entry.version
            assert target is not None
            fd = target.memory.reader_fd()
            mapping = Mapping(fd, grant.nbytes, PROT_READ, MAP_SHARED)
            chunks = tuple(chunk_digests(mapping.buffer()))
            mapping.close()
            os.close(fd)
            asked = m.CommitUpdate(
                model="m", version=grant.version, owner_generation=vault.generation, chunk_digests=chunks,
                digest=root_digest(chunks, grant.nbytes),
            )  # fmt: skip
            run(models.commit(asked, by))
            tell(f"sealed {grant.version}")

        commit(begin(1))
        grant = begin(2)
        run(models.abort(m.AbortUpdate(model="m", version=3, owner_generation=vault.generation), by))
        tell("given up 2")
        if mode == SWAP:
            return
        again = m.RepublishWeights(model="m", version=2, owner_generation=vault.generation)
        run(models.republish(again, lambda done, of, rate: None))
        tell("sealed 3")
        void(grant)

    return life


def run(job: Job) -> None:
    job.finish(job.work())


def outcome(mode: str, text: str) -> str:
    """What the next life makes of a state that was told."""
    word, _, version = text.rpartition(" ")
    if word == "sealed" or mode == SWAP:
        return f"sealed {version}"
    return f"torn {version}"


# load: put, save; begin: save; commit: save (swap: put, save, drop); begin, abort: save each; republish: put, save and
# drop
@pytest.mark.parametrize(("mode", "effects"), [(SWAP, 8), (IN_PLACE, 9)])
def test_weights_are_whole_or_torn_wherever_the_owner_died(
    places: Callable[[], Place], tmp_path: Path, mode: str, effects: int
) -> None:
    source = Source(tiny_model(tmp_path / "m", 1, SIZE), "float32", mode)

    def check(place: Place, told: list[str], whole: list[str]) -> None:
        place.sources = {"m": source}
        vault, store = place.revived()
        if not told and ("m", 0) not in vault.models.entries:
            assert vault.to_load == {}
            return nothing_leaks(place, vault, store)
        entry = vault.models.entry("m", 0)
        allowed = {outcome(mode, text) for text in (*told[-1:], *whole[len(told) : len(told) + 1])}
        assert f"{entry.weights.state.value} {entry.weights.version}" in allowed, (told, allowed)
        assert entry.version is not None
        if entry.weights.whole:
            assert entry.version.difference() is None
        else:
            with pytest.raises(WeightsTorn):
                vault.models.attach("m", 0, Caller(1, "w", os.getpid(), -1))
        return nothing_leaks(place, vault, store)

    assert every_death(places, model_life(mode, source), check) == 2 * effects


def test_a_revival_that_is_killed_is_revived_again(places: Callable[[], Place]) -> None:
    """Deaths inside the adoption itself: what the first life told is still there, copies that no row names are not."""

    def first(vault: Vault, tell: Tell) -> None:
        vault.arenas.open("slot0", 0, SIZE)
        vault.arenas.acquire("slot0", 0, core.Stamp(vault.generation, 0), me())
        vault.arenas.open("gone", 0, SIZE)  # of a slot that is not configured any more
        memory = vault.arenas.entry("slot0", 0).memory
        vault.keeping.keep("orphan", memory.fd)  # a death between the store and the ledger
        tell("leased 0")

    def second(vault: Vault, tell: Tell) -> None:
        store = vault.keeping.store
        assert isinstance(store, SteppingStore)
        vault.revive(store.inner.all(), {})
        tell("revived")

    n = 0
    while True:
        n += 1
        place = places()
        assert place.live(0, first) == (False, ["leased 0"])
        place.slots = frozenset({"slot0"})
        killed, told = place.live(n, second)
        vault, store = place.revived()
        info = vault.arenas.entry("slot0", 0).info()
        assert (info.state, info.epoch, info.holder_pid) == ("leased", 0, os.getpid())
        assert list(vault.arenas.entries) == [("slot0", 0)]
        nothing_leaks(place, vault, store)
        if not killed:
            assert told == ["revived"]
            break
    assert n - 1 == 6, "drop, save and drop: two points each"


# --- a ledger that cannot be written ---


def full_disk() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("mode", [SWAP, IN_PLACE])
def test_what_cannot_be_written_down_is_not_told_and_leaves_nothing(
    places: Callable[[], Place], tmp_path: Path, mode: str
) -> None:
    """A lease, an update, its commit and a republish on a full disk: each fails with the state as it was (a commit in
    place: TORN, as its bytes are the new ones), and the store keeps what the ledger names."""
    place = places()
    store = HolderStore(place.holder)
    vault = place.vault(store)
    models, arenas, write = vault.models, vault.arenas, vault.keeping.write
    by = Caller(peer=1, who="w", pid=os.getpid(), pidfd=os.pidfd_open(os.getpid()))
    models.load("m", 0, Source(tiny_model(tmp_path / "m", 1, SIZE), "float32", mode), lambda done, of, rate: None)
    arenas.open("slot0", 0, SIZE)
    descriptors = len(os.listdir("/proc/self/fd"))

    def failing(step: Callable[[], object]) -> None:
        vault.keeping.write = full_disk
        with pytest.raises((OSError, Refused), match="No space left"):
            step()
        vault.keeping.write = write

    failing(lambda: arenas.acquire("slot0", 0, core.Stamp(1, 0), by))
    assert arenas.entry("slot0", 0).arena == core.Arena("slot0", SIZE)
    begin = m.BeginUpdate(model="m", from_version=1, owner_generation=1, whole=True)
    failing(lambda: models.begin(begin, by))
    entry = models.entry("m", 0)
    assert (entry.weights.state, entry.weights.version, entry.next, entry.writer) == ("sealed", 1, None, "")
    assert len(os.listdir("/proc/self/fd")) == descriptors

    grant, fds = models.begin(begin, by)
    mapping = Mapping(fds[0], grant.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED)
    mapping.buffer()[0] ^= 1
    chunks = tuple(chunk_digests(mapping.buffer()))
    mapping.close()
    for fd in fds:
        os.close(fd)
    job = models.commit(
        m.CommitUpdate(
            model="m", version=2, owner_generation=1, chunk_digests=chunks, digest=root_digest(chunks, grant.nbytes)
        ),
        by,
    )
    failing(lambda: run(job))
    state = "sealed" if mode == SWAP else "torn"
    assert (entry.weights.state, entry.weights.version, entry.next) == (state, 1, None)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    vault.keeping.save()
    if mode == IN_PLACE:
        again = models.republish(
            m.RepublishWeights(model="m", version=1, owner_generation=1), lambda done, of, rate: None
        )
        failing(lambda: run(again))
        assert (entry.weights.state, entry.weights.version) == ("torn", 1)
        assert len(os.listdir("/proc/self/fd")) == descriptors
    nothing_leaks(place, vault, store)


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
