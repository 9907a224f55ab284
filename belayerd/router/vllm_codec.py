"""Frames of the data plane and stored outputs <-> vLLM's structs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Container, Sequence
from typing import Any

import msgspec
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from belayer.errors import BadMessage, Refused
from belayerd.router import events as ev

_MAX_TOKEN = 1 << 31
_MORE_THAN_TOKENS = "new_logprobs", "new_prompt_logprobs_tensors", "prefill_stats", "routed_experts"
_REASONS = {str(reason): reason for reason in FinishReason}

# msgspec: not MessagePack, or another shape; the rest: what vLLM's array hooks raise on a bad dtype or buffer.
_UNREADABLE = (
    msgspec.MsgspecError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Codec:
    """Frames of the data plane <-> vLLM's structs (vLLM's own MessagePack with out-of-band tensor frames)."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)

    def encode(self, thing: Any) -> tuple[bytes, ...]:
        """Copies the frames: they are kept for the life of a request, tensors may be freed before."""
        return tuple(bytes(frame) for frame in self._encoder.encode(thing))

    def decode(self, frames: Sequence[Any]) -> Any:
        try:
            return self._decoder.decode(frames)
        except _UNREADABLE as why:
            raise BadMessage(f"not the outputs of an engine step: {why}") from why

    def items(self, outputs: Any, named: Container[str]) -> tuple[ev.Item, ...]:
        """Raises BadMessage for token ids that no vocabulary has: vLLM's detokeniser would break on them, and with
        it every request."""
        rows = []
        for row in outputs.outputs:
            tokens = tuple(row.new_token_ids)
            if not all(0 <= token < _MAX_TOKEN for token in tokens):
                raise BadMessage(f"request {row.request_id} got token ids {tokens[:4]}")
            finish = "" if row.finish_reason is None else str(row.finish_reason)
            kept = self._row(row) if row.request_id in named else b""
            rows.append(ev.Item(row.request_id, tokens, finish, row.stop_reason, kept))
        return tuple(rows)

    def _row(self, row: Any) -> bytes:
        """The output as it would be told again, or nothing when its tokens tell all."""
        if not row.new_token_ids or all(getattr(row, name) is None for name in _MORE_THAN_TOKENS):
            return b""
        bare = copy.copy(row)
        bare.finish_reason = bare.stop_reason = bare.events = None
        return msgspec.msgpack.encode(self.encode(EngineCoreOutputs(outputs=[bare])))

    def told(self, told: ev.Replay, begin: int, until: int, end: bool = False) -> list[Any]:
        """Messages that tell a front end tokens ``begin`` to ``until`` again, with all that came with them; with
        ``end`` also the finish, if there was one: in the row of the last token, as it came, because what ends a text
        decides how its last token is shown. Raises Refused for a border inside one step of an engine."""
        rows = {position: row for position, row in told.rows if begin <= position < until}
        stops = sorted({until, *rows, *(span.start for span in told.spans if begin < span.start < until)})
        messages, at = [], begin
        while at < until:
            row = self._read(rows[at], told.reader) if at in rows else None
            if row is None:
                border = next(one for one in stops if one > at)
                row = EngineCoreOutput(told.reader, list(told.tokens[at:border]))
            version = next((span.weight_version for span in reversed(told.spans) if span.start <= at), None)
            at += len(row.new_token_ids)
            if at > until:
                raise Refused(f"position {until} is inside one step of the engine", remedy="ask for position 0")
            messages.append(self.message([row], version))
        if end and told.finish:
            if not messages:
                messages.append(self.message([EngineCoreOutput(told.reader, [])], None))
            last = messages[-1].outputs[0]
            last.finish_reason, last.stop_reason = _REASONS.get(told.finish, FinishReason.ABORT), told.stop
        return messages

    def _read(self, row: bytes, reader: str) -> Any:
        output = self.decode(msgspec.msgpack.decode(row, type=list[bytes])).outputs[0]
        output.request_id = reader
        return output

    def aborted(self, reader: str) -> Any:
        """The message that ends a request with what it has."""
        return self.message([EngineCoreOutput(reader, [], finish_reason=FinishReason.ABORT)], None)

    @staticmethod
    def message(rows: list[Any], version: str | None) -> Any:
        return EngineCoreOutputs(outputs=rows, weight_version=version or None)

    @staticmethod
    def utility(output: Any) -> Any:
        """The message that carries the answer to an admin call."""
        return EngineCoreOutputs(utility_output=output)

    @staticmethod
    def check_ready(payload: bytes) -> None:
        """Raises BadMessage for what is no ready info of an engine; none at all is one."""
        try:
            if payload:
                msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
        except _UNREADABLE as why:
            raise BadMessage(f"not the ready info of an engine: {why}") from why

    @staticmethod
    def is_stream(params: Any) -> bool:
        return bool(params.output_kind is RequestOutputKind.DELTA)

    def digest(self, request: Any) -> bytes:
        """Over all that decides the answer: not over ids, times, and whether it is streamed."""
        params = request.sampling_params
        kind, params.output_kind = params.output_kind, RequestOutputKind.CUMULATIVE
        bare = msgspec.structs.replace(
            request, request_id="", external_req_id=None, arrival_time=0.0, client_index=0, trace_headers=None,
            session_id=None, priority=0,
        )  # fmt: skip
        try:
            frames = self.encode(bare)
        finally:
            params.output_kind = kind
        return hashlib.blake2b(b"".join(frames), digest_size=16).digest()

    def keep(self, outputs: Any, kept: Sequence[tuple[int, bool, tuple[str, ...]]]) -> None:
        rows = []
        for position, resumed, readers in kept:
            row = outputs.outputs[position]
            if resumed:
                row.prefill_stats = row.events = None
            for reader in readers:
                if reader != row.request_id:  # told to another than who asked first: vLLM changes a row in place
                    row = copy.copy(row)
                    row.request_id, row.new_token_ids = reader, list(row.new_token_ids)
                rows.append(row)
        outputs.outputs = rows
