"""Sealed checkpoints: no plain byte in the store, no piece can be moved, cut or replaced, only this key opens them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belayer.errors import BelayerError, ConfigInvalid, HostUnfit, RestoreFailed
from envkeeper.seal import CHUNK, TAG_BYTES, Seal, load_key
from envkeeper.store import FileDigest, Manifest, Store
from tests.support.checkpoints import manifest_of

SECRET = b"AKIA-the-secret-of-the-sandbox"
HEAD = 24  # magic and salt


@pytest.fixture
def ram() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="belayer-seal-") as folder:
        yield Path(folder)


def publish(store: Store, pages: bytes) -> Manifest:
    folder = store.begin(1)
    (folder / "criu" / "pages-1.img").write_bytes(pages)
    (folder / "criu" / "core-1.img").write_bytes(b"core")
    (folder / "upper.pack").write_bytes(b"")

    def make(files: dict[str, FileDigest]) -> Manifest:
        return manifest_of(folder.name, 1, files)

    return store.publish(folder, make)[0]


def test_no_plain_byte_reaches_the_store_and_it_comes_back(ram: Path, tmp_path: Path) -> None:
    pages = (SECRET * 100_000)[: 2 * CHUNK + 17]
    store = Store(tmp_path, "sb", seal=Seal(b"k" * 32, ram / "s"))
    made = publish(store, pages)
    assert subprocess.run(["grep", "-rqF", SECRET.decode(), tmp_path], check=False).returncode == 1
    assert [path for path in (ram / "s").rglob("*") if path.is_file()] == [], "nothing plain is left behind"
    store.verify(made)
    with store.opened(made, "sb.2") as plain:
        assert (plain / "criu" / "pages-1.img").read_bytes() == pages
        assert (plain / "upper.pack").read_bytes() == b""
        assert oct((plain / "criu" / "pages-1.img").stat().st_mode & 0o777) == "0o600"
        assert oct((ram / "s").stat().st_mode & 0o777) == "0o700"
    assert [path for path in (ram / "s").rglob("*") if path.is_file()] == []
    with pytest.raises(RestoreFailed, match="not configured"), Store(tmp_path, "sb").opened(made, "sb.2"):
        pass
    other = Store(tmp_path, "sb", seal=Seal(b"x" * 32, ram / "x"))
    with pytest.raises(RestoreFailed, match="not configured"), other.opened(made, "sb.2"):
        pass


def test_a_killed_daemon_leaves_plain_files_only_until_the_next_start(ram: Path, tmp_path: Path) -> None:
    store = Store(tmp_path, "sb", seal=Seal(b"k" * 32, ram / "s"))
    (store.begin(1) / "criu" / "pages-1.img").write_bytes(SECRET)
    assert len([path for path in ram.rglob("*") if path.is_file()]) == 1
    Store(tmp_path, "sb", seal=Seal(b"k" * 32, ram / "s")).recover()
    assert [path for path in ram.rglob("*") if path.is_file()] == []


SPOILS = ["flip", "cut a chunk", "cut a byte", "swap chunks", "another file", "another checkpoint", "longer"]


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_piece_that_was_touched_is_refused(ram: Path, tmp_path: Path, spoil: str) -> None:
    seal, piece = Seal(b"k" * 32, ram / "s"), CHUNK + TAG_BYTES
    (ram / "a").mkdir()
    (ram / "a" / "one").write_bytes(os.urandom(3 * CHUNK))
    (ram / "a" / "two").write_bytes(os.urandom(3 * CHUNK))
    seal.close_folder(ram / "a", tmp_path / "a")
    one, folder = tmp_path / "a" / "one", tmp_path / "a"
    data = bytearray(one.read_bytes())
    match spoil:
        case "flip":
            data[HEAD + piece + 5] ^= 1
        case "cut a chunk":
            del data[HEAD + 2 * piece :]
        case "cut a byte":
            del data[-1]
        case "swap chunks":
            first, second = data[HEAD : HEAD + piece], data[HEAD + piece : HEAD + 2 * piece]
            data[HEAD : HEAD + 2 * piece] = second + first
        case "another file":
            data = bytearray((folder / "two").read_bytes())
        case "another checkpoint":
            folder = folder.rename(tmp_path / "b")
        case "longer":
            data += data[HEAD : HEAD + piece]
    (folder / "one").write_bytes(data)
    with pytest.raises(RestoreFailed, match="one cannot be opened"):
        seal.open_folder(folder, ram / "out", ["one"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2 * 1024 + 2), st.binary(min_size=32, max_size=32))
def test_every_size_comes_back(size: int, key: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="belayer-seal-") as folder:
        root = Path(folder)
        seal = Seal(key, root / "s")
        plain = bytes(size * 1024)
        (root / "a").mkdir()
        (root / "a" / "f").write_bytes(plain)
        seal.close_folder(root / "a", root / "b" / "a")
        seal.open_folder(root / "b" / "a", root / "c", ["f"])
        assert (root / "c" / "f").read_bytes() == plain


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    assert load_key(str(path)) == b"k" * 32
    path.write_text("6b" * 32 + "\n")
    assert load_key(str(path)) == b"k" * 32
    path.chmod(0o640)
    with pytest.raises(ConfigInvalid, match="open to other users"):
        load_key(str(path))
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigInvalid, match="32 bytes"):
        load_key(str(path))
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load_key(str(tmp_path / "none"))
    with pytest.raises(ConfigInvalid, match="environment has no"):
        load_key("env:BELAYER_NO_SUCH_KEY")


def test_plain_memory_never_lies_on_a_disk(tmp_path: Path) -> None:
    with pytest.raises(HostUnfit, match="not on a tmpfs"):
        Seal(b"k" * 32, tmp_path / "s")


def test_a_scratch_folder_of_another_is_refused(ram: Path) -> None:
    (ram / "s").mkdir(mode=0o755)
    with pytest.raises(BelayerError, match="not a folder of ours"):
        Seal(b"k" * 32, ram / "s")
