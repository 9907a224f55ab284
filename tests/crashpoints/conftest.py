"""Fixtures of more than one file of these tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuowner.store import end_holder
from tests.support.owner_deaths import Place


@pytest.fixture
def places() -> Iterator[Callable[[], Place]]:
    made: list[Place] = []
    with tempfile.TemporaryDirectory(prefix="blc-", dir="/tmp") as root:

        def place() -> Place:
            folder = Path(root) / str(len(made))
            folder.mkdir()
            made.append(Place(folder))
            return made[-1]

        yield place
        for one in made:
            end_holder(one.holder)
