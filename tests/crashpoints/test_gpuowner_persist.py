"""The owner is killed before and after every effect of what it does, on a real holder process and a real ledger file.

Each run forks a life of the owner that kills itself at point n (SIGKILL), for n = 1, 2, ... until a run ends alive.
The next life must find what was told, or what was being done, and nothing else; and the holder must keep exactly what
the ledger names.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belayer.errors import Refused, WeightsTorn
from belayer.messages import owner as m
from gpuowner import core
from gpuowner.digest import chunk_digests, root_digest
from gpuowner.keeping import Caller
from gpuowner.store import HolderStore
from gpuowner.vault import Vault
from gpuowner.version import IN_PLACE, SWAP, Job, Source
from gpuowner.vmem import MAP_SHARED, PROT_READ, PROT_WRITE, Mapping
from tests.support.owner_deaths import SIZE, Body, Place, SteppingStore, Tell, every_death, nothing_leaks, void
from tests.support.owners import tiny_model

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
    gc.collect()  # what earlier tests have left to it is not closed between two counts
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
