"""The shell over a real zmq socket: what a bad worker message costs, and what a broken invariant costs."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import zmq
import zmq.asyncio

from belayer.errors import BadMessage, BelayerError, NoHealthySlot
from belayer.messages.worker import Stamp
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.journal import Journal
from belayerd.router.shell import Shell


class Outputs(msgspec.Struct):
    """Stands where vLLM's EngineCoreOutputs stand: the shell reads two of its fields."""

    items: list[ev.Item]
    weight_version: str = ""
    utility_output: None = None


class PlainCodec:
    def decode(self, frames: Sequence[Any]) -> Outputs:
        try:
            return msgspec.msgpack.decode(frames[0].buffer, type=Outputs)
        except msgspec.DecodeError as why:
            raise BadMessage(str(why)) from why

    def items(self, outputs: Outputs, named: Any) -> tuple[ev.Item, ...]:
        return tuple(outputs.items)

    def keep(self, outputs: Outputs, kept: Sequence[tuple[int, bool, tuple[str, ...]]]) -> None:
        outputs.items = [outputs.items[position] for position, _, _ in kept]


class Heard:
    """A front end that writes down what it is told; ``trap``: the delivery at which it breaks."""

    def __init__(self, trap: bool = False) -> None:
        self.trap = trap
        self.replayed: list[ev.Replay] = []
        self.tokens: asyncio.Queue[int] = asyncio.Queue()
        self.failed: asyncio.Queue[str] = asyncio.Queue()
        self.left_slots: asyncio.Queue[str] = asyncio.Queue()

    def deliver(self, slot: str, generation: int, outputs: Outputs) -> None:
        if self.trap:
            raise ZeroDivisionError("a bug of ours")
        for item in outputs.items:
            for token in item.tokens:
                self.tokens.put_nowait(token)

    def replay(self, told: ev.Replay) -> None:
        self.replayed.append(told)

    def cut(self, reader: str) -> None:
        self.failed.put_nowait(f"{reader} cut")

    def fail(self, request_id: str, error: BelayerError) -> None:
        self.failed.put_nowait(f"{request_id} {error.code}")

    def welcome(self, slot: str, ready: bytes) -> list[Any]:
        return []

    def utility(self, slot: str, outputs: Outputs) -> None:
        raise AssertionError("no utility was called")

    def left(self, slot: str) -> None:
        self.left_slots.put_nowait(slot)


class Scene:
    """A shell and the worker's end of its link."""

    def __init__(self, folder: Path, sink: Heard, limits: Limits) -> None:
        self.endpoint = f"ipc://{folder}/w"
        self.context = zmq.asyncio.Context()
        self.worker = self.context.socket(zmq.ROUTER)
        self.worker.set(zmq.LINGER, 0)
        self.worker.set(zmq.ROUTER_HANDOVER, 1)  # as a worker's
        self.worker.bind(self.endpoint)
        core = Core(limits)
        self.shell = Shell(core, Journal(folder, "t", 1 << 20, list), PlainCodec(), sink, 0, structlog.get_logger())
        self.seq = 0

    async def join(self) -> None:
        joining = asyncio.create_task(self.shell.register(ev.Register("s", 1, "w", self.endpoint)))
        peer, kind, token, _ = await self.worker.recv_multipart()
        self.token = token
        assert (peer, kind) == (b"\0\0", b"hello")
        standing = msgspec.msgpack.encode({"seq": self.seq})
        await self.worker.send_multipart([peer, b"ready", b"", token, standing])
        await joining

    async def say(self, *items: ev.Item) -> None:
        stamp = Stamp(slot="s", generation=1, worker_id="w", seq=self.seq)
        self.seq += 1
        body = msgspec.msgpack.encode(Outputs(list(items)))
        await self.worker.send_multipart([b"\0\0", b"out", msgspec.msgpack.encode(stamp), body])

    def close(self) -> None:
        self.shell.close()
        self.worker.close()
        self.context.term()


