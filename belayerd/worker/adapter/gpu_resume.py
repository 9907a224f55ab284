"""Runner V1 on a GPU whose new requests may have output tokens (see ``resume``).

A CUDA generator counts in offsets: one draw of a row moves it by 4, which is what vLLM itself takes back for a
thrown-away draw. So a resumed seeded request is put at four times its output position. Unproven on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

OFFSET_OF_A_DRAW = 4


class _States(dict[str, CachedRequestState]):
    """As resume's table, without its generators."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: dict[str, list[int]] = {}

    def __setitem__(self, request: str, state: CachedRequestState) -> None:
        state.output_token_ids.extend(self.prefixes.get(request, ()))
        super().__setitem__(request, state)


class GpuResumingRunner(GPUModelRunner):
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.requests: _States = _States()

    def _update_states(self, scheduler_output: Any) -> Any:
        self.requests.prefixes = {
            new.req_id: new.prefill_token_ids[len(new.prompt_token_ids) :]
            for new in scheduler_output.scheduled_new_reqs
            if new.prefill_token_ids is not None
        }
        after = super()._update_states(scheduler_output)
        for index, generator in self.input_batch.generators.items():
            made = len(self.requests[self.input_batch.req_ids[index]].output_token_ids)
            generator.set_offset(OFFSET_OF_A_DRAW * made)
        return after
