"""For the whole suite.

pytest asks ``tracemalloc`` where an unclosed object was made, and imports it at that moment, which can be inside the
collector, inside another import of it: then a test errs over a half-made module. Imported here, it is whole.

With a failure the report has what the daemons of the test said last.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from belayer.errors import BelayerError
from belayer.sandbox import Sandbox
from tests.support import last_words
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None:
        names: dict[str, Any] = dict(getattr(item, "funcargs", None) or {})
        for entry in call.excinfo.traceback:
            names |= entry.locals
        try:
            report.sections += last_words.sections(names.items())
        except Exception as why:  # noqa: BLE001 - a report that lacks something must not end the whole run
            report.sections.append(("last words", repr(why)))
    return report
