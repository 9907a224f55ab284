"""litellm's provider for vLLM servers: a streamed and a whole chat, as mini-swe-agent asks. ``litellm_sdk.py URL``"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import litellm
from loop import serve

BODY: dict[str, Any] = {
    "model": "hosted_vllm/smollm2",
    "messages": [{"role": "user", "content": "How are knots made?"}],
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 40,
    "num_retries": 0,
    "timeout": 300,
    "extra_body": {"ignore_eos": True},
}


def streamed() -> dict[str, Any]:
    choices = [choice for chunk in litellm.completion(**BODY, stream=True) for choice in chunk.choices]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "finish": [choice.finish_reason for choice in choices if choice.finish_reason],
    }


def whole() -> dict[str, Any]:
    answer = litellm.completion(**BODY)
    choice, usage = answer.choices[0], answer.usage
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return {"text": choice.message.content, "finish": choice.finish_reason, "usage": counts}


def ask() -> list[dict[str, Any]]:
    with ThreadPoolExecutor(2) as pool:
        return [one.result() for one in [pool.submit(way) for way in (streamed, whole)]]


serve(ask)
