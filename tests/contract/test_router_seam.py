"""The router's one door to vLLM: it fits this vLLM, refuses another by name, and no bytes of a worker get past it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackEncoder

from belayer.errors import BadMessage, Refused
from belayerd.router import events as ev
from belayerd.router import fidelity
from belayerd.router import vllm_seam as seam
from belayerd.router.records import Span


def test_this_vllm_fits() -> None:
    seam.check()
    assert list(seam.problems()) == []


def test_every_field_of_a_request_is_classified_and_no_other() -> None:
    """A field that a later vLLM adds keeps the router from starting until it is looked at."""
    assert set(fidelity.SAMPLING) == set(SamplingParams.__struct_fields__)
    assert set(fidelity.REQUEST) == set(EngineCoreRequest.__struct_fields__)
    (said,) = seam.problems(sampling=msgspec.defstruct("Later", [*SamplingParams.__struct_fields__, "second_thoughts"]))
    assert "second_thoughts, of which nobody has said" in said


def request(**more: Any) -> EngineCoreRequest:
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__) | {
        "request_id": "r",
        "sampling_params": SamplingParams(),
    }
    return EngineCoreRequest(**(fields | {"resumable": False, "abort_immediately": False} | more))


def test_what_nobody_has_cut_is_not_continued() -> None:
    assert fidelity.continuable(request())
    assert fidelity.continuable(request(mm_features=[], cache_salt="salt", priority=3, reasoning_ended=True))
    image, lora = np.zeros(1), object()
    kinds: list[dict[str, Any]] = [
        {"sampling_params": None},
        {"mm_features": [image]},
        {"lora_request": lora},
        {"prompt_embeds": image},
        {"resumable": True},
    ]
    for untried in kinds:
        assert not fidelity.continuable(request(**untried))


class Elsewhere:
    """Another vLLM: its factory takes other arguments, its client lacks what ours inherits."""

    @staticmethod
    def make_async_mp_client(config: Any, tasks: int) -> None: ...

    def call_utility_all_async(self) -> None: ...


class Row(msgspec.Struct):
    request_id: str


@dataclass
class Bare:
    loop: int = 0


def test_another_vllm_is_refused_by_the_name_of_what_differs() -> None:
    said = "\n".join(seam.problems("0.33.1", Elsewhere, Elsewhere, Bare, (Row, Row, Row)))
    assert "0.33.1 is not the pinned 0.32.x" in said
    assert "make_async_mp_client takes ['config', 'tasks']" in said
    assert "Elsewhere.collective_rpc_async is missing" in said
    assert "Row lacks events, finish_reason, new_token_ids, prefill_stats" in said
    assert "Bare.engine_dead is missing" in said
    assert "Elsewhere.call_utility_all_async" not in said


def outputs() -> EngineCoreOutputs:
    logprobs = LogprobsLists(np.zeros((1, 90), np.int32), np.zeros((1, 90), np.float32), np.zeros(1, np.int32))
    rows = [
        EngineCoreOutput("a", [1, 2], new_logprobs=logprobs, events=[]),
        EngineCoreOutput("b", [], finish_reason=FinishReason.STOP, stop_reason=7),
        EngineCoreOutput("c", [3]),
    ]
    return EngineCoreOutputs(outputs=rows, weight_version="4")


def test_outputs_become_items_and_only_what_is_kept_stays() -> None:
    codec = seam.Codec()
    decoded = codec.decode(MsgpackEncoder().encode(outputs()))
    assert codec.items(decoded, ()) == (ev.Item("a", (1, 2)), ev.Item("b", (), "stop", 7), ev.Item("c", (3,)))
    codec.keep(decoded, [(0, True, ("a",)), (2, False, ("c",))])
    assert [row.request_id for row in decoded.outputs] == ["a", "c"]
    assert decoded.outputs[0].events is None
    assert decoded.outputs[0].new_logprobs.logprobs.shape == (1, 90)


def test_outputs_of_a_named_request_are_told_again_as_they_came() -> None:
    codec = seam.Codec()
    decoded = codec.decode(MsgpackEncoder().encode(outputs()))
    first, _, third = codec.items(decoded, ("a", "c"))
    assert first.row
    assert third.row == b"", "tokens tell all of it"
    spans = (Span(0, "s", 1, "4"), Span(3, "s", 2, "5"))
    told = ev.Replay("new", (1, 2, 3, 4), ((0, first.row),), spans, "stop", 7)
    mine, rest = codec.told(told, 0, 2), codec.told(told, 2, 4, end=True)
    assert [(m.weight_version, [(r.request_id, r.new_token_ids) for r in m.outputs]) for m in mine + rest] == [
        ("4", [("new", [1, 2])]),
        ("4", [("new", [3])]),
        ("5", [("new", [4])]),
    ]
    assert mine[0].outputs[0].new_logprobs.logprobs.shape == (1, 90)
    assert (rest[-1].outputs[0].finish_reason, rest[-1].outputs[0].stop_reason) == (FinishReason.STOP, 7)
    with pytest.raises(Refused, match="inside one step"):
        codec.told(told, 0, 1)


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 40])
def test_a_token_that_no_vocabulary_has_is_a_bad_message(token: int) -> None:
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [token])]))
    codec = seam.Codec()
    decoded = codec.decode(frames)
    with pytest.raises(BadMessage):
        codec.items(decoded, ())


@given(st.lists(st.binary(max_size=80), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_garbage_is_a_bad_message(frames: list[bytes]) -> None:
    codec = seam.Codec()
    with contextlib.suppress(BadMessage):  # the only exception that may come out
        codec.items(codec.decode(frames), ())


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_is_a_bad_message_or_still_one(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in MsgpackEncoder().encode(outputs())]
    frame = frames[data.draw(st.integers(0, len(frames) - 1))]
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    codec = seam.Codec()
    with contextlib.suppress(BadMessage):  # the only exception that may come out
        codec.items(codec.decode(frames), ())


@pytest.mark.parametrize("drop", [0, 1])
def test_a_missing_frame_is_a_bad_message(drop: int) -> None:
    frames = list(MsgpackEncoder().encode(outputs()))
    assert len(frames) == 3
    with pytest.raises(BadMessage):
        seam.Codec().decode(frames[drop + 1 :] if drop == 0 else frames[:1])
