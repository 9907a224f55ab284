"""The operator's alert command: it gets the alert, and whatever becomes of it, belayerd goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from belayer import procs
from belayerd import alerts
from tests.support.wait import eventually

ALERT = alerts.Alert(host="h", slot="slot0", state="quarantined", generation=3, reason="second failure", at=12.5)


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))


def told(*command: str, deadline_s: float = 30.0) -> Log:
    log = Log()

    async def main() -> None:
        made = alerts.Alerts(command, log, deadline_s)
        made.tell(ALERT)
        await made.settled()

    asyncio.run(main())
    return log


def test_the_command_gets_the_alert_as_json(tmp_path: Path) -> None:
    into = tmp_path / "alert.json"
    log = told("sh", "-c", 'cat >"$0"', str(into))
    assert json.loads(into.read_text()) == {
        "host": "h", "slot": "slot0", "state": "quarantined", "generation": 3, "reason": "second failure", "at": 12.5
    }  # fmt: skip
    assert [event for event, _ in log.lines] == ["alert"]


def test_without_a_command_the_log_has_it() -> None:
    assert told().lines == [("alert", {"slot": "slot0", "state": "quarantined", "reason": "second failure"})]


def test_a_command_that_fails_or_is_not_there_is_said() -> None:
    event, fields = told("sh", "-c", "echo pager is down >&2; exit 3").lines[1]
    assert (event, fields["status"], fields["said"].strip()) == ("alert command failed", 3, "pager is down")
    assert told("/nonexistent/pager").lines[1][0] == "alert command cannot be started"


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    for deadline_s in (1.0, 10.0, 60.0):  # so long that the command has got as far as its hang
        log = told("sh", "-c", 'sleep 600 & echo $! >"$0"; wait', str(pid), deadline_s=deadline_s)
        assert log.lines[1][0] == "alert command killed"
        if pid.exists() and pid.read_text():
            break
    eventually(lambda: not procs.lives(int(pid.read_text())), what="its child is dead")
