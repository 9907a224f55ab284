"""Continuing a request elsewhere: the same request, with the tokens it has already made pre-filled as output.

Never as a longer prompt: penalties, seeds, grammars, min/max tokens, bad words and thinking budgets all
count *output* tokens, and would silently start again. Two vLLM classes need to know: the scheduler (a new
request may have output already) and runner V1 (its state of a new request begins with that output).

Random numbers: vLLM's CPU sampler draws once from a request's generator per sampled token. ``Draws``
keeps a generator in step with the output position: it replays the draws when it is behind (resume) and
starts again when it is ahead (a chunk of a long prefill draws and throws away). So a seeded request gives
the tokens of an unfailed run whatever happened in between, and vLLM's own code for thrown-away draws,
which raises on a CPU generator, has nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from belayerd.worker.adapter.seat import seat
from belayerd.worker.adapter.thinking import count_in


class Draws(torch.Generator):
    """A seeded generator that can be put at "the next draw is that of output position p"."""

    def __new__(cls, seed: int) -> Draws:
        return super().__new__(cls, device="cpu")  # torch reads the constructor's arguments here

    def __init__(self, seed: int) -> None:
        self._seed, self._next = seed, 0
        self.manual_seed(seed)

    def step_to(self, position: int) -> None:
        """Before a step that will draw once for ``position``. Replaying 4096 draws takes about 0.02 s."""
        if self._next > position:
            self.manual_seed(self._seed)
            self._next = 0
        while self._next < position:
            torch.randint(0, 2**31, (1,), generator=self, dtype=torch.long)
            self._next += 1
        self._next = position + 1

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """vLLM takes back a thrown-away draw by an offset, which CPU generators lack; ``step_to`` does it."""


class _States(dict[str, CachedRequestState]):
    """The runner's table of requests. vLLM puts a new state in it before it reads the state's output
    tokens, so this is where a resumed request gets its output."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: dict[str, list[int]] = {}

    def __setitem__(self, request: str, state: CachedRequestState) -> None:
        prefix = self.prefixes.get(request)
        if prefix:
            state.output_token_ids.extend(prefix)
        if state.generator is not None and state.sampling_params is not None:
            state.generator = Draws(state.sampling_params.seed)
        super().__setitem__(request, state)


class ResumingRunner(CPUModelRunner):
    """Runner V1 whose new requests may have output tokens."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.requests: _States = _States()
        count_in(self.input_batch, vllm_config, device)

    def may_reinitialize_input_batch(self, kv_cache_config: Any) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        count_in(self.input_batch, self.vllm_config, self.device)  # it may be another batch now

    def _update_states(self, scheduler_output: Any) -> Any:
        self.requests.prefixes = {
            new.req_id: new.prefill_token_ids[len(new.prompt_token_ids) :]
            for new in scheduler_output.scheduled_new_reqs
            if new.prefill_token_ids is not None
        }
        after = super()._update_states(scheduler_output)
        for index, draws in self.input_batch.generators.items():
            draws.step_to(len(self.requests[self.input_batch.req_ids[index]].output_token_ids))
        return after


class ResumingScheduler(Scheduler):
    """Scheduler whose waiting requests may have output tokens, and which says how much a step will do."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        output = super().schedule(throttle_prefills)
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            if request.num_output_tokens:
                new.prefill_token_ids = list(request.all_token_ids)
        seat().scheduled(output.total_num_scheduled_tokens)
        return output

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        compiling = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready: bool = super()._handle_blocked_waiting_request(request)
        if not (ready and compiling and request.num_output_tokens):
            return ready
        # The grammar is new here: walk it over what has been said already (also past the end of reasoning).
        if self.structured_output_manager.accept_tokens(request, list(request.output_token_ids)):
            return True
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.grammar_compile_error_reqs.add(request.request_id)
        return False
