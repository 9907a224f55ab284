"""The fronts of a router as its /metrics tell them, and streams of which it is known who serves them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from belayer import procs
from tests.support.streams import Stream
from tests.support.wait import eventually

_ROW = re.compile(r'^belayer_front_(\w+)\{front="(\d+)",pid="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass
class Served:
    """A stream, and the process that answers it."""

    stream: Stream
    pid: int


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=300).text


def rows(text: str, kind: str) -> dict[int, float]:
    """By pid."""
    return {int(pid): float(value) for name, _, pid, value in _ROW.findall(text) if name == kind}


def serving(url: str) -> list[int]:
    """Pids of the fronts that answer, in the order of their numbers."""
    found = sorted(
        (int(number), int(pid)) for name, number, pid, up in _ROW.findall(metrics(url)) if name == "up" and float(up)
    )
    return [pid for _, pid in found]


@contextmanager
def only(pid: int, pids: Iterable[int]) -> Iterator[None]:
    """All other fronts stand still: a connection that is made meanwhile is at ``pid``. All accept from one socket, and
    on a busy machine the one with the fewest connections may not be the one that is quick enough to take another."""
    stopped: list[int] = []
    try:
        for other in pids:
            if other != pid:
                os.kill(other, signal.SIGSTOP)
                stopped.append(other)
                eventually(lambda other=other: procs.state(other) == "T", what=f"front {other} stands still")
        yield
    finally:
        for other in stopped:
            os.kill(other, signal.SIGCONT)


def begin(url: str, make: Callable[[], Stream], at: int = 0) -> Served:
    """Start it, at the front ``at`` or (0) at whichever takes it: that is the one which counts a request more. Nothing
    else may be sent meanwhile."""
    if at:
        with only(at, serving(url)):
            served = begin(url, make)
        assert served.pid == at
        return served
    before = rows(metrics(url), "requests_total")
    stream = make()
    stream.start()

    def taken() -> list[int]:
        assert stream.is_alive() or stream.seen.status == 200, f"it was not taken: {stream.seen}"
        now = rows(metrics(url), "requests_total")
        return [pid for pid, count in now.items() if count > before.get(pid, 0.0)]

    pids = eventually(taken, what="a front has taken it", every=0.05)
    assert len(pids) == 1
    return Served(stream, pids[0])


def one_on_each(url: str, make: Callable[[], Stream], count: int = 2) -> list[Served]:
    """A stream at each front; each is held, or has a front of its own anyway."""
    pids = serving(url)
    assert len(pids) == count
    return [begin(url, make, pid) for pid in pids]


def is_front(pid: int, router: int) -> bool:
    """By its name, and by its descent from the router."""
    with open(f"/proc/{pid}/comm") as file:
        named = file.read().startswith("belayer-front")
    return named and any(pid in procs.children(zygote) for zygote in procs.children(router))


def clients(url: str, count: int = 2) -> dict[int, httpx.Client]:
    """A client with a connection that stays at one front, for each front, by its pid."""
    found: dict[int, httpx.Client] = {}
    pids = serving(url)
    assert len(pids) == count
    for pid in pids:
        found[pid] = httpx.Client(base_url=url, timeout=300)
        with only(pid, pids):
            found[pid].get("/health")  # answered with or without an engine
    return found
