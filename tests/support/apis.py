"""A client of the two APIs of vLLM's front end that are not OpenAI's older ones: /v1/messages and /v1/responses. It
reads the event stream itself."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

WORDS = "Tell me about ropes."
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
APIS = (MESSAGES, RESPONSES)


def body(path: str, tokens: int, stream: bool = True) -> dict[str, Any]:
    """Greedy."""
    more = {"model": "smollm2", "temperature": 0, "stream": stream}
    if path == MESSAGES:
        return {**more, "messages": [{"role": "user", "content": WORDS}], "max_tokens": tokens}
    return {**more, "input": WORDS, "max_output_tokens": tokens}


@dataclass
class Told:
    """What came: events by name with their data, in order; ``broken``: how the connection ended, if not whole."""

    status: int = 0
    kind: str = ""
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    broken: httpx.HTTPError | None = None

    @property
    def text(self) -> str:
        rows = [data["delta"].get("text", "") for name, data in self.events if name == "content_block_delta"]
        rows += [data["delta"] for name, data in self.events if name == "response.output_text.delta"]
        return "".join(rows)

    @property
    def names(self) -> list[str]:
        """Of the events, each row of equal ones as one: how many pieces a text has is not promised."""
        names = [name for name, _ in self.events]
        return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [data for name, data in self.events if name == "error"]

    @property
    def end(self) -> dict[str, Any]:
        """What the API tells at the end of a whole answer, without what is new in each."""
        ends = {"message_delta": lambda data: data, "response.completed": whole_response}
        return next((ends[name](data) for name, data in reversed(self.events) if name in ends), {})


def whole_response(data: dict[str, Any]) -> dict[str, Any]:
    response = data["response"]
    texts = [part["text"] for item in response["output"] for part in item["content"]]
    usage = {name: response["usage"][f"{name}_tokens"] for name in ("input", "output", "total")}
    return {"status": response["status"], "usage": usage, "texts": texts}


class Asking(threading.Thread):
    """A stream in the background: ``start()``, then ``result()``."""

    def __init__(self, url: str, path: str, tokens: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(daemon=True)
        self._url, self._body, self._headers = url + path, body(path, tokens), headers
        self.told = Told()
        self._leaves = threading.Event()

    def leave(self) -> None:
        """The client leaves at the next event."""
        self._leaves.set()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=300) as answer:
                self.told.status, self.told.kind = answer.status_code, answer.headers["content-type"]
                name = ""
                for line in answer.iter_lines():
                    if self._leaves.is_set():
                        return
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        self.told.events.append((name, json.loads(line.removeprefix("data: "))))
        except httpx.HTTPError as why:
            self.told.broken = why

    def result(self, within: float = 300.0) -> Told:
        self.join(within)
        assert not self.is_alive(), f"no end within {within:g} s; so far {len(self.told.events)} events"
        return self.told


def asking(url: str, path: str, tokens: int, **headers: str) -> Asking:
    """One that has been started; ``on_death`` is its wish."""
    one = Asking(url, path, tokens, {f"x-belayer-{name.replace('_', '-')}": value for name, value in headers.items()})
    one.start()
    return one


def same(told: Told, truth: Told) -> None:
    """Each token once, and the end of the run without a failure."""
    assert (told.broken, told.errors) == (None, [])
    assert told.text == truth.text
    assert told.names == truth.names
    assert told.end == truth.end
