"""Every kind of program is restored exactly or refused by name (promise E4), on the engine of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from belayer.sandbox import Sandbox
from tests.conformance import document, suite
from tests.conformance.cases import deeds, refused
from tests.conformance.model import Any_, Case, Deed, Refusal
from tests.conformance.runner import Outcome, Stack, prepare, run_refusal
from tests.support.envhost import TREE, EnvHost

ROWS = (
    "1 2 3 4 5 6 8 9 10 11 13 14 15 17 19 21 23 24 26 27 28 29 30 32 34 35 36 37 38 39 40 42 44 45 47 48 50 51 53 55 "
    "58 59 60 61 62"
)
PROBES = range(1, 58)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    host = EnvHost.start(tmp_path_factory.mktemp("conf"))
    yield Stack(host, suite.SYSTEM)
    host.stop()


@pytest.fixture(scope="module")
def outcomes(stack: Stack) -> dict[str, dict[str, Outcome]]:
    """By theme, filled by the first test of each."""
    return {}


@pytest.fixture(scope="module")
def living(stack: Stack) -> Iterator[Sandbox]:
    """The sandbox that survives all refusals."""
    box = stack.create()
    prepare(box)
    box.exec("cd /; (i=0; while :; do i=$((i+1)); echo $i >> /count; sleep 0.01; done) &")
    box.checkpoint()
    yield box
    box.checkpoint()
    box.kill()
    box.restore()
    seen = box.exec(
        "n=$(wc -l < /count); until [ $(wc -l < /count) -gt $n ]; do :; done; awk '$1 != NR { exit 1 }' /count"
    )
    assert seen.exit_code == 0, "after all refusals its counter has a gap"
    stack.destroy(box)


def named(cases: list[Any_]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in cases]


EXACT = [(theme, case) for theme, cases in suite.THEMES.items() for case in cases]


@pytest.mark.docker
@pytest.mark.parametrize(("theme", "case"), [pytest.param(theme, case, id=case.name) for theme, case in EXACT])
def test_restored_exactly(stack: Stack, outcomes: dict[str, dict[str, Outcome]], theme: str, case: Case) -> None:
    if theme not in outcomes:
        outcomes[theme] = {seen.name: outcome for seen, outcome in suite.theme(stack, suite.THEMES[theme])}
    outcome = outcomes[theme][case.name]
    assert suite.right(case, outcome), f"{case.title}: {outcome.how}: {outcome.words}"


@pytest.mark.docker
@pytest.mark.parametrize("case", named([*refused.CASES]))
def test_refused_by_name(stack: Stack, living: Sandbox, case: Refusal) -> None:
    outcome = run_refusal(stack, living, case)
    assert suite.right(case, outcome), f"{case.title}: {outcome.how}: {outcome.words}"


@pytest.mark.docker
@pytest.mark.parametrize("case", named([*deeds.CASES]))
def test_done_to_envkeeper(stack: Stack, case: Deed) -> None:
    assert case.run(stack)


def test_every_row_and_probe_has_a_case() -> None:
    ids = [name for case in suite.every() for name in case.ids]
    assert len(ids) == len(set(ids))
    wanted = {f"W{row}" for row in ROWS.split()} | {f"P{probe}" for probe in PROBES}
    assert wanted - set(ids) == set()
    assert len(ROWS.split()) == 45


def test_the_document_agrees_with_the_cases_and_shows_nothing_wrong() -> None:
    text = (TREE / "docs/sandbox-support.md").read_text()
    assert text == document.render(), "run: python -m tests.conformance.suite --name STACK"
    assert "**wrong**" not in text
    for column in document.columns():
        for case in suite.every():
            how, words = column.outcomes.get(case.name, ("missing", ""))
            assert suite.right(case, Outcome(how, words)), f"{case.name} on {column.stack}: {how}: {words}"
    assert len(re.findall(r"^\| [WPB]\d", text, re.MULTILINE)) == len(suite.every())