def play(story: Any, sink: Heard, limits: Limits | None = None) -> None:
    async def scene() -> None:
        with tempfile.TemporaryDirectory(prefix="bl-") as folder:
            one = Scene(Path(folder), sink, limits or Limits())
            try:
                async with asyncio.timeout(120):
                    await story(one)
            finally:
                one.close()

    asyncio.run(scene())


def test_tokens_come_through_and_an_abort_goes_out() -> None:
    sink = Heard()

    async def story(scene: Scene) -> None:
        await scene.join()
        scene.shell.add(ev.Add("r", (b"frame",)))
        assert (await scene.worker.recv_multipart())[1:] == [b"add", b"", b"frame"]
        await scene.say(ev.Item("r", (5, 6)))
        assert [await sink.tokens.get(), await sink.tokens.get()] == [5, 6]
        scene.shell.abort(["r"])
        assert (await scene.worker.recv_multipart())[1:] == [b"abort", msgspec.msgpack.encode(("r",))]

    play(story, sink)


def test_a_backlog_of_a_worker_leaves_others_their_turns() -> None:
    """As after a standstill. Who writes to the clients runs between two messages."""

    class Counts(Heard):
        turns = 0

        def deliver(self, slot: str, generation: int, outputs: Outputs) -> None:
            at.append(self.turns)
            super().deliver(slot, generation, outputs)

    sink, at = Counts(), list[int]()

    async def turn() -> None:
        while True:
            sink.turns += 1
            await asyncio.sleep(0)

    async def story(scene: Scene) -> None:
        await scene.join()
        scene.shell.add(ev.Add("r", (b"frame",)))
        assert (await scene.worker.recv_multipart())[1] == b"add"
        turning = asyncio.create_task(turn())
        for token in range(200):
            await scene.say(ev.Item("r", (token,)))
        assert [await sink.tokens.get() for _ in range(200)] == list(range(200))
        turning.cancel()
        assert all(later > sooner for sooner, later in itertools.pairwise(at))

    play(story, sink)


@pytest.mark.parametrize("frames", [[b"out", b"x", b"y"], [b"what"], [b"out"], [b"out", b"\x80", b"\x80"]])
def test_an_unreadable_message_takes_the_worker_out(frames: list[bytes]) -> None:
    sink = Heard()

    async def story(scene: Scene) -> None:
        await scene.join()
        await scene.worker.send_multipart([b"\0\0", *frames])
        assert await sink.left_slots.get() == "s"
        assert scene.shell.serving_slots() == []

    play(story, sink)


def test_a_waiting_request_ends_by_the_timer() -> None:
    sink = Heard()

    async def story(scene: Scene) -> None:
        scene.shell.add(ev.Add("r", (b"frame",)))
        assert await sink.failed.get() == "r no_healthy_slot"

    play(story, sink, Limits(waiting_s=0.05))


def test_an_admin_call_does_not_wait_for_slots_that_gave_up() -> None:
    async def story(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.shell.some_slot(3600.0))
        other = asyncio.create_task(scene.shell.some_slot(3600.0, "t"))
        scene.shell.given_up(["s"])
        with pytest.raises(NoHealthySlot, match="every slot has given up"):
            await waiting
        assert not other.done(), "this one may come"
        scene.shell.given_up(["t"])
        with pytest.raises(NoHealthySlot, match="t has given up"):
            await other
        await scene.join()
        assert await scene.shell.some_slot(3600.0) == ["s"]

    play(story, Heard(), Limits(slots=frozenset("s")))


def test_a_broken_invariant_ends_the_watch() -> None:
    """A bug is not caught and forgotten: the daemon ends, and systemd starts it again."""
    sink = Heard(trap=True)

    async def story(scene: Scene) -> None:
        await scene.join()
        scene.shell.add(ev.Add("r", (b"frame",)))
        await scene.say(ev.Item("r", (5,)))
        with pytest.raises(ZeroDivisionError):
            await scene.shell.watch()

    play(story, sink)
