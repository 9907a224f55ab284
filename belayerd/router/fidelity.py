"""What becomes of each parameter of a request when its worker dies: every field of vLLM's requests, by name. Pure.

A field that is not here keeps the router from starting (``vllm_seam.check``), so that none of a later vLLM is continued
before somebody has looked at it. docs/resume.md has the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class How(StrEnum):
    """GOES_ON: the next engine reads it together with the output so far, and does as the first would have done. ABOVE:
    only the front end reads it, which outlives workers. ONCE: told with the first token, and taken out afterwards. OFF:
    without a setting that Belayer never makes vLLM refuses it, or nothing reads it. UNTRIED: nobody has cut it; such a
    request is given again while it has no token, and ends with ``worker_gone`` when it has some."""

    GOES_ON = "goes on"
    ABOVE = "above the engine"
    ONCE = "told once"
    OFF = "off"
    UNTRIED = "untried"


def _each(how: How, names: str) -> dict[str, How]:
    return dict.fromkeys(names.split(), how)


SAMPLING: Mapping[str, How] = {
    **_each(
        How.GOES_ON,
        "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias "
        "allowed_token_ids bad_words _bad_words_token_ids max_tokens min_tokens stop_token_ids ignore_eos "
        "_eos_token_id _all_stop_token_ids logprobs logprob_token_ids structured_outputs thinking_token_budget "
        "repetition_detection skip_reading_prefix_cache",
    ),
    # n: each choice is a request of its own. stop: found in the text, which the front end holds.
    **_each(
        How.ABOVE,
        "n stop include_stop_str_in_output flat_logprobs detokenize skip_special_tokens "
        "spaces_between_special_tokens output_kind stream_interval output_text_buffer_length skip_clone",
    ),
    **_each(How.ONCE, "prompt_logprobs"),
    # In this order: another model runner; watermarks; plug-ins and connectors; replay of recorded tokens; experts.
    **_each(
        How.OFF,
        "prompt_logprob_token_ids prompt_logprob_start watermarking _watermarking_skipped extra_args "
        "trace_decode_token_ids routed_experts_prompt_start",
    ),
}

REQUEST: Mapping[str, How] = {
    **_each(
        How.GOES_ON, "prompt_token_ids sampling_params cache_salt priority reasoning_ended reasoning_parser_kwargs"
    ),
    **_each(How.ABOVE, "request_id external_req_id client_index arrival_time trace_headers session_id"),
    **_each(How.OFF, "current_wave data_parallel_rank abort_immediately"),
    **_each(
        How.UNTRIED, "pooling_params mm_features lora_request prompt_embeds prompt_is_token_ids resumable kv_hints"
    ),
}

_UNTRIED = tuple(name for name, how in REQUEST.items() if how is How.UNTRIED)


def continuable(request: Any) -> bool:
    """Whether a request (vLLM's EngineCoreRequest) that has tokens goes on when its worker dies."""
    return request.sampling_params is not None and not any(_given(getattr(request, name)) for name in _UNTRIED)


def _given(value: Any) -> bool:
    return not (value is None or value is False or (isinstance(value, list | tuple) and not value))


def unknown(sampling: tuple[str, ...], request: tuple[str, ...]) -> list[str]:
    """Fields of this vLLM's two structs that nobody has said anything about."""
    return sorted({*sampling} - {*SAMPLING}) + sorted({*request} - {*REQUEST})
