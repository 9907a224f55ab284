"""Set-up steps on machines that are not as they should be: one sentence, remedy, exit code, nothing changed.

Each case runs in its own container of the sandbox image, with this tree read-only.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.docker


def on_a_machine(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["docker", "run", "--rm", "--network", "none", "--volume", f"{TREE}/setup:/tree/setup:ro"]
    command += ["--env", "BELAYER_CACHE=/tmp/cache", *options, "belayer-sandbox:base", "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_existing_daemon_json_is_never_touched() -> None:
    done = on_a_machine(
        "mkdir -p /etc/docker && echo '{\"debug\": true}' > /etc/docker/daemon.json"
        " && /tree/setup/daemon_json.sh && cat /etc/docker/daemon.json && ls /etc/docker"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ['{"debug": true}', "daemon.json"]


def test_missing_daemon_json_is_written_once() -> None:
    done = on_a_machine(
        "/tree/setup/daemon_json.sh && /tree/setup/daemon_json.sh && python3 -c '"
        'import json; print(json.load(open("/etc/docker/daemon.json"))["runtimes"]["belayer"]["path"])\''
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[daemon_json] wrote /etc/docker/daemon.json (there was none)",
        "/opt/belayer/bin/belayer-runtime",
    ]


def test_without_root_the_first_step_refuses_and_changes_nothing() -> None:
    done = on_a_machine("/tree/setup/all.sh; status=$?; ls /opt; exit $status", "--user", "1000")
    assert done.returncode == 2
    assert "[packages] FAILED: this step changes the system and needs root" in done.stderr
    assert "remedy: run it as root" in done.stderr
    assert done.stdout.splitlines() == ["-- setup 1/8: packages"]


def test_a_mirror_that_does_not_answer_is_named() -> None:
    done = on_a_machine("/tree/setup/packages.sh")
    assert done.returncode == 1
    assert "[packages] FAILED: no package docker.io on offer after apt-get update" in done.stderr
    assert "/etc/apt/sources.list.d" in done.stderr


def test_a_failing_step_shows_the_end_of_its_log() -> None:
    step = (
        "mkdir -p /x/setup && cp /tree/setup/lib.sh /x/setup/ && cat > /x/setup/step.sh <<'END'\n"
        '. "$(dirname "$0")/lib.sh"\n'
        "long 'the thing' 'do that' bash -c 'echo why it broke; exit 7'\n"
        "echo not reached\nEND\nbash /x/setup/step.sh"
    )
    done = on_a_machine(step)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["[step] the thing ..."]
    lines = done.stderr.splitlines()
    assert lines[0].strip() == "why it broke"
    assert lines[1].startswith("[step] FAILED: the thing (exit status 7; whole log: /tmp/cache/logs/step.log)")
    assert lines[2] == "[step] remedy: do that"
