"""renderers' and verifiers' token-in-token-out clients, which prime-rl rolls out with. ``renderer.py URL MODEL``"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from loop import serve
from openai import AsyncOpenAI
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate
from verifiers.v1.clients.client import resolve_client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.types import SamplingConfig

url, model = sys.argv[1:3]
renderer = create_renderer(load_tokenizer(model))
MESSAGES: Any = [{"role": "user", "content": "Where do climbers sleep?"}]
KNOBS: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


async def by_renderers() -> dict[str, Any]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        answer = await generate(
            client=client, renderer=renderer, messages=MESSAGES, model="smollm2", sampling_params=dict(KNOBS)
        )
    return {"tokens": answer["completion_ids"], "finish": answer["finish_reason"], "text": answer["content"],
            "logprobs": answer["completion_logprobs"]}  # fmt: skip


async def by_verifiers() -> dict[str, Any]:
    client = resolve_client(TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=model))
    body = {"model": "smollm2", "messages": MESSAGES}
    answer = await client.get_response(ChatDialect(), body, SamplingConfig(**KNOBS), session_id="rollout-1")
    await client.close()
    assert answer.tokens is not None
    return {"tokens": answer.tokens.completion_ids, "finish": answer.finish_reason, "text": answer.message.content,
            "logprobs": answer.tokens.completion_logprobs}  # fmt: skip


async def both() -> list[dict[str, Any]]:
    return list(await asyncio.gather(by_renderers(), by_verifiers()))


serve(lambda: asyncio.run(both()))
