"""The worker's one loop: poll the socket, feed the engine, step, send, beat.

One thread does all of it, so that a beat proves that steps can still be taken, and so that nothing needs a lock. An
idle turn ends with the next beat at the latest. Peers are told apart by their ZeroMQ identity: two bytes are a front
(its client index), ``belayerd`` is the control plane.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder

from belayer import wire
from belayer.clock import Stopwatch
from belayer.errors import BelayerError, Fenced, Refused, WorkerFailed
from belayer.messages import worker as m
from belayer.messages.common import Done, Ping, Pong
from belayer.rpc import to_reply
from belayerd.worker.adapter.core import Core
from belayerd.worker.adapter.device import CpuDevice, Device
from belayerd.worker.adapter.reuse import Reuse
from belayerd.worker.following import Following
from belayerd.worker.fronts import Fronts
from belayerd.worker.heart import Heart
from belayerd.worker.priority import come_back
from belayerd.worker.ranks import whole_digest
from belayerd.worker.standby import same_oracle, take_oracle
from gpuowner.attach import ArenaView, WeightsView
from gpuowner.attach_gpu import GpuArena
from gpuowner.attach_gpu_weights import GpuWeightsView

logger = structlog.get_logger(daemon="worker")

CONTROL = b"belayerd"
_PROBE_S = 2.0  # a kernel of microseconds, behind whatever else the device is doing
_PER_TURN = 256  # messages taken in before the next step, so that a flood cannot starve the engine


class Line:
    """The worker's ROUTER socket. Made before the engine is built: peers may connect and wait."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        # A front that comes back takes over its identity; unlimited queues, because a full one drops tokens silently.
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
        path.unlink(missing_ok=True)
        old = os.umask(0o177)
        try:
            self.socket.bind(f"ipc://{path}")
        finally:
            os.umask(old)

    def send(self, frames: list[Any]) -> None:
        self.socket.send_multipart(frames, copy=False)

    def wait(self, seconds: float) -> bool:
        return bool(self.socket.poll(int(seconds * 1000)))

    def take(self) -> list[bytes] | None:
        try:
            return list(self.socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.set(zmq.LINGER, 500)  # ms; the answer to Retire is still to go out
        self.socket.close()
        self._context.term()


@dataclass
class Standing:
    """What this worker is and has been proven to be."""

    worker_id: str
    slot: str
    state: m.WorkerState = m.WorkerState.STARTING
    generation: int = 0
    oracle: m.Oracle | None = None
    failure: str = ""
    start_ms: dict[str, float] = field(default_factory=dict)


class Outbox:
    """Stamps and sends the engine's outputs; ``seq`` counts per front."""

    def __init__(self, line: Line, standing: Standing, heart: Heart) -> None:
        self._line, self._standing, self._heart = line, standing, heart
        self._encoder = MsgpackEncoder()
        self._seq: dict[int, int] = defaultdict(int)

    def seq(self, client: int) -> int:
        """The number of the next message to this front."""
        return self._seq[client]

    def send(self, client: int, outputs: EngineCoreOutputs) -> None:
        standing = self._standing
        stamp = m.Stamp(
            slot=standing.slot, generation=standing.generation, worker_id=standing.worker_id, seq=self._seq[client]
        )
        self._seq[client] += 1
        self._heart.tokens += sum(len(output.new_token_ids) for output in outputs.outputs)
        front = client.to_bytes(2, "little")
        self._line.send([front, b"out", msgspec.msgpack.encode(stamp), *self._encoder.encode(outputs)])


class Engine:
    """Runs until ``Retire``. All handlers run between two steps."""

    def __init__(
        self,
        line: Line,
        outbox: Outbox,
        core: Core,
        heart: Heart,
        standing: Standing,
        weights: WeightsView | GpuWeightsView,
        arena: ArenaView | GpuArena,
        vocab: int,
        reuse: Reuse | None = None,
        device: Device | None = None,
        call_s: float = 180.0,
    ) -> None:
        """``call_s``: how long an admin call may keep the loop whose caller gave it no time."""
        self._line, self._core, self._heart, self._standing = line, core, heart, standing
        self._weights, self._arena, self._vocab, self._reuse = weights, arena, vocab, reuse
        self._device: Device = device or CpuDevice()
        self._fronts = Fronts(
            line.send,
            core,
            main=lambda: standing.state is m.WorkerState.MAIN,
            seq=outbox.seq,
            version=core.weight_version,
            announce=lambda phase, seconds: heart.announce(phase, call_s if seconds is None else seconds),
            digest=lambda: whole_digest((weights.grant.digest, *(other.digest for other in core.others()))),
        )
        self._following = Following(core, heart, weights, vocab)
        self._control: wire.Decoder[Any] = wire.Decoder(m.Request)
        self._leaving = False

    def run(self) -> None:
        core, heart, following = self._core, self._heart, self._following
        ran = False
        while not self._leaving:
            # After the last step one turn more at once: it tells whoever waits for the engine to be idle.
            busy = ran or core.has_work()
            if (busy and not following.paused) or self._line.wait(heart.every_s):
                self._take_messages()
            if following.paused:
                core.idle()
                heart.hold(*core.counts())
                continue
            ran = core.turn()
            running, waiting = core.counts()
            if core.held():
                heart.hold(running, waiting, m.HELD)
            else:
                heart.turn("step" if ran else "idle", running, waiting)

    def _take_messages(self) -> None:
        for _ in range(_PER_TURN):
            frames = self._line.take()
            if frames is None:
                return
            if len(frames) < 2:
                continue
            if frames[0] == CONTROL:
                self._answer_control(frames)
            elif len(frames[0]) == 2:
                self._fronts.take(frames[0], frames[1], frames[2:])

    def _answer_control(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or frames[1] != b"ctl":
            return
        reply: msgspec.Struct
        try:
            reply = self._handle(self._control.decode(frames[3]))
        except BelayerError as why:
            reply = to_reply(why)
        self._line.send([frames[0], b"ctl", frames[2], wire.encode(reply)])

    def _handle(self, message: Any) -> msgspec.Struct:
        standing, watch = self._standing, Stopwatch()
        match message:
            case Ping():
                return Pong(daemon="worker", pid=os.getpid(), instance=standing.worker_id)
            case m.WorkerStatus():
                return self._status()
            case m.TakeArena(epoch=epoch, owner_generation=owner):
                return self._take_arena(epoch, owner)
            case m.FlushCache():
                return Done(detail=self._flush_and_adopt(), ms=watch.ms())
            case m.ProbeDevice():
                return Done(detail="the probe kernel is right", ms=self._device.probe(_PROBE_S))
            case m.Unpark():
                detail = self._unpark()
                return Done(ms=watch.ms(), detail=detail)
            case m.CheckOracle(expected=expected):
                self._awake()
                oracle, ms = take_oracle(self._core, self._vocab, self._weights.grant.version)
                return m.OracleReply(oracle=oracle, equal=expected is None or same_oracle(oracle, expected), ms=ms)
            case m.BecomeMain(generation=generation):
                return self._become_main(generation)
            case m.Pause(generation=generation):
                return self._following.pause(standing.generation, generation)
            case m.Proceed(generation=generation):
                return self._following.proceed(standing.generation, generation)
            case m.FollowWeights(version=version):
                self._awake()
                reply = self._following.follow(version, serving=standing.state is m.WorkerState.MAIN)
                standing.oracle = reply.oracle
                return reply
            case m.Retire(generation=generation):
                self._mine(generation)
                self._leaving = True
                return Done(ms=watch.ms(), detail="no further step is taken")
        raise Refused(f"{type(message).__name__} is not handled by a worker")

    def _take_arena(self, epoch: int, owner_generation: int) -> Done:
        come_back()
        if self._arena.epoch >= 0:
            raise Refused(f"this worker already holds the lease of epoch {self._arena.epoch}")
        ms = self._arena.promote(epoch, owner_generation)
        self._core.take_leases(epoch, owner_generation)
        # What was computed in the private view is gone; a block of it must not be found again.
        self._flush()
        return Done(ms=ms, detail=f"lease of epoch {epoch}, arena shared at the same address")

    def _unpark(self) -> str:
        """A worker whose graph memory did not come back as it was is of no use: it fails for good and never serves."""
        try:
            return self._device.unpark()
        except WorkerFailed as why:
            self._standing.state, self._standing.failure = m.WorkerState.FAILED, why.message
            raise

    def _awake(self) -> None:
        if self._device.parked:
            raise Refused("the graph memory of this worker is parked: Unpark comes first", kept="the standby as it is")

    def _flush(self) -> None:
        if not self._core.reset_prefix_cache():
            raise WorkerFailed("the prefix cache cannot be emptied: requests still hold blocks of it")

    def _flush_and_adopt(self) -> str:
        """Adoption comes after the flush and before the oracle, whose own block could otherwise be one of the last
        main's."""
        self._flush()
        if self._reuse is None or self._arena.epoch < 0:
            return "prefix cache empty, no block held"
        return f"prefix cache empty, then {self._reuse.adopt(self._arena.epoch)} finished blocks of the last main"

    def _become_main(self, generation: int) -> Done:
        standing = self._standing
        if generation <= standing.generation:
            raise Fenced(f"this worker is at generation {standing.generation}, the message carries {generation}")
        if self._arena.epoch < 0:
            raise Refused("this worker holds no lease of the arena: TakeArena comes first")
        if standing.state is not m.WorkerState.STANDBY:
            raise Refused(f"this worker is {standing.state.value}, not standby")
        self._awake()
        standing.state, standing.generation = m.WorkerState.MAIN, generation
        return Done(detail=f"main of {standing.slot} in generation {generation}")

    def _mine(self, generation: int) -> None:
        if generation != self._standing.generation:
            raise Fenced(f"this worker is at generation {self._standing.generation}, the message carries {generation}")

    def _status(self) -> m.WorkerStatusReply:
        standing = self._standing
        running, waiting = self._core.counts()
        others = self._core.others()
        return m.WorkerStatusReply(
            worker_id=standing.worker_id,
            slot=standing.slot,
            pid=os.getpid(),
            state=standing.state,
            generation=standing.generation,
            epoch=self._arena.epoch,
            weight_version=min((self._weights.grant.version, *(other.version for other in others))),
            weights_digest=self._weights.grant.digest,
            rank_digests=tuple(other.digest for other in others),
            oracle=standing.oracle,
            failure=standing.failure,
            running=running,
            waiting=waiting,
            paused=self._following.paused,
            start_ms=standing.start_ms,
        )
