"""What tests of a whole host ask it, and what of an answer must not differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from belayer.localhost import LocalHost
from belayer.messages.control import HostStatusReply, SlotView
from tests.support.streams import Seen


def ctl(host: LocalHost, *words: str, within: float = 180.0) -> tuple[int, Any, str]:
    """(exit code, what --json printed, stderr) of belayerctl. ``within``: what a daemon has for its answer; one that is
    gone has it too."""
    command = [sys.executable, "-m", "belayerctl", *words, "--json", "--timeout", str(within)]
    env = {**os.environ, "BELAYER_ROOT": str(host.root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def slot(status: HostStatusReply, name: str) -> SlotView:
    return next(row for row in status.slots if row.slot == name)


def main_pid(host: LocalHost, name: str) -> int:
    return next(worker.pid for worker in slot(host.status(), name).workers if worker.role == "main")


def facts(seen: Seen) -> tuple[list[int], str, list[str], list[dict[str, Any]], int, int]:
    """What must not differ between a failed and an unfailed run."""
    assert seen.error is None
    assert seen.errors == []
    return seen.token_ids, seen.text, seen.finishes, seen.usages, seen.roles, seen.done


def pids(status: HostStatusReply, name: str) -> list[int]:
    return [worker.pid for worker in slot(status, name).workers]
