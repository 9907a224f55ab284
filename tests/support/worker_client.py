"""Talks to one worker as a front and as belayerd: a small DEALER client for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from belayer import wire
from belayer.clock import monotonic, wall
from belayer.messages.worker import Stamp
from belayer.rpc import decode_reply

R = TypeVar("R", bound=msgspec.Struct)


@dataclass
class Stream:
    """What a front saw of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    stop_reason: Any = None
    stamps: list[Stamp] = field(default_factory=list)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    first_at: float = 0.0

    def take(self, output: EngineCoreOutput, stamp: Stamp) -> None:
        self.first_at = self.first_at or monotonic()
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        if output.finish_reason is not None:
            self.finish, self.stop_reason = str(output.finish_reason), output.stop_reason
        self.stamps.append(stamp)
        self.outputs.append(output)


def engine_request(name: str, prompt: list[int], **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        arrival_time=wall(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


class ControlClient:
    """belayerd's side of a worker."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.IDENTITY, b"belayerd")
        self._socket.connect(f"ipc://{path}")
        self._calls = 0

    def call(self, message: msgspec.Struct, reply: type[R], timeout: float = 300.0) -> R:
        self._calls += 1
        call = self._calls.to_bytes(8, "little")
        self._socket.send_multipart([b"ctl", call, wire.encode(message)])
        end = monotonic() + timeout
        while monotonic() < end:
            if self._socket.poll(100):
                frames = self._socket.recv_multipart()
                if frames[1] == call:
                    return decode_reply(frames[2], reply)
        raise TimeoutError(f"no answer to {type(message).__name__}")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class FrontClient:
    """A router front with client index ``index``."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IDENTITY, index.to_bytes(2, "little"))
        self.socket.connect(f"ipc://{path}")
        self._encoder, self._decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.streams: dict[str, Stream] = {}
        self.seqs: list[int] = []
        self.utilities: list[Any] = []
        self.ready: dict[str, Any] | None = None
        self.standing: dict[str, Any] = {}
        self.answers = 0

    def hello(self, timeout: float = 300.0) -> dict[str, Any]:
        self.socket.send_multipart([b"hello"])
        self.until(lambda: self.ready is not None, timeout)
        assert self.ready is not None
        return self.ready

    def greet(self, token: bytes, told: int = 0, timeout: float = 300.0) -> dict[str, Any]:
        """A hello of the link that ``token`` names, on which ``told`` other messages were sent; what the worker says
        of itself in its answer."""
        before = self.answers
        self.socket.send_multipart([b"hello", token, msgspec.msgpack.encode(told)])
        self.until(lambda: self.answers > before, timeout)
        return self.standing

    def encode(self, thing: Any) -> list[Any]:
        return list(self._encoder.encode(thing))

    def add_raw(self, request_id: str, frames: list[Any]) -> Stream:
        """Frames as they are; what is said about ``request_id`` is listened to."""
        stream = self.streams[request_id] = Stream()
        self.socket.send_multipart(frames)
        return stream

    def add(self, request: EngineCoreRequest, prefix: list[int] | None = None, stream: Stream | None = None) -> Stream:
        """``stream``: what earlier workers said of it, to go on with."""
        stream = self.streams[request.request_id] = stream or Stream()
        head = msgspec.msgpack.encode(prefix) if prefix else b""
        self.socket.send_multipart([b"add", head, *self._encoder.encode(request)])
        return stream

    def abort(self, names: list[str]) -> None:
        self.socket.send_multipart([b"abort", msgspec.msgpack.encode(names)])

    def utility(self, call_id: int, method: str, *args: Any) -> None:
        self.socket.send_multipart([b"util", *self._encoder.encode((0, call_id, method, args))])

    def pump(self, wait_ms: int = 100) -> None:
        if not self.socket.poll(wait_ms):
            return
        frames = self.socket.recv_multipart()
        if frames[0] == b"ready":
            self.ready = msgspec.msgpack.decode(frames[1])
            self.standing = msgspec.msgpack.decode(frames[3])
            self.answers += 1
            return
        stamp = msgspec.msgpack.decode(frames[1], type=Stamp)
        self.seqs.append(stamp.seq)
        outputs = self._decoder.decode(frames[2:])
        if outputs.utility_output is not None:
            self.utilities.append(outputs.utility_output)
        for output in outputs.outputs:
            if output.request_id in self.streams:
                self.streams[output.request_id].take(output, stamp)

    def drain(self) -> None:
        """Take what a worker said before it died."""
        while self.socket.poll(0):
            self.pump(0)

    def until(self, condition: Any, timeout: float = 300.0) -> None:
        end = monotonic() + timeout
        while not condition():
            if monotonic() > end:
                raise TimeoutError("the worker did not do it in time")
            self.pump()

    def finish(self, *streams: Stream, timeout: float = 300.0) -> None:
        self.until(lambda: all(stream.finish for stream in streams), timeout)

    def generate(self, request: EngineCoreRequest, prefix: list[int] | None = None, timeout: float = 300.0) -> Stream:
        stream = self.add(request, prefix)
        self.finish(stream, timeout=timeout)
        return stream

    def close(self) -> None:
        self.socket.close()
        self._context.term()
