"""A private host whose workers can be told to fail (tests.support.sabotage), and whose alerts go into a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from belayer.localhost import ROLLOUT, LocalHost
from tests.support.patience import patient
from tests.support.wait import eventually


class SaboteurHost(LocalHost):
    """``config``: TOML without [policy]; ``policy``: further rows of it."""

    def __init__(self, root: Path, config: str, policy: str = "") -> None:
        self.alerts = root / "alerts.jsonl"
        # One write for each: two alerts at a time must not come out as half lines.
        command = json.dumps(["sh", "-c", f'told=$(cat); printf "%s\\n" "$told" >>{self.alerts}'])
        extra = f"[policy]\nrepeat_window_s = 0.001\nalert_command = {command}\n{policy}\n"
        super().__init__(root, patient(f"{config}\n{extra}[envkeeper]\nenabled = false\n"))
        self._zygote: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """The zygote that can be told to fail, then the daemons, which find it there; until all is protected."""
        with self.paths.log("zygote").open("ab") as log:
            command = [sys.executable, "-m", "tests.support.sabotage"]
            env = {**os.environ, "BELAYER_ROOT": str(self.root)}
            self._zygote = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        eventually(self.paths.zygote_sock.exists, within=900, what="the zygote listens", every=0.2)
        self.start(ROLLOUT)
        self.until_protected()

    def stop(self) -> None:
        if self._zygote is not None:  # first, or it forks one more
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None
        super().stop()

    @contextmanager
    def sabotage(self, what: str) -> Iterator[None]:
        flag = self.paths.run / "sabotage"
        flag.write_text(what)
        try:
            yield
        finally:
            flag.unlink()

    def alerted(self) -> list[dict[str, Any]]:
        text = self.alerts.read_text() if self.alerts.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line]
