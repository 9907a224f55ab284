"""The worker's beat announces legal silence before it begins, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from belayer.clock import monotonic
from belayer.heartbeat import Beat, Pulse, Watch
from belayer.messages.worker import HELD, PAUSED
from belayerd.worker.heart import Heart


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "beat"


def pulse(file: Path) -> Pulse:
    found = Watch(file, monotonic()).observe(monotonic()).pulse
    assert found is not None
    return found


def test_a_long_prefill_announces_a_deadline_by_its_tokens(file: Path) -> None:
    heart = Heart(Beat(file), hang_limit_s=1.0)
    heart.turn("idle", 0, 0)
    heart.step_begins(4)
    assert pulse(file).deadline_s == 0.0, "a short step stays under the hang limit"
    heart.step_begins(1000)
    short = pulse(file)
    heart.step_begins(2000)
    long = pulse(file)
    assert short.phase == long.phase == "prefill"
    assert 1.0 < short.deadline_s < long.deadline_s
    heart.turn("step", 1, 0)
    assert (pulse(file).phase, pulse(file).deadline_s, pulse(file).step) == ("step", 0.0, 3)


def test_the_rate_is_what_was_seen_once_a_step_was_timed(file: Path) -> None:
    heart = Heart(Beat(file), hang_limit_s=1.0)
    heart.step_begins(100)
    assert pulse(file).deadline_s == 5.0, "before any step was timed the allowance is generous"
    heart.step_ends()  # 100 tokens took microseconds
    heart.turn("step", 1, 0)
    heart.step_begins(100)
    assert (pulse(file).phase, pulse(file).deadline_s) == ("step", 0.0)


@pytest.mark.parametrize(("hang_s", "every_s"), [(0.2, 0.02), (0.5, 0.025), (1.0, 0.05), (2.0, 0.1), (60.0, 0.1)])
def test_beats_are_as_many_as_a_hang_limit_needs(file: Path, hang_s: float, every_s: float) -> None:
    """An idle worker wakes for nothing else, and ten beats fit into the shortest limit that the config takes."""
    heart = Heart(Beat(file), hang_limit_s=hang_s)
    assert heart.every_s == pytest.approx(every_s)
    assert heart.every_s <= hang_s / 10


def test_an_announced_phase_is_written_at_once(file: Path) -> None:
    heart = Heart(Beat(file), hang_limit_s=1.0)
    for phase in ("loading", "warm-up: engine done"):
        heart.announce(phase, 180.0)
        assert (pulse(file).phase, pulse(file).deadline_s) == (phase, 180.0)


def test_a_step_inside_an_announced_phase_keeps_the_longer_deadline(file: Path) -> None:
    heart = Heart(Beat(file), hang_limit_s=1.0)
    heart.announce("loading", 180.0)
    heart.step_begins(1000)
    assert (pulse(file).phase, pulse(file).deadline_s) == ("loading", 180.0)
    heart.turn("idle", 0, 0)
    heart.step_begins(1000)
    assert (pulse(file).phase, pulse(file).deadline_s) == ("prefill", 41.0)


def test_a_long_phase_name_still_fits_the_block(file: Path) -> None:
    heart = Heart(Beat(file), hang_limit_s=1.0)
    heart.announce("x" * 500, 1.0)
    assert len(file.read_bytes()) == 256
    assert pulse(file).phase == "x" * 64


@pytest.mark.parametrize("phase", [PAUSED, HELD])
def test_requests_that_stand_still_on_purpose_are_said_to(file: Path, phase: str) -> None:
    """Whoever pauses, belayerd or a trainer by vLLM's own call: the counter may stand still for hours."""
    heart = Heart(Beat(file), hang_limit_s=1.0)
    heart.step_begins(1)
    heart.turn("step", 3, 0)
    heart.hold(3, 2, phase)
    said = pulse(file)
    assert (said.phase, said.running, said.waiting, said.deadline_s) == (phase, 3, 2, 1.0)
    heart.turn("idle", 3, 2)
    assert pulse(file).deadline_s == 0.0, "from here on a loop that makes no step is stuck"


def test_only_watched_time_is_silence(file: Path) -> None:
    """A host that stood still, watcher and all, for an hour: what counts is the time in which somebody looked."""
    beat, watch = Beat(file), Watch(file, now=0.0)
    beat.beat("step", step=1, waiting=0, running=1, tokens=1)
    assert watch.observe(0.1, gap_s=0.5).age_s == 0.0
    seen = watch.observe(3600.0, gap_s=0.5)
    assert seen.age_s == pytest.approx(0.5)
    assert seen.steps_flat_s == pytest.approx(0.5)
    for look in range(1, 11):  # a slow watcher is late, and not blind
        seen = watch.observe(3600.0 + look, gap_s=0.5)
    assert seen.age_s == pytest.approx(5.5)
