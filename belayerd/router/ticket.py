"""What one HTTP request asks of the router beyond vLLM's API, and how far its answer has come.

The guard makes a ticket before vLLM's routes see the request; the engine side finds it again by a context variable,
which vLLM's handlers carry along. Every chunk of a stream is made from one output of the engine, in the same task,
before the next is asked for: so the tokens counted when an output is taken are those of the chunks that follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from belayerd.router.events import OnDeath
from belayerd.router.records import Span


@dataclass(slots=True)
class Course:
    """The makers of one choice's tokens; ``count`` is how many have been handed to the front end."""

    spans: list[Span] = field(default_factory=list)
    count: int = 0

    def made(self, slot: str, generation: int, tokens: int) -> None:
        if not self.spans or self.spans[-1][1:3] != (slot, generation):
            self.spans.append(Span(self.count, slot, generation, ""))
        self.count += tokens

    def maker(self, position: int) -> Span | None:
        """Of the last token before ``position``."""
        for span in reversed(self.spans):
            if span.start < position:
                return span
        return self.spans[0] if self.spans else None


@dataclass(slots=True)
class Ticket:
    """``named``: the client gave an id of its own. ``position``: how many tokens of it the client has (None: it does
    not repeat). ``skipping``: the chunks now made are those that the client has. ``tokens_out``: the route
    that answers with tokens. ``repeats``: a request with its id is known, and may have another content. ``own``: the
    client's id; ``inside``: what vLLM and the router make of it. ``of_messages``: of the Messages API. ``whole``: its
    API has no word for an answer that was cut short, so that is an error there; ``cut``: its worker died, and a cut was
    what it wished for then. ``place``: the room kept for its requests, so many of them. ``attaches``: it asks for one
    that is running, which needs none."""

    named: bool = False
    own: str = ""
    inside: re.Pattern[str] | None = None
    position: int | None = None
    on_death: OnDeath | None = None
    pin: str = ""
    place: str = ""
    places: int = 0
    attaches: bool = False
    tokens_out: bool = False
    repeats: bool = False
    of_messages: bool = False
    whole: bool = False
    cut: bool = False
    readers: list[str] = field(default_factory=list)  # the front end's ids, one per choice
    courses: dict[int, Course] = field(default_factory=dict)  # by choice
    at: dict[int, int] = field(default_factory=dict)  # tokens per choice in the chunks so far
    prompts: int = 0  # how many prompts the request had; positions are told for one
    skipping: bool = False
    proceed: Callable[[], None] | None = None  # called once when the client's own part has been told

    def in_its_words(self, said: str) -> str:
        """With the client's own id, the only one that it knows."""
        return self.inside.sub(lambda found: self.own, said) if self.inside else said

    def took(self, index: int, tokens: int, whole: bool) -> None:
        """The front end took an output with so many tokens; ``whole``: all so far, not only new ones."""
        self.at[index] = tokens if whole else self.at.get(index, 0) + tokens

    def asks_on(self) -> None:
        """All chunks of what was taken are out."""
        if self.skipping and self.at.get(0, 0) >= (self.position or 0):
            self.skipping = False
            if self.proceed is not None:
                self.proceed()


TICKET: ContextVar[Ticket | None] = ContextVar("belayer_ticket", default=None)
