"""A recorded engine: a real process that speaks the worker's wire exactly and replays recorded tokens.

    python tests/support/fake_worker.py --endpoint ipc://... --slot s --generation 1 --worker-id s-1 --record FILE

It imports no vLLM, so that a test may start and kill dozens. It passes the same contract test as the real worker
(tests/contract/test_worker_wire.py). Token i of a request is ``record[(prompt length + i) % len(record)]``: a function
of the request alone, as a greedy engine's tokens are, so a continuation can be checked against an unfailed run.

``--hold-at N``: the engine stops stepping once any request has N output tokens, until SIGUSR1: a place to be killed.
SIGUSR2: send a message that nobody can read.
/collective_rpc of the method ``hold`` keeps the engine's loop until SIGUSR1.
``--late-finish``: the finish comes in a message of its own, after the last token.
``--stamp-generation G``: lie about the generation, as a worker would that outlived its replacement.
"""

from __future__ import annotations

import argparse
import json
import signal
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zmq

from belayer import wire
from belayer.clock import monotonic
from belayer.messages.common import Done, Ping, Pong
from belayer.messages.worker import BecomeMain, Request, WorkerState, WorkerStatus, WorkerStatusReply

STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3  # vLLM's finish reasons on the wire
RAW_VIEW = 3  # vLLM's extension type for the bytes of a small array


@dataclass
class Live:
    """One request: parts of the EngineCoreRequest by position (vLLM encodes it as an array)."""

    request_id: str
    prompt: int
    client: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    logprobs: int | None
    tokens: list[int] = field(default_factory=list)


def parse_request(frames: list[bytes], prefix: bytes) -> Live:
    row = msgpack.unpackb(frames[0], strict_map_key=False)
    params = row[3]
    return Live(
        request_id=row[0],
        prompt=len(row[1]),
        client=0,
        max_tokens=params.get("max_tokens") or 16,
        stop_ids=tuple(params.get("stop_token_ids") or ()),
        logprobs=params.get("logprobs"),
        tokens=list(msgpack.unpackb(prefix)) if prefix else [],
    )


def array(kind: str, shape: tuple[int, ...], data: bytes) -> list[Any]:
    return [kind, list(shape), msgpack.ExtType(RAW_VIEW, data)]


def logprobs_of(token: int, wanted: int) -> list[Any]:
    """Rows of vLLM's LogprobsLists: the token and ``wanted`` others, all functions of the token."""
    ids = [token, *((token + 1 + i) % 1000 for i in range(wanted))]
    values = [-0.25 - (one % 7) / 8 for one in ids]
    return [
        array("<i4", (1, len(ids)), struct.pack(f"<{len(ids)}i", *ids)),
        array("<f4", (1, len(ids)), struct.pack(f"<{len(ids)}f", *values)),
        array("<i4", (1,), struct.pack("<i", 1)),
        None,
    ]


