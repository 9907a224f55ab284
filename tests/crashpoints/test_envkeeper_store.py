"""Stop after every step of a publication and open the store again (promise E2); claims and integrity (E6, E4)."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from belayer.errors import ClaimTaken, RestoreFailed
from envkeeper.recipe import Recipe
from envkeeper.store import FORMAT, READY, FileDigest, Manifest, Store

STEPS = ["hashed", "manifest", "synced", "renamed", "named", "ready"]
RECIPE = Recipe(image_id="sha256:0", agent="/a", hostname="h", memory_mb=1, cpus=1.0, pids=1, env={})


class StoppedError(Exception):
    """The process ended here."""


class StopAfter:
    def __init__(self, name: str) -> None:
        self.name, self.seen = name, list[str]()

    def __call__(self, step: str) -> None:
        self.seen.append(step)
        if step == self.name:
            raise StoppedError


def write(store: Store, boundary: int, body: bytes = b"pages") -> Manifest:
    folder = store.begin(boundary)
    (folder / "criu" / "pages-1.img").write_bytes(body)
    (folder / "upper.pack").write_bytes(b"upper" * boundary)

    def make(files: dict[str, FileDigest]) -> Manifest:
        return Manifest(
            format=FORMAT,
            checkpoint_id=folder.name,
            sandbox_id="sb",
            incarnation="sb.1",
            boundary=boundary,
            context_digest=f"L{boundary}",
            parent="",
            made_at=float(boundary),
            recipe=RECIPE,
            nonce_sha256=hashlib.sha256(b"n").hexdigest(),
            stdio=("/dev/null", "pipe:[1]", "pipe:[2]"),
            versions={},
            files=files,
            upper_entries=0,
            frozen_ms=1.0,
        )

    return store.publish(folder, make)[0]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_leaves_the_previous_ready_or_the_new_one_whole(tmp_path: Path, step: str) -> None:
    first = write(Store(tmp_path, "sb"), 1)
    stop = StopAfter(step)
    with pytest.raises(StoppedError):
        write(Store(tmp_path, "sb", stop), 2)
    assert stop.seen == STEPS[: STEPS.index(step) + 1]
    again = Store(tmp_path, "sb")
    again.recover()
    pointer = again.ready()
    assert pointer is not None
    manifest, digest = again.load(pointer.checkpoint_id)
    assert digest == pointer.manifest_sha256
    again.verify(manifest)
    assert manifest.boundary == (2 if step == "ready" else 1)
    assert manifest.context_digest == f"L{manifest.boundary}"
    assert (step == "ready") == (manifest.checkpoint_id != first.checkpoint_id)
    assert list((tmp_path / "sb" / "tmp").iterdir()) == []
    assert write(again, 3).boundary == 3


def test_the_steps_of_the_test_are_those_of_the_store(tmp_path: Path) -> None:
    stop = StopAfter("")
    write(Store(tmp_path, "sb", stop), 1)
    assert stop.seen == STEPS


def test_nothing_is_readable_by_others(tmp_path: Path) -> None:
    write(Store(tmp_path / "ck", "sb"), 1)
    for path in [tmp_path / "ck", *(tmp_path / "ck").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("spoil", ["changed", "missing", "not part of it"])
def test_a_file_that_differs_is_named(tmp_path: Path, spoil: str) -> None:
    store = Store(tmp_path, "sb")
    made = write(store, 1)
    pages = store.folder(made.checkpoint_id) / "criu" / "pages-1.img"
    match spoil:
        case "changed":
            pages.write_bytes(b"pagez")
        case "missing":
            pages.unlink()
        case _:
            pages.with_name("pages-2.img").write_bytes(b"x")
    with pytest.raises(RestoreFailed, match=rf"criu/pages-.\.img .* is {spoil}"):
        store.verify(made)


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    made = write(store, 1)
    path = store.folder(made.checkpoint_id) / "manifest.json"
    path.write_text(path.read_text().replace('"L1"', '"L2"'))
    with pytest.raises(RestoreFailed, match="READY names"):
        store.load(made.checkpoint_id)


def test_ready_is_never_guessed(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    assert store.ready() is None
    write(store, 1)
    (tmp_path / "sb" / READY).write_bytes(b"{")
    with pytest.raises(Exception, match="damaged"):
        store.ready()


def test_of_many_claimants_one_wins(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    won, lost = [], []
    start = threading.Barrier(8)

    def race(name: str) -> None:
        start.wait(10)
        try:
            Store(tmp_path, "sb").claim("sb.1", name)
            won.append(name)
        except ClaimTaken:
            lost.append(name)

    threads = [threading.Thread(target=race, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (len(won), len(lost)) == (1, 7)
    store.release("sb.1")
    store.claim("sb.1", "again")
    store.claim("sb.2", "another life")


def test_pruning_keeps_the_newest_and_ready(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    made = [write(store, boundary).checkpoint_id for boundary in range(1, 7)]
    assert store.prune(3) == made[:3]
    assert [row.checkpoint_id for row in store.all()] == made[3:]
    pointer = store.ready()
    assert pointer is not None
    assert pointer.checkpoint_id == made[-1]
    assert store.prune(1) == made[3:5]
