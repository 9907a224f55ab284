"""The fronts of a router as its /metrics tell them, and streams of which it is known who serves them."""

from __future__ import annotations

import re
from collections.abc import Callable
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


def begin(url: str, make: Callable[[], Stream]) -> Served:
    """Start it; its front is the one that counts a request more. Nothing else may be sent meanwhile."""
    before = rows(metrics(url), "requests_total")
    stream = make()
    stream.start()

    def taken() -> list[int]:
        now = rows(metrics(url), "requests_total")
        return [pid for pid, count in now.items() if count > before.get(pid, 0.0)]

    pids = eventually(taken, what="a front has taken it", every=0.05)
    assert len(pids) == 1
    return Served(stream, pids[0])


def one_on_each(url: str, make: Callable[[], Stream], count: int = 2) -> list[Served]:
    """Streams that are held, as many as it takes until each front has one: a connection goes to the front with the
    fewest, unless that one is busy for a moment."""
    begun: list[Served] = []
    while len({one.pid for one in begun}) < count:
        assert len(begun) < 20, f"after 20 streams only {begun} have served"
        begun.append(begin(url, make))
    return begun


def is_front(pid: int, router: int) -> bool:
    """By its name, and by its descent from the router."""
    with open(f"/proc/{pid}/comm") as file:
        named = file.read().startswith("belayer-front")
    return named and any(pid in procs.children(zygote) for zygote in procs.children(router))


def clients(url: str, count: int = 2) -> dict[int, httpx.Client]:
    """A client with a connection that stays at one front, for each front, by its pid. Something must serve."""
    found: dict[int, httpx.Client] = {}
    for _ in range(20):
        client = httpx.Client(base_url=url, timeout=120)
        before = rows(client.get("/metrics").text, "requests_total")
        assert (
            client.post("/v1/completions", json={"model": "smollm2", "prompt": "x", "max_tokens": 1}).status_code == 200
        )
        now = rows(client.get("/metrics").text, "requests_total")
        pid = next(pid for pid, value in now.items() if value > before.get(pid, 0.0))
        if pid in found:
            client.close()
        else:
            found[pid] = client
        if len(found) == count:
            return found
    raise AssertionError(f"20 connections reached only {list(found)}")
