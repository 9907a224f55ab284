"""The power goes at every call of the store: READY is the old or the new one, whole; what was told is kept (E2, E6)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from belayer.errors import BelayerError, ClaimTaken, RestoreFailed
from envkeeper.store import FileDigest, Manifest, Store
from tests.support.checkpoints import manifest_of
from tests.support.powercut import Recorder, build


@pytest.fixture
def ram() -> Iterator[Path]:
    """Thousands of small trees: not on a disk that others use."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="belayer-cut-") as folder:
        yield Path(folder)


class Bench:
    """A store whose disk is recorded, and a judge of every image."""

    def __init__(self, ram: Path, deaf: frozenset[str] = frozenset()) -> None:
        self.ram = ram
        self.disk = Recorder(ram / "real", deaf)
        self.disk.root.mkdir()
        self.seen = 0

    def store(self, name: str = "sb") -> Store:
        return Store(self.disk.root, name, disk=self.disk)

    def write(self, store: Store, boundary: int) -> str:
        folder = store.begin(boundary)
        self.disk.write(folder / "criu" / "pages-1.img", b"pages of %d" % boundary)
        self.disk.write(folder / "upper.pack", b"upper" * boundary)

        def make(files: dict[str, FileDigest]) -> Manifest:
            return manifest_of(folder.name, boundary, files)

        return store.publish(folder, make)[0].checkpoint_id

    def judge(self, look: Callable[[Path], None]) -> None:
        """``look`` at each disk that a cut in this moment could leave."""
        for image in self.disk.images():
            self.seen += 1
            root = self.ram / f"image-{self.seen}"
            build(image, root)
            look(root)
            shutil.rmtree(root)


def ready_of(root: Path, name: str = "sb") -> int:
    """Boundary of READY after a recovery, its files as they were hashed; 0 for none."""
    store = Store(root, name)
    store.recover()
    assert list((root / name / "tmp").iterdir()) == []
    pointer = store.ready()
    if pointer is None:
        return 0
    manifest, _ = store.load(pointer.checkpoint_id)
    store.verify(manifest)
    for row in store.all():
        store.verify(row)
    return manifest.boundary


def cut_everywhere(bench: Bench, act: Callable[[], object], during: set[int], after: int, name: str = "sb") -> set[int]:
    """READY is one of ``during`` at every cut inside ``act``, and ``after`` when it has returned."""
    found = set[int]()

    def look(root: Path) -> None:
        found.add(ready_of(root, name))

    bench.disk.look = lambda: bench.judge(look)
    act()
    bench.disk.look = lambda: None
    assert found <= during, found
    last = set[int]()
    bench.judge(lambda root: last.add(ready_of(root, name)))
    assert last == {after}
    return found


def test_publication(ram: Path) -> None:
    bench = Bench(ram)
    store = bench.store()
    assert cut_everywhere(bench, lambda: bench.write(store, 1), {0, 1}, 1) == {0, 1}
    assert cut_everywhere(bench, lambda: bench.write(store, 2), {1, 2}, 2) == {1, 2}
    assert bench.seen > 100


@pytest.mark.parametrize("deaf", ["all", "file", "dir"])
def test_the_judge_finds_a_sync_that_is_left_out(ram: Path, deaf: str) -> None:
    bench = Bench(ram)
    store = bench.store()
    bench.write(store, 1)
    bench.disk.settle()
    bench.disk.deaf = frozenset({deaf})
    with pytest.raises((AssertionError, BelayerError)):
        cut_everywhere(bench, lambda: bench.write(store, 2), {1, 2}, 2)


def test_rewind_and_removal(ram: Path) -> None:
    bench = Bench(ram)
    store = bench.store()
    ids = [bench.write(store, boundary) for boundary in (1, 2, 3)]
    bench.disk.settle()
    assert cut_everywhere(bench, partial(store.point, ids[0]), {1, 3}, 1) == {1, 3}
    cut_everywhere(bench, partial(store.remove, ids[2]), {1}, 1)
    assert cut_everywhere(bench, store.point_at_nothing, {0, 1}, 0) == {0, 1}


def test_fork(ram: Path) -> None:
    bench = Bench(ram)
    store = bench.store()
    made = bench.write(store, 4)
    bench.disk.settle()

    def fork() -> None:
        bench.store("fork").take_from(store, made)

    assert cut_everywhere(bench, fork, {0, 4}, 4, "fork") == {0, 4}
    cut_everywhere(bench, lambda: None, {4}, 4)


def test_a_claim_that_was_told_is_still_taken(ram: Path) -> None:
    bench = Bench(ram)
    store = bench.store()
    made = bench.write(store, 1)
    bench.disk.settle()
    claim = store.claim("sb.1", made, "the winner")

    def taken(root: Path) -> None:
        with pytest.raises(ClaimTaken, match="the winner"):
            Store(root, "sb").claim("sb.1", made, "late")

    bench.judge(taken)
    store.claims.change(claim, spent=True)
    bench.judge(taken)
    assert store.remove(made)
    with pytest.raises(RestoreFailed, match="is gone"):
        store.claim("sb.2", made, "nobody")
