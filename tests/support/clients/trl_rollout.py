"""TRL's rollout worker of AsyncGRPO, in a child process of its own as its trainer has it. ``trl_rollout.py URL MODEL``

It rolls out a small data set over and over, scores each group, and waits when a few samples are not fetched. One
answer: what it made of each prompt, greedy, in the next samples, so also in those that it had in flight meanwhile.
"""

from __future__ import annotations

import sys
from typing import Any

from accelerate.state import PartialState
from datasets import Dataset
from loop import serve
from transformers import AutoTokenizer
from trl.chat_template_utils import qwen3_template
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker
from trl.experimental.async_grpo.vllm_client import VLLMClient

PROMPTS = ("Name three knots.", "Why do ropes break?")
GROUPS, GENERATIONS = 8, 2  # fewer than half of them can be waiting to be fetched


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(row)) for row in completion_ids]


def seen(rows: list[Any]) -> dict[str, Any]:
    """All different texts, tokens and masks of one prompt; the span of each token's logprob."""
    assert len(rows) >= GENERATIONS
    return {
        "texts": sorted({row.completion[-1]["content"] for row in rows}),
        "tokens": sorted({tuple(row.input_ids.tolist()) for row in rows}),
        "masks": sorted({tuple(row.completion_mask.tolist()) for row in rows}),
        "lowest": [min(column) for column in zip(*(row.old_log_probs.tolist() for row in rows), strict=True)],
        "highest": [max(column) for column in zip(*(row.old_log_probs.tolist() for row in rows), strict=True)],
    }


def main() -> None:
    url, model = sys.argv[1:3]
    PartialState()  # as its trainer does
    server = VLLMClient(url)
    server.wait_for_server_ready()
    assert server.get_max_model_len() == 1024
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = qwen3_template  # TRL knows models by name; ours marks turns as Qwen does
    worker = AsyncRolloutWorker(
        model_name="smollm2",
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]),
        reward_funcs=[reward],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        num_generations=GENERATIONS,
        max_inflight_tasks=4,
        queue_maxsize=1,
        score_queue_maxsize=1,
        vllm_server_url=url,
        max_tokens=32,
        temperature=0.0,
        request_timeout=300,
    )
    worker.start()

    def ask() -> dict[str, Any]:
        rows = [worker.rollout_buffer.get(timeout=300) for _ in range(GROUPS * GENERATIONS)]
        worker.check_health(60)
        return {prompt: seen([row for row in rows if row.prompt[-1]["content"] == prompt]) for prompt in PROMPTS}

    serve(ask)
    worker.stop()


if __name__ == "__main__":
    main()
