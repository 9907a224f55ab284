"""The pure parts: RPC encoding, mounts, and the refusals of the preflight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkeeper import pbuf
from envkeeper.mounts import Mount, parse, split
from envkeeper.preflight import Descriptor, Task, judge

fields = st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 2**63) | st.binary(max_size=300)), max_size=20)


@given(fields)
def test_fields_come_back_in_order(given_fields: list[tuple[int, int | bytes]]) -> None:
    expected: dict[int, list[int | bytes]] = {}
    for number, value in given_fields:
        expected.setdefault(number, []).append(value)
    assert pbuf.decode(pbuf.encode(list(given_fields))) == expected


def test_known_bytes() -> None:
    # The example of the encoding guide: field 1 = 150, field 2 = "testing".
    assert pbuf.encode([(1, 150), (2, "testing")]).hex() == "08960112" + "07" + b"testing".hex()
    assert pbuf.encode([(3, True), (1, -1)]).hex() == "1801" + "08" + "ff" * 9 + "01"


@given(st.binary(max_size=60))
def test_garbage_is_named_and_never_loops(data: bytes) -> None:
    try:
        pbuf.decode(data)
    except pbuf.PbufError:
        return


MOUNTINFO = """\
72 48 0:39 / / rw,relatime master:2 - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
73 72 0:42 / /proc rw,nosuid - proc proc rw
78 77 0:29 /docker/3e /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu
89 72 254:0 /opt/belayer/agent/belayer-agent-1 /.belayer/agent ro,relatime - ext4 /dev/vda rw
54 73 0:43 /null /proc/keys rw,nosuid - tmpfs tmpfs rw
91 72 0:99 / /mnt/a\\040b rw - fuse.sshfs remote: rw
92 72 254:0 /srv /srv rw - ext4 /dev/vda rw
"""


def test_mounts_are_told_apart() -> None:
    found = split(parse(MOUNTINFO), frozenset({"/.belayer/agent"}))
    assert found.external == ("/sys/fs/cgroup/cpu", "/.belayer/agent")
    assert found.masked == ("/proc/keys",)
    assert [mount.point for mount in found.foreign] == ["/mnt/a b", "/srv"]


def task(pid: int, parent: int, state: str = "S", **more: object) -> Task:
    return Task(pid=pid, parent=parent, state=state, name="x", **more)  # type: ignore[arg-type]


CLEAN = [task(10, 1), task(11, 10), task(12, 11)]


def test_a_clean_tree_has_no_findings() -> None:
    assert judge(10, CLEAN) == []


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        (task(20, 1), "foreign_process"),
        (task(20, 999), "foreign_process"),
        (task(20, 10, "T"), "stopped"),
        (task(20, 10, "t", tracer=11), "traced"),
        (task(20, 10, descriptors=(Descriptor(5, "anon_inode:[io_uring]"),)), "io_uring"),
    ],
)
def test_each_refusal_has_its_name(extra: Task, kind: str) -> None:
    findings = judge(10, [*CLEAN, extra])
    assert [finding.kind for finding in findings] == [kind]
    assert "pid 20" in findings[0].text


def test_a_zombie_is_no_reason() -> None:
    assert judge(10, [*CLEAN, task(20, 1, "Z")]) == []


def test_nested_namespaces_and_foreign_mounts_are_named() -> None:
    home, other = ("m1", "p1", "n1", "i1", "u1", "us1"), ("m2", "p1", "n1", "i1", "u1", "us1")
    tasks = [task(10, 1, spaces=home), task(11, 10, spaces=other)]
    findings = judge(10, tasks, [Mount("/", "/mnt", "fuse", "x")])
    assert [finding.kind for finding in findings] == ["nested_namespace", "foreign_mount"]
    assert "mnt namespace" in findings[0].text
    assert "/mnt" in findings[1].text


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(1, 30)), max_size=30))
def test_loops_in_a_torn_listing_end(pairs: list[tuple[int, int]]) -> None:
    judge(2, [task(pid, parent) for pid, parent in pairs])
