"""Stop after every step of a publication and open the store again (promise E2); claims and integrity (E6, E4)."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from belayer.errors import ClaimTaken, RestoreFailed
from envkeeper.store import READY, FileDigest, Manifest, Store
from tests.support.checkpoints import manifest_of

TREE = Path(__file__).parents[2]
STEPS = ["hashed", "manifest", "synced", "renamed", "named", "ready"]


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
        return manifest_of(folder.name, boundary, files)

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


def test_claims_are_consumed_once_and_protect_until_spent(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    made = write(store, 1).checkpoint_id
    claim = store.claim("sb.1", made, "me")
    with pytest.raises(ClaimTaken, match="taken by me"):
        store.claim("sb.1", made, "another")
    store.claim("sb.2", made, "of another life")
    assert not store.remove(made)
    assert store.load(made)[0].boundary == 1
    store.claims.change(claim, spent=True)
    with pytest.raises(ClaimTaken):
        store.claim("sb.1", made, "too late")
    assert not store.remove(made), "sb.2 still claims it"
    store.claims.settle("sb.2")
    assert store.remove(made)
    assert store.all() == []
    with pytest.raises(RestoreFailed, match="is gone"):
        store.claim("sb.2", made, "after it went")


def test_a_claim_is_given_back_only_by_its_holder(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    made = write(store, 1).checkpoint_id
    first = store.claim("sb.1", made, "one")
    store.claims.settle("sb.1")  # a new envkeeper: the old holder is dead
    second = store.claim("sb.1", made, "two")
    assert first.uuid != second.uuid
    store.claims.release(first)
    with pytest.raises(ClaimTaken, match="by two"):
        store.claim("sb.1", made, "three")
    with pytest.raises(ClaimTaken, match="no longer ours"):
        store.claims.change(first, spent=True)


def test_a_claim_that_cannot_be_read_protects_everything(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    made = write(store, 1).checkpoint_id
    (tmp_path / "sb" / "claims" / "sb.1").write_bytes(b"")  # its writer was killed between open and write
    assert not store.remove(made)
    store.claims.settle("sb.1")
    assert store.remove(made)


RACE = """
import sys
from pathlib import Path
from belayer.errors import BelayerError
from envkeeper.store import Store
store = Store(Path(sys.argv[1]), "sb")
kind, made = sys.argv[2], sys.argv[3].split()
print("there", flush=True)
sys.stdin.readline()
for life, one in enumerate(made):
    if kind == "remove":
        print(f"removed {one}" if store.remove(one) else f"kept {one}", flush=True)
        continue
    try:
        claim = store.claim(f"life-{life}", one, kind)
        store.verify(store.load(one)[0])
        print(f"won {one}", flush=True)
    except BelayerError as why:
        print(f"{type(why).__name__} {one}", flush=True)
"""


def test_racing_processes_get_one_winner_and_no_claimed_checkpoint_is_removed(tmp_path: Path) -> None:
    """Four processes claim forty checkpoints while two remove them: each goes to one claimant, whole, or is removed."""
    store = Store(tmp_path, "sb")
    made = [write(store, boundary).checkpoint_id for boundary in range(1, 41)]
    kinds = ["a", "b", "c", "d", "remove", "remove"]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), kind, " ".join(made)],
            cwd=TREE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for kind in kinds
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "there\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [line.split() for racer in racers for line in racer.communicate(timeout=300)[0].splitlines()]
    assert all(racer.returncode == 0 for racer in racers)
    assert len(said) == len(kinds) * len(made)
    for one in made:
        words = [word for word, which in said if which == one]
        if "removed" in words:
            assert "won" not in words
            assert words.count("RestoreFailed") == 4
        else:
            assert words.count("won") == 1
            assert words.count("ClaimTaken") == 3
            store.verify(store.load(one)[0])


def test_a_killed_claimant_or_remover_blocks_nobody(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    made = write(store, 1).checkpoint_id
    code = (
        "import sys; from pathlib import Path; from envkeeper.store import Store\n"
        "store = Store(Path(sys.argv[1]), 'sb')\n"
        "with store.claims.locked():\n    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    fd = os.open(tmp_path / "sb" / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    holder.kill()
    assert holder.wait(120) == -signal.SIGKILL
    holder.stdout.close()
    store.claim("sb.1", made, "me")


def test_a_shared_checkpoint_has_no_second_copy_and_outlives_its_source(tmp_path: Path) -> None:
    source = Store(tmp_path, "sb")
    made = write(source, 3, b"p" * 100_000)
    for name in ("f1", "f2"):
        fork = Store(tmp_path, name)
        fork.take_from(source, made.checkpoint_id)
        pages = fork.folder(made.checkpoint_id) / "criu" / "pages-1.img"
        assert pages.stat().st_ino == (source.folder(made.checkpoint_id) / "criu" / "pages-1.img").stat().st_ino
    source.destroy()
    manifest, digest = fork.load(made.checkpoint_id)
    fork.verify(manifest)
    pointer = fork.ready()
    assert pointer is not None
    assert (pointer.checkpoint_id, pointer.manifest_sha256) == (made.checkpoint_id, digest)
    with pytest.raises(RestoreFailed, match="has no checkpoint"):
        Store(tmp_path, "f3").take_from(Store(tmp_path, "f1"), "k9-00")


def test_a_store_that_is_destroyed_is_not_made_again_by_who_looks_at_it(tmp_path: Path) -> None:
    """As the collector looks at every store, now and then."""
    for number in range(20):
        store = Store(tmp_path, f"s{number}")
        made = write(store, 1).checkpoint_id
        begun, over = threading.Event(), threading.Event()

        def look(name: str = store.sandbox_id, made: str = made, begun: Any = begun, over: Any = over) -> None:
            other = Store(tmp_path, name, make=False)
            while not over.is_set():
                with suppress(FileNotFoundError):
                    other.all()
                    other.protects(made)
                begun.set()

        looker = threading.Thread(target=look)
        looker.start()
        begun.wait()
        store.destroy()
        over.set()
        looker.join()
        assert not store.home.exists()
    with pytest.raises(FileNotFoundError):
        Store(tmp_path, "s0", make=False).all()


def test_ancestors_are_one_attempt_and_not_what_a_rewind_left_behind(tmp_path: Path) -> None:
    store = Store(tmp_path, "sb")
    one, two, three = (write(store, boundary).checkpoint_id for boundary in (1, 2, 3))
    store.point(one)
    other = write(store, 2)
    assert store.load(three)[0].ancestors == (one, two)
    assert other.ancestors == (one,)
    store.point_at_nothing()
    assert store.ready() is None
    assert write(store, 1).ancestors == ()
    with pytest.raises(RestoreFailed, match="cannot be read"):
        store.point("k9-00")
