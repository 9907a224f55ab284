"""Refusals before a dump, judged from what /proc says: each kind by name, and nothing without a reason."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest

from envkeeper import mounts, pbuf, peers, preflight, reasons, remaps
from envkeeper.preflight import Descriptor, Task, judge

SPACES = tuple(f"{kind}:[1]" for kind in ("mnt", "pid", "net", "ipc", "uts", "user", "time", "cgroup"))
INIT = Task(100, 1, "S", "agent", spaces=SPACES)


def task(**more: object) -> Task:
    fields = {"pid": 101, "parent": 100, "state": "S", "name": "python3", "spaces": SPACES} | more
    return Task(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (task(parent=1), "foreign_process"),
        (task(tracer=7), "traced"),
        (task(state="T"), "stopped"),
        (task(spaces=(*SPACES[:6], "time:[2]", SPACES[7])), "nested_namespace"),
        (task(name="script"), "ends_at_dump"),
        (task(descriptors=(Descriptor(5, "anon_inode:[io_uring]"),)), "io_uring"),
        (task(descriptors=(Descriptor(5, "anon_inode:[fanotify]"),)), "fanotify"),
        (task(descriptors=(Descriptor(5, "/s", locked=True),), mapped=frozenset({"/s"})), "lock_on_mapped_file"),
    ],
)
def test_each_reason_has_its_kind(found: Task, kind: str) -> None:
    assert [finding.kind for finding in judge(100, [INIT, found])] == [kind]


def test_a_lock_on_a_mapped_file_is_carried_where_restores_take_it_again() -> None:
    found = task(descriptors=(Descriptor(5, "/s", locked=True),), mapped=frozenset({"/s"}))
    assert judge(100, [INIT, found], relocks=True) == []


@pytest.mark.parametrize(
    "found",
    [
        task(),
        task(state="Z", parent=1),
        task(descriptors=(Descriptor(5, "/k", locked=True),), mapped=frozenset({"/other"})),
        task(descriptors=(Descriptor(5, "anon_inode:[eventpoll]"), Descriptor(6, "socket:[8]"))),
        task(uids=(1000, 1000, 1000, 1000)),
    ],
)
def test_nothing_is_refused_without_a_reason(found: Task) -> None:
    assert judge(100, [INIT, found]) == []


def test_another_user_where_its_limits_cannot_be_read() -> None:
    assert [f.kind for f in judge(100, [INIT, task(uids=(0, 0, 1000, 0))], limits=False)] == ["other_user"]
    assert judge(100, [INIT, task()], limits=False) == []


def test_a_pipe_with_one_end_inside() -> None:
    def end(pid: int, number: int, link: str, flags: int) -> Task:
        return task(pid=pid, descriptors=(Descriptor(number, link, flags=flags),))

    both = [end(101, 1, "pipe:[1]", os.O_WRONLY), end(102, 0, "pipe:[1]", os.O_RDONLY)]
    assert preflight.half_pipes(both, 100) == {}
    assert list(preflight.half_pipes(both[:1], 100)) == ["pipe:[1]"]
    assert preflight.half_pipes([end(101, 1, "pipe:[1]", os.O_RDWR)], 100) == {}
    stdio = Task(100, 1, "S", "agent", descriptors=(Descriptor(1, "pipe:[9]", flags=os.O_WRONLY),))
    assert preflight.half_pipes([stdio, end(101, 2, "pipe:[9]", os.O_WRONLY)], 100) == {}


HEAD = "  sl  local_address rem_address   st tx_queue\n"


def test_connections_to_outside_are_seen_and_those_inside_are_not() -> None:
    own = {ipaddress.ip_address("10.0.0.2")}
    rows = [
        "0: 0100007F:1F90 0100007F:9C40 01 0",  # loopback
        "1: 0200000A:1F90 0200000A:9C40 01 0",  # to its own address
        "2: 0200000A:9C40 0100000A:0050 01 0",  # to 10.0.0.1 port 80
        "3: 0200000A:9C41 0100000A:0050 06 0",  # TIME_WAIT
        "4: 00000000:1F90 00000000:0000 0A 0",  # listens
    ]
    assert peers.outside_connections(HEAD + "\n".join(rows), lambda: own) == ["10.0.0.1 port 80"]
    six = "0: 0000000000000000FFFF00000200000A:9C40 0000000000000000FFFF00000100000A:0050 01 0"
    assert peers.outside_connections(HEAD + six, lambda: own) == ["10.0.0.1 port 80"]
    assert str(peers.parse("000080FE00000000FF005450B6AD1DFE")) == "fe80::5054:ff:fe1d:adb6"


def test_only_the_root_may_be_an_overlay() -> None:
    text = "1 0 0:1 / / rw - overlay overlay rw\n2 1 0:2 / /mnt rw - overlay overlay rw\n"
    text += "3 1 0:3 / /t rw - tmpfs tmpfs rw\n"
    assert [m.point for m in mounts.split(mounts.parse(text), frozenset()).foreign] == ["/mnt"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("Error (criu/sk-unix.c:351): unix: Unix socket 2090368 not found", "outside_peer"),
        ("Error (criu/fsnotify.c:1): fsnotify: \tHandle 0x3 cannot be opened", "watch"),
        ("Error (criu/files.c:1): Unknown shit 600 (anon_inode:[io_uring])", "io_uring"),
        ("Error (criu/cr-dump.c:389): Can't get rlimit 0: Operation not permitted", "other_user"),
    ],
)
def test_words_of_criu_have_a_kind(words: str, kind: str) -> None:
    assert reasons.name(words).startswith(f"{kind}: ")
    assert reasons.name("Error: something new") == ""


def test_names_that_criu_made_are_read_from_its_images(tmp_path: Path) -> None:
    def entry(name: str) -> bytes:
        message = pbuf.encode([(1, 1), (2, 5), (3, pbuf.encode([(1, 5), (2, 0), (6, name)]))])
        return len(message).to_bytes(4, "little") + message

    rows = entry("etc/passwd") + entry("c/link_remap.7") + entry("c/my-link_remap.8")
    (tmp_path / "files.img").write_bytes(bytes(8) + rows)
    assert remaps.names(tmp_path) == [b"c/link_remap.7"]
    (tmp_path / "files.img").write_bytes(bytes(8) + entry("etc/passwd"))
    assert remaps.names(tmp_path) == []
