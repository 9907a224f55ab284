"""What the processes of a failing test said last: the ends of the logs below the roots that it works with, and how far
its streams had come. The folders are gone when somebody reads the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.support.streams import Seen, Stream

_FILES, _LINES, _WIDTH = 8, 12, 400


def of_logs(root: Path) -> str:
    """The last lines of the logs that were written last."""
    try:
        found = [path for pattern in ("*.log", "log") for path in root.rglob(pattern) if is_file(path)]
    except OSError as why:  # a folder was removed under it
        return str(why)
    last = sorted(found, key=modified)[-_FILES:]
    return "\n".join(f"--- {path.relative_to(root)}\n{tail(path)}" for path in last)


def tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()[-_LINES:]
    except OSError as why:
        return str(why)
    return "\n".join(line[:_WIDTH] for line in lines)


def is_file(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_size > 0
    except OSError:
        return False


def modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # swept meanwhile
        return 0.0


def of_stream(name: str, seen: Seen) -> str:
    last = seen.chunks[-1] if seen.chunks else {}
    how = f"status {seen.status}, {len(seen.token_ids)} tokens, finishes {seen.finishes}, done {seen.done}"
    return f"{name}: {how}, error {seen.error!r}, errors {seen.errors}, last chunk {str(last)[:_WIDTH]}"


def sections(things: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """(title, text) of what is known about the fixtures and the local names of a test."""
    roots: dict[Path, str] = {}
    streams: dict[int, str] = {}
    for name, thing in flat(things):
        if isinstance(thing, Stream | Seen):
            seen = thing.seen if isinstance(thing, Stream) else thing
            streams[id(seen)] = of_stream(name, seen)
        for root in roots_of(thing):
            roots.setdefault(root, name)
    if streams:
        yield "streams", "\n".join(streams.values())
    for root, name in roots.items():
        if said := of_logs(root):
            yield f"last words below {root} ({name})", said


def flat(things: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Also what small collections hold, and the streams of tests.support.fronts."""
    for name, thing in things:
        inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
        for one in [thing, *list(inner)[:50]]:
            yield name, one
            if isinstance(stream := part(one, "stream"), Stream):
                yield name, stream


def part(thing: Any, name: str) -> Any:
    """Of what an object holds; no property is asked, which might fail or wait."""
    return getattr(thing, "__dict__", {}).get(name)


def roots_of(thing: Any) -> list[Path]:
    """Of a host, a stack or whatever else has processes below a root of its own."""
    roots = [part(one, "root") for one in (thing, part(thing, "host"), part(thing, "stack"))]
    return [root for root in roots if isinstance(root, Path) and root.is_dir()]