class RecordedEngine:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.record: list[int] = json.loads(Path(args.record).read_text())
        self.live: dict[str, Live] = {}
        self.generation: int = args.generation
        self.main = True
        self.held = self.paused = False
        self.released = False
        self.seq: dict[bytes, int] = {}
        self.tokens: dict[bytes, bytes] = {}
        self.got: dict[bytes, int] = {}
        self.steps = 0
        self.socket = zmq.Context().socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        self.socket.set(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.bind(args.endpoint)
        self.babble = False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "released", True))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(self, "babble", True))

    def run(self) -> None:
        print("bound", flush=True)
        next_step = monotonic()
        while True:
            idle = not self.live or self.held or self.paused
            wait = 20 if idle else max(0.0, (next_step - monotonic()) * 1e3)
            while self.socket.poll(wait):
                self.hear(self.socket.recv_multipart())
                wait = 0
            self.held = self.held and not self.released
            if self.babble:
                self.babble = False
                self.socket.send_multipart([(0).to_bytes(2, "little"), b"out", b"no stamp", b"no outputs"])
            if self.live and not self.held and not self.paused and monotonic() >= next_step:
                next_step = monotonic() + self.args.step_ms / 1e3
                self.step()

    def hear(self, frames: list[bytes]) -> None:
        """As the worker: what a peer says concerns that message alone."""
        if self.args.lose_add and frames[1:2] == [b"add"]:
            self.args.lose_add = False
            self.tell("lost")
            return
        try:
            self.take(frames)
        except (LookupError, TypeError, ValueError, AttributeError, msgpack.UnpackException) as why:
            self.tell(f"dropped {why!r}")

    def take(self, frames: list[bytes]) -> None:
        peer, kind, *rest = frames
        if kind in (b"add", b"abort", b"util"):
            self.got[peer] = self.got.get(peer, 0) + 1
        match kind:
            case b"hello":
                self.hello(peer, rest)
            case b"add":
                self.add(peer, rest)
            case b"abort":
                for request_id in msgpack.unpackb(rest[0]):
                    if self.live.pop(request_id, None) is not None:
                        self.tell(f"abort {request_id}")
            case b"util":
                self.utility(peer, rest)
            case b"ctl":
                self.control(peer, rest)

    def tell(self, line: str) -> None:
        """Write down what happened to this engine, for a test to read."""
        if self.args.tell:
            with open(self.args.tell, "a") as file:
                file.write(line + "\n")

    def hello(self, peer: bytes, rest: list[bytes]) -> None:
        if self.args.deaf:
            return
        token = rest[0] if rest else b""
        if token and self.tokens.get(peer) != token:
            self.tokens[peer], self.got[peer] = token, 0
            client = int.from_bytes(peer, "little")
            for request_id in [one for one, live in self.live.items() if live.client == client]:
                del self.live[request_id]
                self.tell(f"drop {request_id}")
        standing: dict[str, Any] = {"seq": self.seq.get(peer, 0), "weight_version": self.args.weight_version}
        standing["weights_digest"] = self.args.digest
        if len(rest) > 1:
            standing |= {"got": self.got.get(peer, 0), "told": msgpack.unpackb(rest[1])}
        self.socket.send_multipart([peer, b"ready", msgpack.packb(self.ready()), token, msgpack.packb(standing)])

    def ready(self) -> dict[str, Any]:
        return {
            "max_model_len": self.args.max_model_len,
            "num_gpu_blocks": 1024,
            "block_size": 16,
            "dp_stats_address": None,
            "dtype": "float32",
            "vllm_version": "recorded",
            "world_size": 1,
            "data_parallel_size": 1,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": 0,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 2048,
            "instance_id": self.args.worker_id,
            "supports_lora": False,
            "max_loras": 0,
        }

    def add(self, peer: bytes, rest: list[bytes]) -> None:
        try:
            request = parse_request(rest[1:], rest[0])
        except (LookupError, TypeError, ValueError, AttributeError):
            request_id = msgpack.unpackb(rest[1], strict_map_key=False)[0]
            self.send(peer, [[request_id, [], None, None, None, ERROR]])
            return
        self.tell(f"add {request.request_id} {len(request.tokens)}")
        request.client = int.from_bytes(peer, "little")  # as the worker: who asks is who is answered
        if not self.main:
            self.send(peer, [self.row(request, [], ERROR)])
            return
        reason = self.finish_of(request)
        if reason is not None:  # the whole answer was in the prefix
            self.send(peer, [self.row(request, [], reason)])
            return
        self.live[request.request_id] = request
        self.hold_if_due()

    def step(self) -> None:
        self.steps += 1
        rows: dict[int, list[Any]] = {}
        for request in list(self.live.values()):
            reason = self.finish_of(request)
            fresh: list[int] = []
            if reason is None:
                fresh = [self.record[(request.prompt + len(request.tokens)) % len(self.record)]]
                request.tokens += fresh
                reason = None if self.args.late_finish else self.finish_of(request)
            if reason is not None:
                del self.live[request.request_id]
            rows.setdefault(request.client, []).append(self.row(request, fresh, reason))
        if self.args.times:
            with open(self.args.times, "ab") as file:
                file.write(struct.pack("<d", monotonic()))
        for client, outputs in rows.items():
            self.send(client.to_bytes(2, "little"), outputs)
        self.hold_if_due()

    def hold_if_due(self) -> None:
        at = self.args.hold_at
        if at >= 0 and not self.released and any(len(one.tokens) >= at for one in self.live.values()):
            self.held = True

    def finish_of(self, request: Live) -> int | None:
        if request.tokens and request.tokens[-1] in request.stop_ids:
            return STOP
        return LENGTH if len(request.tokens) >= request.max_tokens else None

    def row(self, request: Live, tokens: list[int], reason: int | None) -> list[Any]:
        """An EngineCoreOutput as vLLM writes it: positional, trailing defaults left out."""
        logprobs = logprobs_of(tokens[0], request.logprobs) if tokens and request.logprobs is not None else None
        stop = request.tokens[-1] if reason == STOP else None
        return [request.request_id, tokens, logprobs, None, None, reason, stop]

    def send(self, peer: bytes, outputs: list[Any], utility: list[Any] | None = None) -> None:
        stamped = self.generation if self.args.stamp_generation is None else self.args.stamp_generation
        seq = self.seq.get(peer, 0)
        self.seq[peer] = seq + 1
        stamp = {
            "slot": self.args.slot,
            "generation": stamped,
            "worker_id": self.args.worker_id,
            "seq": seq,
        }
        body = [0, outputs, None, monotonic(), utility, None, None, None, self.args.weight_version]
        self.socket.send_multipart([peer, b"out", msgpack.packb(stamp), msgpack.packb(body)])

    def utility(self, peer: bytes, rest: list[bytes]) -> None:
        _, call_id, method, args = msgpack.unpackb(rest[0])
        failure, result = None, None
        match method:
            case "is_sleeping":
                result = False
            case "is_scheduler_paused":
                result = self.paused
            case "reset_prefix_cache":
                result = True
            case "get_weight_version":
                result = self.args.weight_version
            case "pause_scheduler" | "resume_scheduler":
                self.paused = method == "pause_scheduler"
            case "set_weight_version":
                result = None
            case "collective_rpc" if args[0] == "hold":
                self.tell("hold")
                while not self.released:  # in the loop, as a worker's calls: it hears and says nothing meanwhile
                    signal.sigtimedwait((), 0.02)
                result = ["held"]
            case "collective_rpc":
                result = [{"worker": self.args.worker_id, "args": args[0]}]
            case _:
                failure = f"the recorded engine has no {method}"
        self.send(peer, [], [call_id, failure, None if failure else [None, result]])

    def control(self, peer: bytes, rest: list[bytes]) -> None:
        call, data = rest
        message = wire.Decoder[Any](Request).decode(data)
        match message:
            case Ping():
                reply: Any = Pong(daemon="worker", pid=0, instance=self.args.worker_id)
            case WorkerStatus():
                reply = WorkerStatusReply(
                    worker_id=self.args.worker_id,
                    slot=self.args.slot,
                    pid=0,
                    state=WorkerState.MAIN if self.main else WorkerState.STANDBY,
                    generation=self.generation,
                    running=len(self.live),
                )
            case BecomeMain(generation=generation):
                self.main, self.generation = True, generation
                reply = Done()
            case _:
                reply = Done(detail="recorded")
        self.socket.send_multipart([peer, b"ctl", call, wire.encode(reply)])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--slot", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--record", required=True)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--late-finish", action="store_true")
    parser.add_argument("--stamp-generation", type=int)
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--weight-version", default="1")
    parser.add_argument("--digest", default="", help="of the weights that it says to serve")
    parser.add_argument("--tell", help="file that gets a line for each add, abort and drop")
    parser.add_argument("--times", help="file that gets the time of each step, a double")
    parser.add_argument("--lose-add", action="store_true", help="the first add never arrives")
    parser.add_argument("--deaf", action="store_true", help="answer no hello")
    parser.add_argument("--max-model-len", type=int, default=2048)
    engine = RecordedEngine(parser.parse_args())
    engine.main = not engine.args.standby
    engine.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
