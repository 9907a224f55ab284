"""What the scheduler tells the ranks in each step, as MessagePack: vLLM's own executors pickle it.

Only what a text-generating engine on the CPU uses crosses. Anything else that is set is refused by name: a rank that
did not hear of it would compute something else than the leader.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput

from belayer.errors import WorkerFailed


class _New(msgspec.Struct, array_like=True):
    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    prompt_is_token_ids: list[bool] | None
    prefill_token_ids: list[int] | None
    replay_start: int


class _Cached(msgspec.Struct, array_like=True):
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_token_ids: list[list[int]]
    all_token_ids: dict[str, list[int]]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]


class _Step(msgspec.Struct, array_like=True):
    scheduled_new_reqs: list[_New]
    scheduled_cached_reqs: _Cached
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str] | None
    has_structured_output_requests: bool
    pending_structured_output_tokens: bool
    new_block_ids_to_zero: list[int] | None
    num_common_prefix_blocks: list[int]


class _Grammar(msgspec.Struct, array_like=True):
    structured_output_request_ids: list[str]
    grammar_bitmask: bytes
    rows: int
    num_acceptable_drafts: list[int] | None


_STEP: msgspec.msgpack.Decoder[_Step] = msgspec.msgpack.Decoder(_Step)
_GRAMMAR: msgspec.msgpack.Decoder[_Grammar | None] = msgspec.msgpack.Decoder(_Grammar | None)
# Of the leader's scheduler alone, or a count of what was done.
_NOT_FOR_RANKS = frozenset({"scheduled_encoder_input_stats", "num_invalid_spec_tokens", "num_spec_tokens_to_schedule"})


def _take(wire: Any, source: Any) -> Any:
    """``source``'s fields that ``wire`` has; raises WorkerFailed when another one holds something."""
    known = set(wire.__struct_fields__)
    for field in fields(source):
        value = getattr(source, field.name)
        nothing = value is None or value is field.default or (hasattr(value, "__len__") and len(value) == 0)
        if field.name not in known and field.name not in _NOT_FOR_RANKS and not nothing:
            raise WorkerFailed(f"a step of several ranks cannot carry {type(source).__name__}.{field.name}")
    return known


def encode_step(step: SchedulerOutput) -> bytes:
    new = [_New(**{name: getattr(row, name) for name in _take(_New, row)}) for row in step.scheduled_new_reqs]
    cached = step.scheduled_cached_reqs
    held = {name: getattr(step, name) for name in _take(_Step, step)}
    held["scheduled_new_reqs"] = new
    held["scheduled_cached_reqs"] = _Cached(**{name: getattr(cached, name) for name in _take(_Cached, cached)})
    return msgspec.msgpack.encode(_Step(**held))


def decode_step(data: bytes) -> SchedulerOutput:
    step = _STEP.decode(data)
    held = {name: getattr(step, name) for name in step.__struct_fields__}
    held["scheduled_new_reqs"] = [
        NewRequestData(
            **{name: getattr(row, name) for name in row.__struct_fields__},
            mm_features=[], pooling_params=None, lora_request=None,
        )
        for row in step.scheduled_new_reqs
    ]  # fmt: skip
    cached = step.scheduled_cached_reqs
    held["scheduled_cached_reqs"] = CachedRequestData(
        **{name: getattr(cached, name) for name in cached.__struct_fields__}
    )
    return SchedulerOutput(
        **held, scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, free_encoder_mm_hashes=[]
    )


def encode_grammar(grammar: GrammarOutput | None) -> bytes:
    if grammar is None:
        return msgspec.msgpack.encode(None)
    mask = np.ascontiguousarray(grammar.grammar_bitmask, dtype=np.int32)
    return msgspec.msgpack.encode(
        _Grammar(grammar.structured_output_request_ids, mask.tobytes(), mask.shape[0], grammar.num_acceptable_drafts)
    )


def decode_grammar(data: bytes) -> GrammarOutput | None:
    grammar = _GRAMMAR.decode(data)
    if grammar is None:
        return None
    mask = np.frombuffer(grammar.grammar_bitmask, dtype=np.int32).reshape(grammar.rows, -1).copy()
    return GrammarOutput(grammar.structured_output_request_ids, mask, grammar.num_acceptable_drafts)
