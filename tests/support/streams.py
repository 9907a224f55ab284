"""An HTTP client of the router that decodes the stream itself: what came, chunk by chunk, and how it ended."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Seen:
    """One streamed answer. ``chunks``: the JSON of each data line before [DONE], in order."""

    status: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: int = 0
    error: BaseException | None = None

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", ())]

    @property
    def text(self) -> str:
        return "".join(c["delta"].get("content") or "" if "delta" in c else c.get("text") or "" for c in self.choices)

    @property
    def token_ids(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids") or ()]

    @property
    def arguments(self) -> str:
        """Of tool calls, put together."""
        calls = [call for choice in self.choices for call in choice.get("delta", {}).get("tool_calls") or ()]
        return "".join(call.get("function", {}).get("arguments") or "" for call in calls)

    @property
    def position(self) -> int:
        """Where the last chunk says that it ends."""
        return next((chunk["belayer"]["position"] for chunk in reversed(self.chunks) if "belayer" in chunk), 0)

    @property
    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]

    @property
    def roles(self) -> int:
        return sum(bool(choice.get("delta", {}).get("role")) for choice in self.choices)

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage") and not chunk.get("choices")]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [chunk["error"] for chunk in self.chunks if "error" in chunk]

    @property
    def logprobs(self) -> list[Any]:
        rows: list[Any] = []
        for choice in self.choices:
            got = choice.get("logprobs") or {}
            if "content" in got:
                rows += got["content"]
            else:
                rows += list(zip(got.get("tokens", ()), got.get("token_logprobs", ()), strict=True))
        return rows


class Stream(threading.Thread):
    """A request in the background: ``start()``, then ``result()``. ``until``: the client leaves when it has so many
    tokens."""

    def __init__(
        self,
        url: str,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str] | None = None,
        until: float = math.inf,
    ) -> None:
        super().__init__(daemon=True)
        self._until = until
        self._url, self._body, self._headers = url + path, body, headers
        self.seen = Seen()

    def leave(self) -> None:
        """The client leaves at its next chunk."""
        self._until = -1

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=300) as answer:
                self.seen.status = answer.status_code
                for line in answer.iter_lines():
                    self._take(line)
                    if self.seen.position >= self._until:
                        return
        except (httpx.HTTPError, ValueError) as why:
            self.seen.error = why

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.seen.done += 1
        elif line.startswith("data: "):
            self.seen.chunks.append(json.loads(line[6:]))

    def result(self, within: float = 300.0) -> Seen:
        self.join(within)
        seen = self.seen
        so_far = f"{len(seen.chunks)} chunks, {seen.errors}, {seen.error!r}"
        assert not self.is_alive(), f"no end within {within:g} s; {so_far}"
        return seen


def chat(max_tokens: int = 30, **more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell me about ropes."}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0,
        **more,
    }


def completion(max_tokens: int = 30, **more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0,
        **more,
    }


def tokens_in(max_tokens: int = 30, **more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "token_ids": [1, 2, 3, 4, 5],
        "sampling_params": {"max_tokens": max_tokens, "temperature": 0, **more},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
