"""For the whole suite.

pytest asks ``tracemalloc`` where an unclosed object was made, and imports it at that moment, which can be inside the
collector, inside another import of it: then a test errs over a half-made module. Imported here, it is whole.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from belayer.errors import BelayerError
from belayer.sandbox import Sandbox
from tests.support.envhost import EnvHost

__all__ = ["tracemalloc"]


@pytest.fixture
def box(host: EnvHost) -> Iterator[Sandbox]:
    """A sandbox of the module's ``host``, gone when the test is over; one that was lost leaves its connection only."""
    made = host.create()
    yield made
    try:
        made.destroy()
    except BelayerError:
        made.close()
