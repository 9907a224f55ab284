"""Requests of other hosts that run here: which link each came by, and where each link's counts are. Pure.

The other side of ``RemoteRules``: for each link of a peer this stands for a worker. A peer that is silent for too long
loses what runs for it, since its host goes on with it elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from belayer.errors import Fenced, Refused
from belayer.messages.fleet import Greeting, Life
from belayerd.router.attention import Attention

Key = tuple[str, int, str]  # host, its front, slot of ours


@dataclass(slots=True)
class GuestLink:
    """``route``: the connection that it was last heard by. ``seq``: of its next message; ``got``: messages from it."""

    key: Key
    greeting: Greeting
    token: bytes
    route: bytes
    heard_at: float
    seq: int = 0
    got: int = 0
    live: dict[str, int] = field(default_factory=dict)  # request id -> position of its next token

    @property
    def host(self) -> str:
        return self.key[0]


class Guests:
    def __init__(self, orphan_s: float, gap_s: float = math.inf) -> None:
        """``gap_s``: how much of the time between two looks counts as silence of a peer."""
        self._orphan_s, self._attention = orphan_s, Attention(gap_s)
        self._links: dict[Key, GuestLink] = {}
        self._by_route: dict[bytes, GuestLink] = {}
        self._lives: dict[str, Life] = {}
        self._of: dict[str, GuestLink] = {}  # request id -> link

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._of

    def __len__(self) -> int:
        return len(self._of)

    def by_host(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for link in self._of.values():
            counts[link.host] = counts.get(link.host, 0) + 1
        return counts

    def on(self, slot: str) -> int:
        return sum(link.greeting.slot == slot for link in self._of.values())

    def alive(self, host: str, life: Life) -> None:
        """A peer says which life of its host speaks. Raises Fenced when a later one was heard."""
        known = self._lives.get(host)
        if known is not None and life != known and life.number <= known.number:
            raise Fenced(
                f"{host} speaks as life {life.number}, and life {known.number} was heard", remedy="restart its router"
            )
        self._lives[host] = life

    def greet(
        self, host: str, greeting: Greeting, token: bytes, route: bytes, now: float
    ) -> tuple[GuestLink, list[str]]:
        """The link that says hello, and the requests that end with this: those of the link whose place it takes.
        Raises Fenced for an older life of the host, or an older epoch of the link."""
        self._look(now)
        self.alive(host, greeting.life)
        key = (host, greeting.front, greeting.slot)
        old = self._links.get(key)
        if old is not None and old.token == token:
            self._move(old, route)
            old.heard_at = now
            return old, []
        if old is not None and old.greeting.life == greeting.life and greeting.epoch < old.greeting.epoch:
            raise Fenced(f"link {greeting.epoch} of {host} to {greeting.slot} was replaced by {old.greeting.epoch}")
        ended = [] if old is None else self.leave(old)
        link = self._links[key] = GuestLink(key, greeting, token, route, now)
        self._by_route[route] = link
        return link, ended

    def _move(self, link: GuestLink, route: bytes) -> None:
        if route != link.route:
            self._by_route.pop(link.route, None)
            link.route = route
            self._by_route[route] = link

    def by_route(self, route: bytes) -> GuestLink | None:
        return self._by_route.get(route)

    def leave(self, link: GuestLink) -> list[str]:
        """The link is no more. Returns the requests that it had."""
        self._by_route.pop(link.route, None)
        if self._links.get(link.key) is link:
            del self._links[link.key]
        for request_id in link.live:
            del self._of[request_id]
        ended, link.live = list(link.live), {}
        return ended

    def _look(self, now: float) -> None:
        if missed := self._attention.missed(now):
            for link in self._links.values():
                link.heard_at += missed

    def silent(self, now: float) -> list[GuestLink]:
        """Links that said nothing for longer than their bound, while we listened."""
        self._look(now)
        return [link for link in self._links.values() if now - link.heard_at >= self._orphan_s]

    def come(self, link: GuestLink, request_id: str, tokens: int) -> bool:
        """A request comes by this link with so many tokens. True when it was here by another link of the same host:
        that part is over. Raises Refused when it is another host's."""
        before = self._of.get(request_id)
        if before is not None and before.host != link.host:
            raise Refused(f"request {request_id} is running here for {before.host}")
        if before is not None:
            del before.live[request_id]
        self._of[request_id] = link
        link.live[request_id] = tokens
        return before is not None

    def go(self, link: GuestLink, request_ids: Iterable[str]) -> list[str]:
        """Of these, those that run for this very link; they do no more."""
        mine = [one for one in request_ids if self._of.get(one) is link]
        for request_id in mine:
            self.end(request_id)
        return mine

    def end(self, request_id: str) -> GuestLink | None:
        link = self._of.pop(request_id, None)
        if link is not None:
            del link.live[request_id]
        return link

    def took(self, request_id: str, tokens: int) -> tuple[GuestLink, int] | None:
        """Where an output goes, and the position of its first token."""
        link = self._of.get(request_id)
        if link is None:
            return None
        start = link.live[request_id]
        link.live[request_id] = start + tokens
        return link, start
