"""The openai package: a chat and a completion, streamed, and a chat that is not. ``openai_sdk.py URL``"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from loop import serve

CHAT: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Tell me about ropes."}],
    "temperature": 0,
    "max_tokens": 40,
    "extra_body": {"ignore_eos": True},
}
COMPLETION: dict[str, Any] = {
    "model": "smollm2",
    "prompt": "Once upon a time",
    "temperature": 0,
    "max_tokens": 40,
    "extra_body": {"ignore_eos": True},
}
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=300)


def streamed_chat() -> dict[str, Any]:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "finish": [choice.finish_reason for choice in choices if choice.finish_reason],
        "usage": [chunk.usage.model_dump() for chunk in chunks if chunk.usage],
    }


def streamed_completion() -> dict[str, Any]:
    chunks = list(client.completions.create(**COMPLETION, stream=True))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "text": "".join(choice.text for choice in choices),
        "finish": [choice.finish_reason for choice in choices if choice.finish_reason],
    }


def whole_chat() -> dict[str, Any]:
    answer = client.chat.completions.create(**CHAT)
    assert answer.usage is not None
    choice = answer.choices[0]
    return {"text": choice.message.content, "finish": choice.finish_reason, "usage": answer.usage.model_dump()}


def ask() -> list[dict[str, Any]]:
    with ThreadPoolExecutor(3) as pool:
        return [one.result() for one in [pool.submit(way) for way in (streamed_chat, streamed_completion, whole_chat)]]


serve(ask)
