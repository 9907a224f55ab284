"""vLLM's own count of a thinking budget, told a request's output in one go, against one that counted every token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from vllm.config.reasoning import ReasoningConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from belayerd.worker.adapter.thinking import Counting

pytestmark = pytest.mark.engine

START, WORD, DOT, END = 4, 6, 7, 5
LENGTH = 40
VOCAB = 12


def holder(kind: type[ThinkingBudgetStateHolder], end: list[int]) -> ThinkingBudgetStateHolder:
    config = ReasoningConfig()
    config._reasoning_start_token_ids, config._reasoning_end_token_ids = [START], end
    return kind(config, 4, 0, torch.device("cpu"), False)


def admit(one: ThinkingBudgetStateHolder, prompt: list[int], output: list[int], budget: int) -> None:
    params = SamplingParams(thinking_token_budget=budget)
    one.sync_batch(BatchUpdate(batch_size=1, removed=[], added=[(0, params, prompt, output)], moved=[]))


def step(one: ThinkingBudgetStateHolder, output: list[int], wish: int) -> int:
    """The token of one step: what is forced, else ``wish``."""
    one.update_state([output], None)
    logits = torch.zeros(1, VOCAB)
    logits[0, wish] = 1.0
    return int(one.apply_to_logits(logits, False, None).argmax())


def standing(one: ThinkingBudgetStateHolder) -> dict[str, Any]:
    return {name: value for name, value in one._state[0].items() if name not in ("output_tok_ids", "counted")}


def whole_run(prompt: list[int], wishes: list[int], budget: int, end: list[int]) -> tuple[list[int], list[Any]]:
    """The tokens of a run without a cut, by vLLM's holder as it is, and how the holder stood after each step."""
    one, output, stands = holder(ThinkingBudgetStateHolder, end), [], []
    admit(one, prompt, output, budget)
    for wish in wishes:
        output.append(step(one, output, wish))
        stands.append(standing(one))
    return output, stands


def goes_on(kind: type[ThinkingBudgetStateHolder], prompt: list[int], prefix: list[int], wish: int, budget: int,
            end: list[int]) -> tuple[int, Any]:  # fmt: skip
    """The next token of a request that comes with ``prefix``, and how the holder stands then. A holder decides by
    nothing but how it stands: what is equal after one step is equal for good."""
    one, output = holder(kind, end), list(prefix)
    admit(one, prompt, output, budget)
    return step(one, output, wish), standing(one)


@pytest.mark.parametrize("end", [[END], [WORD, DOT, END]], ids=["one token", "a sequence"])
@pytest.mark.parametrize("prompt", [[1, 2], [1, START], [1, START, 9, END], [START, 8, 8]])
def test_what_is_counted_again_stands_as_what_was_counted_along(end: list[int], prompt: list[int]) -> None:
    for seed in range(3):
        draw = random.Random(seed)
        wishes = [draw.choice([START, END, WORD, DOT, 8, 9, 9, 9]) for _ in range(LENGTH)]
        for budget in (0, 1, 5, 12):
            whole, stands = whole_run(prompt, wishes, budget, end)
            for cut in range(1, LENGTH):
                got = goes_on(Counting, prompt, whole[:cut], wishes[cut], budget, end)
                assert got == (whole[cut], stands[cut]), (seed, budget, cut)


def test_in_one_leap_it_is_counted_wrong() -> None:
    """What the test above guards against really happens: inside the forced end, vLLM's holder begins it again."""
    wishes = [START] + [9] * (LENGTH - 1)
    whole, _ = whole_run([1], wishes, 5, [WORD, DOT, END])
    assert whole[6:9] == [WORD, DOT, END], "the end was forced after five tokens"
    leaps = [goes_on(ThinkingBudgetStateHolder, [1], whole[:cut], 9, 5, [WORD, DOT, END])[0] for cut in (7, 8)]
    assert leaps != whole[7:9]


def test_a_long_output_is_counted_in_a_moment() -> None:
    """Once per token, not once per pair of tokens: vLLM's own search would be called 8,000 times over 8,000 tokens."""
    output = [START, *[9] * 8000]
    one = holder(Counting, [END])
    looked: list[int] = []

    class Told(list[int]):
        def __getitem__(self, part: Any) -> Any:
            looked.append(1)
            return super().__getitem__(part)

    admit(one, [1], Told(output), 10_000)
    assert not looked, "the output itself is read once, as a whole"
    one.update_state([output], None)
    assert one._state[0]["check_count_down"] == 10_000 - 8000
