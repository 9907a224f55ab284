"""What a client may ask: every field of a request is judged here, before anything is looked up, made or changed. Pure.

The daemon ends at whatever is no BelayerError, so a number that Docker, ``struct`` or a path would choke on, far behind
the border, costs everybody's sandboxes. It is refused at the border instead: by field, value and range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from belayer.errors import Refused
from belayer.ids import is_name
from belayer.messages import sandbox as m
from envkeeper.actions import MAX_OUTPUT, check_file
from envkeeper.lineage import check_note

MAX_FORKS = 256
MIN_MEMORY_MB = 6  # what Docker demands
MAX_MB = 1 << 24
MAX_CPUS = 4096.0
MAX_PIDS = 1 << 22  # PID_MAX_LIMIT of Linux
MAX_TEXT = 4096  # bytes of a name, a path, a digest
MAX_ENTRIES = 1000
_MAX_VARIABLE = (128 << 10) - 1  # MAX_ARG_STRLEN of Linux: a longer one starts no program
_MAX_OFFSET = (1 << 63) - 1
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,63}}\Z){_LABEL}(?:\.{_LABEL})*")
_OURS = "belayer"  # labels by which containers are found again


def check(ask: Any) -> None:
    """Raises Refused that names the first field at fault."""
    match ask:
        case m.CreateSandbox():
            _create(ask)
        case m.ExecAction():
            _number("timeout_s", ask.timeout_s, m.MIN_ACTION_S, m.MAX_ACTION_S, default=True)
            _number("max_output", ask.max_output, 0, MAX_OUTPUT)
            _text("session", ask.session)
            _text("cwd", ask.cwd)
            _text("user", ask.user)
            _text("context_digest", ask.context_digest)
            _environment(ask.env)
        case m.WriteFiles():
            _text("context_digest", ask.context_digest)
            for file in ask.files:
                check_file(file)
                _text("path", file.path)
                _text("user", file.user)
        case m.ReadPath():
            _number("offset", ask.offset, 0, _MAX_OFFSET)
            _number("most", ask.most, 1, MAX_OUTPUT)
            _text("path", ask.path)
            if not ask.path.startswith("/"):
                raise _refused("path", ask.path, "an absolute path")
        case m.FullCheckpoint():
            _text("context_digest", ask.context_digest)
        case m.FullRestore():
            _checkpoint(ask.checkpoint_id)
            check_note(ask.note)
        case m.ForkSandbox():
            _fork(ask)


def _create(ask: m.CreateSandbox) -> None:
    _number("memory_mb", ask.memory_mb, MIN_MEMORY_MB, MAX_MB, default=True)
    _number("cpus", ask.cpus, 0.01, MAX_CPUS, default=True)
    _number("pids", ask.pids, 1, MAX_PIDS, default=True)
    _number("disk_mb", ask.disk_mb, 1, MAX_MB, default=True)
    if ask.name:
        _name("name", ask.name)
    if ask.image and (not _IMAGE.fullmatch(ask.image) or ".." in ask.image):
        raise _refused("image", ask.image, "the name or id of an image")
    if ask.hostname and not _HOST.fullmatch(ask.hostname):
        raise _refused("hostname", ask.hostname, "letters, digits and inner hyphens, in dotted labels, 63 at most")
    _text("user", ask.user)
    _environment(ask.env)
    _few("allow", ask.allow)
    _few("labels", ask.labels)
    for key, value in ask.labels.items():
        _text("labels", key)
        _text("labels", value)
        if not key or key == _OURS or key.startswith(f"{_OURS}."):
            raise _refused("labels", key, f'a key that is not empty, "{_OURS}" or "{_OURS}.…"')


def _fork(ask: m.ForkSandbox) -> None:
    _checkpoint(ask.checkpoint_id)
    check_note(ask.note)
    _number("count", ask.count, 1, MAX_FORKS)
    if len(ask.names) > MAX_FORKS:
        raise _refused("names", len(ask.names), f"at most {MAX_FORKS} names")
    seen = set[str]()
    for name in ask.names:
        _name("names", name)
        if name in seen:
            raise _refused("names", name, "each name once: a fork has its own name")
        seen.add(name)


def _number(field: str, value: float, low: float, high: float, *, default: bool = False) -> None:
    """``default``: 0 is allowed as well, for the configured one."""
    if default and value == 0:
        return
    if not math.isfinite(value) or not low <= value <= high:
        raise _refused(field, value, f"{low:.15g} to {high:.15g}{', or 0 for the configured one' if default else ''}")


def _name(field: str, value: str) -> None:
    if not is_name(value):
        raise _refused(field, value, "1-48 of a-z 0-9 _ . -, the first a letter or digit")


def _checkpoint(value: str) -> None:
    """It becomes part of a path."""
    if value and not is_name(value):
        raise _refused("checkpoint_id", value, "an id that checkpoints() lists, or empty for READY")


def _text(field: str, value: str) -> None:
    if "\0" in value:
        raise _refused(field, value, "text without a NUL")
    if len(value.encode()) > MAX_TEXT:
        raise _refused(field, value, f"at most {MAX_TEXT} bytes")


def _environment(env: Mapping[str, str]) -> None:
    _few("env", env)
    for key, value in env.items():
        if not key or "=" in key or "\0" in key:
            raise _refused("env", key, "the name of a variable: not empty, without = and NUL")
        if "\0" in value:
            raise _refused(f"env {_short(key)}", value, "text without a NUL")
        if len(f"{key}={value}".encode()) > _MAX_VARIABLE:
            raise _refused(f"env {_short(key)}", value, f"at most {_MAX_VARIABLE} bytes")


def _few(field: str, values: Iterable[str]) -> None:
    count = sum(1 for _ in values)
    if count > MAX_ENTRIES:
        raise _refused(field, count, f"at most {MAX_ENTRIES} entries")


def _refused(field: str, value: object, allowed: str) -> Refused:
    return Refused(f"{field} is {_short(value)}: allowed is {allowed}", kept="everything: nothing was begun")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
