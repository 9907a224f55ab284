"""The operator's own commands: one JSON object on standard input, no shell, a session of its own, a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import msgspec

DEADLINE_S = 30.0


async def run(what: str, command: tuple[str, ...], value: msgspec.Struct, deadline_s: float, log: Any) -> bool:
    """True when it ended with 0. Anything else is logged as an error that begins with ``what``, since a pager that is
    broken must be seen somewhere."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as why:
        log.error(f"{what} cannot be started", command=command[0], why=str(why))
        return False
    try:
        async with asyncio.timeout(deadline_s):
            _, said = await child.communicate(msgspec.json.encode(value))
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
        log.error(f"{what} killed", command=command[0], after_s=deadline_s)
        return False
    if child.returncode:
        text = said.decode(errors="replace")[-300:]
        log.error(f"{what} failed", command=command[0], status=child.returncode, said=text)
    return child.returncode == 0
