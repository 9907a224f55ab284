"""What a rank's answer must say to be in step: pure, each field by itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from belayerd.worker.ranks import Answer, apart

MINE = Answer(serial=7, heard=b"h", found=b"f", version=3, weights="d1")


def test_a_rank_in_step_is_in_step() -> None:
    assert apart(MINE, msgspec.msgpack.decode(msgspec.msgpack.encode(MINE), type=Answer)) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"serial": 8}, "at call 8, the leader at 7"),
        ({"serial": 6}, "at call 6, the leader at 7"),
        ({"heard": b"x"}, "heard another step"),
        ({"version": 4}, "weights v4"),
        ({"weights": "d2"}, "weights v3 d2"),
        ({"found": b"x"}, "found something else"),
    ],
)
def test_each_difference_is_named(change: dict[str, Any], said: str) -> None:
    assert said in apart(MINE, msgspec.structs.replace(MINE, **change))
