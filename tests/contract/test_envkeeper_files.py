"""Files in and out of a sandbox: whole, counted as part of E_k, and never led astray."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from belayer.errors import Fenced, Refused, SandboxLost
from belayer.messages.sandbox import FileIn, FilesWritten, PathContent, ReadPath, WriteFiles
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("files"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def box(host: EnvHost) -> Iterator[Sandbox]:
    made = host.create()
    yield made
    made.destroy()


def put(host: EnvHost, box: Sandbox, *files: FileIn) -> FilesWritten:
    ask = WriteFiles(sandbox_id=box.sandbox_id, incarnation=box.incarnation, boundary=box.boundary, files=files)
    done = call_sync(host.paths.envkeeper_sock, ask, FilesWritten, 120)
    box.boundary = done.boundary
    return done


def test_a_tree_goes_in_and_comes_back(box: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "big").write_bytes(os.urandom(9_000_001))
    (source / "deep/empty").touch()
    (source / "deep/er/é 🙂").write_bytes(b"odd")
    (source / "tool").write_text("#!/bin/sh\necho ran\n")
    (source / "tool").chmod(0o750)
    (source / "deep/nothing/in it").mkdir(parents=True)
    (source / "deep/nothing/in it").chmod(0o1711)
    (source / "secret").mkdir()
    (source / "secret/key").write_bytes(b"private")
    (source / "secret").chmod(0o550)
    (source / "deep/er").chmod(0o2750)
    source.chmod(0o700)
    assert box.upload(source, "/srv/tree", user="nobody") == 5
    for folder, mode in (("", "700"), ("/secret", "550"), ("/deep/er", "2750"), ("/deep", "755")):
        assert box.exec(f"stat -c '%a %U' /srv/tree{folder}").stdout == f"{mode} nobody\n"
    assert box.exec("stat -c '%a %U %F' '/srv/tree/deep/nothing/in it'").stdout == "1711 nobody directory\n"
    assert box.exec("/srv/tree/tool; stat -c '%a %U' /srv/tree/tool /srv/tree/deep").stdout == (
        "ran\n750 nobody\n755 nobody\n"
    )
    assert box.download("/srv/tree", tmp_path / "back") == 5
    for path in source.rglob("*"):
        other = tmp_path / "back" / path.relative_to(source)
        assert other.is_dir() if path.is_dir() else other.read_bytes() == path.read_bytes()
    assert stat.S_IMODE((tmp_path / "back/tool").stat().st_mode) == 0o750


def test_a_refused_download_leaves_nothing_and_empty_folders_come(box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir -p /half/a-folder /half/empty; echo first > /half/a-folder/file; mkfifo /half/pipe")
    with pytest.raises(Refused):
        box.download("/half", tmp_path / "half")
    assert list(tmp_path.iterdir()) == []
    box.exec("rm /half/pipe")
    assert box.download("/half", tmp_path / "half") == 1
    assert sorted(path.name for path in (tmp_path / "half").iterdir()) == ["a-folder", "empty"]
    with pytest.raises(FileExistsError):
        box.download("/half", tmp_path / "half")


def test_an_upload_belongs_to_the_prefix(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("kept")
    box.upload(tmp_path / "f", "/kept")
    box.checkpoint()
    (tmp_path / "f").write_text("after")
    box.upload(tmp_path / "f", "/after")
    k = box.boundary
    box.kill()
    assert box.restore()[0] == k - 1
    assert box.exec("cat /kept; ls /after").stdout == "kept"


def test_a_stale_upload_is_fenced(host: EnvHost, box: Sandbox) -> None:
    ask = WriteFiles(
        sandbox_id=box.sandbox_id, incarnation=box.incarnation, boundary=box.boundary - 1,
        files=(FileIn(path="/stale", data=b"x"),),
    )  # fmt: skip
    with pytest.raises(Fenced):
        call_sync(host.paths.envkeeper_sock, ask, FilesWritten, 120)
    assert box.exec("ls /stale").exit_code == 2


def test_links_lead_nowhere_but_into_the_sandbox(host: EnvHost, box: Sandbox, tmp_path: Path) -> None:
    mark = f"belayer-{os.getpid()}"
    box.exec(
        "mkdir -p /t/real; ln -s ../../../../../../t/real /t/up; ln -s /t/real /t/abs; ln -s /proc/1/root /t/root; "
        "ln -s /proc/1/fd /t/fds; ln -s /t/loop /t/loop; ln -s /t/real/victim /t/last; echo safe > /t/real/victim"
    )
    for where in ("/t/up", "/t/abs", "/t/../../../../t/real"):
        put(host, box, FileIn(path=f"{where}/{mark}", data=where.encode()))
        assert box.exec(f"cat /t/real/{mark}").stdout == where
    for where in ("/t/root/x", "/t/fds/x", "/t/loop/x"):
        for file in (FileIn(path=where, data=b"x"), FileIn(path=where, data=b"", mode=0o40755)):
            with pytest.raises(Refused):
                put(host, box, file)
    # A folder that is there stays as it is, also by another name.
    put(host, box, FileIn(path="/t/abs", data=b"", mode=0o40700))
    assert box.exec("stat -c '%a %F' /t/abs /t/real").stdout == "777 symbolic link\n755 directory\n"
    # The last name itself is replaced, never followed.
    put(host, box, FileIn(path="/t/last", data=b"new"))
    assert box.exec("cat /t/last /t/real/victim; stat -c %F /t/last").stdout == "newsafe\nregular file\n"
    assert not list(Path("/t").glob("*")) if Path("/t").exists() else True
    for where in ("/t/fds/3", "/t/root/etc/passwd", "/t/loop", "/nope"):
        with pytest.raises(Refused):
            box.download(where, tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("name", ["pipe", "sock", "null"])
def test_what_is_no_file_is_refused_and_holds_nobody_up(host: EnvHost, box: Sandbox, tmp_path: Path, name: str) -> None:
    box.exec(
        "mkdir -p /odd; cd /odd; [ -e pipe ] || mkfifo pipe; [ -e null ] || mknod null c 1 3; "
        "[ -e sock ] || python3 -c \"import socket; socket.socket(1).bind('sock')\"; cd /"
    )
    with pytest.raises(Refused):
        box.download(f"/odd/{name}", tmp_path / "x")
    with pytest.raises(Refused):
        put(host, box, FileIn(path=f"/odd/{name}", data=b"x", append=True))
    assert box.exec("echo on").stdout == "on\n"


def test_bad_asks_are_refused_by_name(host: EnvHost, box: Sandbox, tmp_path: Path) -> None:
    for file, word in (
        (FileIn(path="relative", data=b""), "no absolute path"),
        (FileIn(path="/a\0b", data=b""), "no absolute path"),
        (FileIn(path="/x/..", data=b""), "no file"),
        (FileIn(path="/x/", data=b""), "no file"),
        (FileIn(path="/x", data=b"", mode=0o20000), "no permission bits"),
        (FileIn(path="/x", data=b"x", mode=0o40755), "a folder has no bytes"),
        (FileIn(path="/etc/passwd", data=b"", mode=0o40755), "cannot make"),
        (FileIn(path="/x", data=b"", user="nobody-knows"), "no such user"),
    ):
        with pytest.raises(Refused, match=word):
            put(host, box, file)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refused, match="neither a file nor a folder"):
        box.upload(tmp_path, "/x")


def test_a_name_that_is_no_utf8_is_refused_before_anything_is_written(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("good")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad-\xff")).write_text("odd")
    before = box.boundary
    with pytest.raises(Refused, match=r"bad-\\xff.*not UTF-8"):
        box.upload(tmp_path, "/odd-names")
    assert (box.boundary, box.exec("ls /odd-names").exit_code) == (before, 2)


def test_a_call_beside_another_one_is_refused_by_name_and_disturbs_nothing(host: EnvHost, tmp_path: Path) -> None:
    box = host.create()
    box.checkpoint()
    second = Sandbox.attach(box.sandbox_id, paths=host.paths)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(box.exec, "touch /begun; sleep 600")
        eventually(Path(f"/proc/{host.info(box.sandbox_id).pid}/root/begun").exists, what="the slow one runs")
        for call in (box.kill, box.checkpoint, box.close, lambda: box.download("/etc", tmp_path / "never")):
            with pytest.raises(Refused, match="inside a call of another thread"):
                call()
        assert not slow.done()
        # Docker may hear of a death seconds after the kernel has told it.
        known = r"Docker: (exit code 137|its end is not known there yet)"
        assert re.search(known, second.kill().seen)
        with pytest.raises(SandboxLost, match=known):
            slow.result()
    second.close()
    box.restore()
    box.destroy()


def test_a_failure_in_the_middle_says_what_is_there(host: EnvHost, box: Sandbox) -> None:
    before = box.boundary
    done = put(
        host, box, FileIn(path="/one", data=b"1"), FileIn(path="/proc/no", data=b"2"), FileIn(path="/two", data=b"")
    )
    assert (done.boundary, done.written) == (before + 1, 1)
    assert "/proc/no" in done.failed
    assert box.exec("cat /one; ls /two").stdout == "1"


def test_a_sandbox_cannot_name_a_place_outside_of_the_target(tmp_path: Path) -> None:
    """What is listed is the sandbox's word: a compromised agent might say anything."""
    from belayer.transfer import fetch

    def lies(path: str, offset: int) -> PathContent:
        return PathContent(size=0, mode=stat.S_IFDIR | 0o755, names=("../evil",))

    with pytest.raises(Refused, match="no name"):
        fetch(lies, "/x", tmp_path / "t")
    assert not (tmp_path / "evil").exists()


def test_reading_changes_nothing(host: EnvHost, box: Sandbox) -> None:
    ask = ReadPath(sandbox_id=box.sandbox_id, incarnation=box.incarnation, path="/etc/passwd", offset=2, most=3)
    seen = call_sync(host.paths.envkeeper_sock, ask, PathContent, 120)
    assert (seen.data, host.info(box.sandbox_id).boundary) == (b"ot:", box.boundary)
