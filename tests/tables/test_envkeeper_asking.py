"""Every bad field of a request is refused by its name, before anything is done."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer.errors import Refused
from belayer.messages.sandbox import (
    CreateSandbox,
    ExecAction,
    FileIn,
    ForkSandbox,
    FullCheckpoint,
    FullRestore,
    ReadPath,
    WriteFiles,
)
from envkeeper.asking import check

NOT_FINITE = (math.nan, math.inf, -math.inf)
LONG = "x" * 5000

BAD: dict[str, tuple[type[Any], dict[str, tuple[Any, ...]]]] = {
    "create": (
        CreateSandbox,
        {
            "memory_mb": (-1, 1, 5, 1 << 40),
            "cpus": (*NOT_FINITE, -1.0, 0.001, 1e9),
            "pids": (-1, 1 << 40),
            "disk_mb": (-1, 1 << 60),
            "name": ("UP", "a/b", "..", "a\n", "x" * 49),
            "image": ("../containers/json", "a b", "/x", "a\0b"),
            "hostname": ("-a", "a-", "a_b", "a b", "x" * 64, "a..b", "a\n"),
            "user": ("a\0b", LONG),
            "env": ({"": "v"}, {"a=b": "v"}, {"a\0": "v"}, {"a": "\0"}, {"a": "x" * (1 << 18)}),
            "labels": ({"": "v"}, {"belayer": "v"}, {"belayer.role": "holder"}, {"a": "\0"}),
        },
    ),
    "exec": (
        ExecAction,
        {
            "timeout_s": (*NOT_FINITE, -1.0, 1e-9, 86_401.0, 1e300),
            "max_output": (-5, (4 << 20) + 1, 1 << 60),
            "env": ({"": "v"}, {"a=b": "v"}),
            "session": ("a\0b",),
            "cwd": (LONG,),
        },
    ),
    "fork": (
        ForkSandbox,
        {
            "count": (-1, 0, 257, 1 << 62),
            "names": (("q", "q"), ("../q",), ("",), tuple(f"n{number}" for number in range(257))),
            "checkpoint_id": ("../../x", "/etc", "..", "k1\0"),
            "note": ("x" * 20_000,),
        },
    ),
    "restore": (FullRestore, {"checkpoint_id": ("../../x", "/etc", "."), "note": ("x" * 20_000,)}),
    "checkpoint": (FullCheckpoint, {"context_digest": (LONG, "\0")}),
    "read": (ReadPath, {"offset": (-1, 1 << 63), "most": (-1, 0, 1 << 40), "path": ("", "rel", "/a\0b", "/" + LONG)}),
    "write": (WriteFiles, {"context_digest": (LONG,)}),
}
NEEDED: dict[str, dict[str, Any]] = {
    "create": {},
    "exec": {"sandbox_id": "s", "incarnation": "s.1", "boundary": 0},
    "fork": {"sandbox_id": "s"},
    "restore": {"sandbox_id": "s"},
    "checkpoint": {"sandbox_id": "s", "incarnation": "s.1", "boundary": 0, "context_digest": ""},
    "read": {"sandbox_id": "s", "incarnation": "s.1", "path": "/x"},
    "write": {"sandbox_id": "s", "incarnation": "s.1", "boundary": 0, "files": (FileIn(path="/x", data=b""),)},
}
ROWS = [(kind, field, value) for kind, (_, fields) in BAD.items() for field in fields for value in fields[field]]


@pytest.mark.parametrize(("kind", "field", "value"), ROWS, ids=[f"{k}-{f}-{v!r:.30}" for k, f, v in ROWS])
def test_a_bad_field_is_refused_by_name(kind: str, field: str, value: Any) -> None:
    with pytest.raises(Refused, match=field):
        check(BAD[kind][0](**(NEEDED[kind] | {field: value})))


@pytest.mark.parametrize("kind", BAD)
def test_what_is_left_out_is_fine(kind: str) -> None:
    check(BAD[kind][0](**NEEDED[kind]))


def test_good_values_at_the_ends_of_their_ranges_pass() -> None:
    check(CreateSandbox(memory_mb=6, cpus=0.01, pids=1, disk_mb=1, hostname="a.b-c", image="r:5000/a/b@sha256:00"))
    check(ExecAction(**NEEDED["exec"], timeout_s=86_400.0, max_output=4 << 20, env={"A": ""}))
    check(ForkSandbox(sandbox_id="s", count=256, names=("a", "b"), checkpoint_id="k3-0123456789ab"))


@given(st.floats(), st.integers(-(1 << 63), (1 << 64) - 1))
def test_whatever_number_passes_fits_the_agent_and_docker(number: float, whole: int) -> None:
    try:
        check(ExecAction(**NEEDED["exec"], timeout_s=number, max_output=whole))
        check(CreateSandbox(cpus=number, memory_mb=whole, pids=whole, disk_mb=whole))
    except Refused:
        return
    assert 0 <= int(number * 1000) < 1 << 32
    assert (number == 0) == (int(number * 1000) == 0)
    assert 0 <= whole < 1 << 32
