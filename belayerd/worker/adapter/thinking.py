"""A thinking budget that counts on after a cut as if there had been none.

vLLM's holder counts from call to call, once per sampled token, and what it does at a token depends on what it did
before (which part of the forced end is out, which tokens were counted already). A request that comes with output
(resumed here, or taken out of the batch and put back by vLLM) would be counted in one leap, and be wrong inside the
thinking, at the budget, and inside the forced end. So its output is told to the holder again, token by token.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import torch
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder


class _Output:
    """A request's output, and where each searched sequence begins in it: found once, not once per token."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._found: dict[tuple[int, ...], list[int]] = {}

    def starts(self, wanted: list[int]) -> list[int]:
        key = tuple(wanted)
        if key not in self._found:
            last = len(self.tokens) - len(wanted) + 1
            self._found[key] = [at for at in range(last) if self.tokens[at : at + len(wanted)] == wanted]
        return self._found[key]


class _Part:
    """Tokens ``start`` to ``end`` of an output, as far as vLLM's holder looks at the list that it is given."""

    def __init__(self, output: _Output, start: int, end: int) -> None:
        self._output, self._start, self._end = output, start, end

    def __len__(self) -> int:
        return self._end - self._start

    def __contains__(self, token: int) -> bool:
        return token in self._output.tokens[self._start : self._end]

    def __getitem__(self, part: slice) -> _Part:
        start, end, _ = part.indices(len(self))
        return _Part(self._output, self._start + start, self._start + max(start, end))

    def last(self, wanted: list[int]) -> int:
        """Where ``wanted`` begins for the last time in this part; -1: nowhere."""
        starts = self._output.starts(wanted)
        at = bisect_right(starts, self._end - len(wanted)) - 1
        return starts[at] - self._start if at >= 0 and starts[at] >= self._start else -1


class Counting(ThinkingBudgetStateHolder):
    """vLLM's holder; a request that enters the batch with output is counted through to its end first."""

    def sync_batch(self, batch_update: Any) -> None:
        super().sync_batch(batch_update)
        for state in self._state.values():
            if not state.get("counted"):
                state["counted"] = True
                self._count(state)

    def _count(self, state: dict[str, Any]) -> None:
        """Up to the step of the last token; the step that comes counts that one."""
        whole = state["output_tok_ids"]
        output = _Output(list(whole))
        for length in range(len(whole)):
            state["output_tok_ids"], state["force_index"] = _Part(output, 0, length), []
            self._update_think_state(state)
        state["output_tok_ids"] = whole

    @staticmethod
    def _find_last_sequence_index(target_list: Any, token_ids: list[int]) -> int:
        if isinstance(target_list, _Part):
            return target_list.last(token_ids) if token_ids else -1
        return int(ThinkingBudgetStateHolder._find_last_sequence_index(target_list, token_ids))


def count_in(batch: Any, config: Any, device: torch.device) -> None:
    """Put the holder above in the place of vLLM's in an input batch, if that has one. Speculative tokens are never
    counted: no engine of ours has any."""
    if batch.thinking_budget_state_holder is not None:
        seats = config.scheduler_config.max_num_seqs
        batch.thinking_budget_state_holder = Counting(config.reasoning_config, seats, 0, device, False)
