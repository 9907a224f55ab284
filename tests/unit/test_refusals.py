"""A daemon that refused to start is told from one that loads and from one that nobody started."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import daemon, refusals
from belayer.errors import AlreadyRuns, BelayerError, ConfigInvalid, HostNotReady
from belayer.messages.control import HostStatusReply
from belayer.paths import Paths
from belayerctl.status import why_silent

# The lock of an owner, held by this very process: its command line is no daemon's, so nobody takes it for one.
NAME = "owner-kv"
HOLD = """
import pathlib, sys
from belayer.daemon import OnlyOne
lock = OnlyOne(pathlib.Path(sys.argv[2]), sys.argv[3])
print("held", flush=True)
sys.stdin.read()
"""


TREE = Path(__file__).parents[2]


@pytest.fixture
def root() -> Iterator[Path]:
    """Short: unix sockets go below it."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        yield Path(folder)


def left(run: Path, error: BelayerError = ConfigInvalid("no such key", remedy="mend it")) -> int:  # noqa: B008
    return daemon.Told(run, NAME).say(error)


def test_it_says_why_until_the_next_one_has_the_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusals.why_silent(tmp_path, NAME) == "gpuowner@kv does not run"
    assert left(tmp_path) == 2
    assert "no such key; mend it" in capsys.readouterr().err, "stderr has it as before"
    said = refusals.why_silent(tmp_path, NAME)
    assert said.startswith("gpuowner@kv refused to start ")
    assert said.endswith(" s ago: no such key; mend it")
    assert (tmp_path / f"{NAME}.refused").stat().st_mode & 0o777 == 0o600
    left(tmp_path, ConfigInvalid("another one"))
    assert "another one" in refusals.why_silent(tmp_path, NAME), "the last one counts"
    lock = daemon.OnlyOne(tmp_path, NAME)
    assert refusals.why_silent(tmp_path, NAME) == "gpuowner@kv does not run"
    os.close(lock.fileno())


def test_what_another_try_may_mend_is_no_refusal(tmp_path: Path) -> None:
    assert left(tmp_path, HostNotReady("Docker does not answer")) == 3
    found = refusals.read(tmp_path, NAME)
    assert found is not None
    assert not found.final
    assert "could not start (exit 3; worth another try)" in refusals.why_silent(tmp_path, NAME)


def test_a_second_instance_says_nothing_about_the_first(tmp_path: Path) -> None:
    lock = daemon.OnlyOne(tmp_path, NAME)
    with pytest.raises(AlreadyRuns) as why:
        daemon.OnlyOne(tmp_path, NAME)
    assert daemon.Told(tmp_path, NAME).say(why.value) == 2
    assert refusals.read(tmp_path, NAME) is None
    os.close(lock.fileno())


def test_where_nothing_is_nothing_is_made(tmp_path: Path) -> None:
    left(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"{NAME}.refused").write_bytes(b"\xc1")
    assert refusals.read(tmp_path, NAME) is None, "what cannot be read says nothing"


def test_one_that_loads_is_told_from_both(tmp_path: Path) -> None:
    """A process with an owner's command line that holds the lock and never answers; and a second start of it, with a
    mistake in its configuration, which says nothing about the first."""
    held = subprocess.Popen(
        [sys.executable, "-c", HOLD, "gpuowner", str(tmp_path), NAME],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TREE,
    )  # fmt: skip
    assert held.stdout is not None
    try:
        assert held.stdout.readline() == "held\n"
        loading = f"gpuowner@kv does not answer: pid {held.pid} is loading, or hangs"
        assert refusals.why_silent(tmp_path, NAME) == loading
        left(tmp_path)
        assert refusals.why_silent(tmp_path, NAME) == loading
    finally:
        held.kill()
        held.communicate()
    assert refusals.why_silent(tmp_path, NAME) == "gpuowner@kv does not run"


def test_the_status_names_each_daemon_that_is_silent(root: Path) -> None:
    paths = Paths(root).make()
    daemon.Told(paths.run, "router").say(ConfigInvalid("port 8000 of 127.0.0.1 is in use"))
    host = HostStatusReply(host="h", pid=1, instance="i", at=0.0, slots=(), router="", router_url="")
    silent = why_silent(paths, host, None, None)
    assert list(silent) == ["gpuowner@weights", "gpuowner@kv", "belayer-router", "envkeeper"]
    assert silent["belayer-router"].endswith("ago: port 8000 of 127.0.0.1 is in use")
    assert silent["envkeeper"] == "envkeeper does not run"


def test_belayerd_that_refused_says_so_in_the_status(root: Path) -> None:
    """The real daemon, and the real command beside it."""
    paths = Paths(root).make()
    paths.config.write_text("[host]\nnonsense = 1\n")
    env = {**os.environ, "BELAYER_ROOT": str(root)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=120, check=False)

    assert run("belayerctl", "status").stderr.startswith("belayerctl: belayerd does not run (no socket at ")
    assert run("belayerd", "--config", str(paths.config)).returncode == 2
    status = run("belayerctl", "status")
    assert status.returncode == 3
    assert "belayerd refused to start " in status.stderr
    assert "host: object contains unknown field `nonsense`" in status.stderr
