"""What may be asked of a sandbox, and how its answer reads: from messages to the agent's terms and back. Pure."""

from __future__ import annotations

import re
import stat
from pathlib import PurePosixPath

from belayer.errors import Refused
from belayer.messages.sandbox import ExecAction, FileIn, Observation, Usage
from envkeeper.agentlink import MAX_REQUEST, Action, ActionResult
from envkeeper.records import SandboxRecord

MAX_OUTPUT = 4 << 20  # bytes per stream: two of them and their names must fit into one message
MAX_FILE_PART = 8 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def plan(ask: ExecAction, number: int, user: str, timeout_s: float, max_output: int) -> Action:
    """The agent's form of ``ask``; the last four are what holds where it says nothing. Raises Refused."""
    if bool(ask.command) == bool(ask.argv) and (ask.argv or ask.command):
        raise Refused("an action is a command for a session or the arguments of a program, not both")
    if ask.argv and ask.session:
        raise Refused("a program that is run directly (argv) has no session")
    texts = [ask.command, *ask.argv, ask.session, ask.cwd, ask.user, *ask.env, *ask.env.values()]
    if any("\0" in text for text in texts):
        raise Refused("a NUL cannot be part of an action")
    bad = [name for name in ask.env if not _NAME.fullmatch(name)]
    if bad:
        raise Refused(f"{bad[0]!r} is no name of a variable")
    if ask.argv and not ask.argv[0]:
        raise Refused("the first of argv is the program: it cannot be empty")
    action = Action(
        number=number,
        command=tuple(map(_raw, ask.argv)) if ask.argv else _raw(ask.command),
        timeout_s=ask.timeout_s or timeout_s,
        cap=min(ask.max_output or max_output, MAX_OUTPUT),
        session=ask.session,
        env=tuple(ask.env.items()),
        cwd=ask.cwd,
        user=ask.user or user,
        stdin=ask.stdin,
    )
    if len(action.encode()) > MAX_REQUEST:
        raise Refused(
            f"an action of {len(action.encode())} bytes is over the cap of {MAX_REQUEST}",
            remedy="put large input into a file first",
        )
    return action


def check_file(file: FileIn) -> None:
    """Raises Refused with what is wrong about it."""
    if not PurePosixPath(file.path).is_absolute() or "\0" in file.path + file.user:
        raise Refused(f"{file.path!r} is no absolute path")
    if len(file.data) > MAX_FILE_PART:
        raise Refused(
            f"{file.path}: {len(file.data)} bytes at once are over the cap of {MAX_FILE_PART}; append the rest"
        )
    if stat.S_ISDIR(file.mode) and (file.data or file.append):
        raise Refused(f"{file.path}: a folder has no bytes")
    if file.mode & ~(0o7777 | stat.S_IFDIR):
        raise Refused(f"{file.path}: {file.mode:o} are no permission bits")


def observe(
    record: SandboxRecord, result: ActionResult, ms: float, *, limit: str, cpu_s: float, peak: int
) -> Observation:
    return Observation(
        sandbox_id=record.sandbox_id,
        incarnation=record.incarnation,
        boundary=record.boundary,
        stdout=result.stdout.decode("utf-8", errors="replace"),
        stderr=result.stderr.decode("utf-8", errors="replace"),
        exit_code=result.code,
        ms=round(ms, 3),
        timed_out=result.timed_out,
        truncated=result.truncated,
        signal=result.signal,
        stdout_bytes=result.stdout_bytes,
        stderr_bytes=result.stderr_bytes,
        session_ended=result.shell_ended,
        limit=limit,
        usage=Usage(
            user_s=result.user_us / 1e6,
            system_s=result.system_us / 1e6,
            max_rss_kb=result.max_rss_kb,
            sandbox_cpu_s=round(cpu_s, 6),
            sandbox_peak_bytes=peak,
        ),
    )


def _raw(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")
