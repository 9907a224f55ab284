"""The router's heart, in the front end's own process and across a socket: one contract, both pass it.

The shell, the core and vLLM's structs are real; the worker's end of the link is played by the test.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import zmq
import zmq.asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason, UtilityOutput
from vllm.v1.serial_utils import UtilityResult

from belayer.errors import BadMessage, BelayerError, NoHealthySlot, WorkerGone
from belayer.messages.worker import Stamp
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.front_door import FrontDoor
from belayerd.router.heart import Heart, Known
from belayerd.router.journal import Journal
from belayerd.router.local_heart import LocalHeart
from belayerd.router.remote_heart import RemoteHeart
from belayerd.router.shell import Shell
from belayerd.router.vllm_codec import Codec

KINDS = ("local", "remote")
READY = msgspec.msgpack.encode(
    {
        "max_model_len": 64, "num_gpu_blocks": 1, "block_size": 16, "dp_stats_address": None, "dtype": "float32",
        "vllm_version": "0", "world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_rank": 0, "max_num_seqs": 1,
        "max_num_batched_tokens": 1, "instance_id": "", "supports_lora": False, "max_loras": 0,
    }
)  # fmt: skip


class Listener:
    """A front end that writes down what it is told, in order."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.stats = 0

    def deliver(self, slot: str, generation: int, outputs: Any) -> None:
        self.stats += outputs.scheduler_stats is not None
        for row in outputs.outputs:
            self.told.put_nowait(
                ("tokens", slot, generation, row.request_id, list(row.new_token_ids), row.finish_reason)
            )

    def replay(self, told: ev.Replay) -> None:
        self.told.put_nowait(("replay", told))

    def cut(self, reader: str) -> None:
        self.told.put_nowait(("cut", reader))

    def fail(self, reader: str, error: BelayerError) -> None:
        self.told.put_nowait(("fail", reader, str(error.code), error.message))

    def refuse(self, reader: str, error: BelayerError) -> None:
        self.told.put_nowait(("refuse", reader, str(error.code), error.message))

    def ready(self, payload: bytes) -> None:
        if payload == b"\xc1":
            raise BadMessage("no ready info")
        self.told.put_nowait(("ready", payload))


class Stage:
    """A router's heart, a front end before it, and a worker behind it."""

    def __init__(self, kind: str, folder: Path, limits: Limits) -> None:
        self.kind, self.folder = kind, folder
        self.codec, self.ears = Codec(), Listener()
        self.context = zmq.asyncio.Context()
        self.worker = self.context.socket(zmq.ROUTER)
        self.worker.set(zmq.LINGER, 0)
        self.worker.set(zmq.ROUTER_HANDOVER, 1)
        self.worker.bind(f"ipc://{folder}/w")
        self.core = Core(limits)
        self.local = LocalHeart(self.codec, ["s"], most=2)
        book = Journal(folder, "t", 1 << 20, list)
        self.shell = Shell(self.core, book, self.codec, self.local, 0, structlog.get_logger())
        self.heart: Heart = self.local
        self.door: FrontDoor | None = None
        self.remotes: list[RemoteHeart] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.generation = self.seq = 0

    async def begin(self) -> None:
        if self.kind == "local":
            self.local.attach(self.shell, self.ears)
            return
        self.door = FrontDoor(self.folder / "f", self.local, self.codec, 30.0, structlog.get_logger())
        self.local.attach(self.shell, self.door)
        self.tasks.append(asyncio.create_task(self.door.serve()))
        self.heart = await self.front(0, self.ears)

    async def front(self, number: int, ears: Listener, abort: Any = None) -> RemoteHeart:
        assert self.door is not None
        identity = f"{number}.x".encode()
        side = self.door.expect(identity, number)
        remote = RemoteHeart(self.folder / "f", identity, self.codec, ears, abort)
        self.remotes.append(remote)
        await remote.greet()
        self.tasks.append(asyncio.create_task(remote.read()))
        remote.serves()
        while not side.serving:
            self.door.changed.clear()
            await self.door.changed.wait()
        return remote

    async def join(self, ready: bytes = READY) -> None:
        self.generation, self.seq = self.generation + 1, 0
        register = ev.Register("s", self.generation, f"w{self.generation}", f"ipc://{self.folder}/w")
        joining = asyncio.create_task(self.shell.register(register))
        while (frames := await self.worker.recv_multipart())[1] != b"hello" or frames[2] == getattr(self, "token", b""):
            pass
        self.token = frames[2]
        standing = msgspec.msgpack.encode({"seq": 0})
        await self.worker.send_multipart([b"\0\0", b"ready", ready, self.token, standing])
        await joining

    async def gets(self) -> list[bytes]:
        """The next message of the router that is no question about the link."""
        while (frames := await self.worker.recv_multipart())[1] == b"hello":
            pass
        return list(frames[1:])

    async def says(self, *rows: Any, **more: Any) -> None:
        stamp = Stamp(slot="s", generation=self.generation, worker_id=f"w{self.generation}", seq=self.seq)
        self.seq += 1
        outputs = EngineCoreOutputs(outputs=list(rows), **more)
        await self.worker.send_multipart([b"\0\0", b"out", msgspec.msgpack.encode(stamp), *self.codec.encode(outputs)])

    def lose(self, removed: bool = False) -> None:
        self.shell.unregister(ev.Unregister("s", self.generation, removed=removed))

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for remote in self.remotes:
            remote.close()
        self.shell.close()
        if self.door is not None:
            self.door.close()
        self.worker.close()
        self.context.term()


def play(kind: str, story: Callable[[Stage], Awaitable[None]], limits: Limits | None = None) -> None:
    async def scene() -> None:
        with tempfile.TemporaryDirectory(prefix="bl-") as folder:
            stage = Stage(kind, Path(folder), limits or Limits())
            try:
                async with asyncio.timeout(120):
                    await stage.begin()
                    await story(stage)
            finally:
                await stage.end()

    asyncio.run(scene())


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_come_in_order_and_an_abort_reaches_the_worker(kind: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.join()
        assert (await stage.ears.told.get())[0] == "ready"
        stage.heart.add(ev.Add("r", (b"frame",)))
        assert await stage.gets() == [b"add", b"", b"frame"]
        await stage.says(EngineCoreOutput("r", [5, 6]))
        await stage.says(EngineCoreOutput("r", [7]))
        assert await stage.ears.told.get() == ("tokens", "s", 1, "r", [5, 6], None)
        assert await stage.ears.told.get() == ("tokens", "s", 1, "r", [7], None)
        stage.heart.abort(["r"])
        assert await stage.gets() == [b"abort", msgspec.msgpack.encode(("r",))]
        assert not stage.core.requests

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_is_told_and_counted(kind: str) -> None:
    async def story(stage: Stage) -> None:
        stage.heart.add(ev.Add("a", (b"x",), name="mine", digest=b"1"))
        stage.heart.add(ev.Add("b", (b"x",), name="mine", digest=b"1"))
        assert (await stage.ears.told.get())[:3] == ("refuse", "b", "refused")
        stage.heart.add(ev.Add("c", (b"x",), name="nobody", position=3))
        assert (await stage.ears.told.get())[:3] == ("refuse", "c", "request_unknown")
        assert stage.core.counters.refused == {"refused": 1, "request_unknown": 1}
        assert list(stage.core.requests) == ["a"]
        stage.heart.abort(["b"])  # its front end forgets it; that ends nothing of the other's
        assert await stage.heart.known(["mine"]) == Known(True, True, 0)

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_admission(kind: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.join()
        assert await stage.heart.known(["x", "0_x"]) == Known()
        stage.heart.add(ev.Add("a", (b"x",), name="0_x", digest=b"1"))
        assert not await stage.heart.full()
        stage.heart.add(ev.Add("b", (b"x",)))
        assert await stage.heart.full()
        await stage.says(EngineCoreOutput("a", [5, 6]), EngineCoreOutput("b", [1], finish_reason=FinishReason.LENGTH))
        assert [(await stage.ears.told.get())[0] for _ in range(3)] == ["ready", "tokens", "tokens"]
        assert await stage.heart.known(["x", "0_x"]) == Known(True, True, 2)
        await stage.says(EngineCoreOutput("a", [7], finish_reason=FinishReason.STOP, stop_reason=7))
        assert await stage.ears.told.get() == ("tokens", "s", 1, "a", [7], FinishReason.STOP)
        assert await stage.heart.known(["x", "0_x"]) == Known(tokens=3)
        assert not await stage.heart.full()
        stage.heart.add(ev.Add("again", (b"x",), name="0_x", digest=b"1", position=1))
        _, told = await stage.ears.told.get()
        assert (told.reader, told.tokens, told.finish, told.stop) == ("again", (5, 6, 7), "stop", 7)
        assert [span.slot for span in told.spans] == ["s"]

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_room_is_kept_for_what_was_let_in(kind: str) -> None:
    """Two may be live."""

    async def story(stage: Stage) -> None:
        assert not await stage.heart.admit("many", 3)
        assert await stage.heart.admit("both", 2)
        assert await stage.heart.full()
        assert not await stage.heart.admit("more", 1)
        stage.heart.add(ev.Add("a", (b"x",), place="both"))
        assert await stage.heart.full(), "one is here, one is still to come"
        stage.heart.leave("both")
        assert not await stage.heart.full()
        assert await stage.heart.admit("more", 1)
        stage.heart.add(ev.Add("b", (b"x",), place="more"))
        stage.heart.leave("more")
        assert await stage.heart.full()
        stage.heart.abort(["a", "b"])
        assert await stage.heart.admit("last", 2)

    play(kind, story)


def test_room_that_a_dead_front_kept_is_free_again() -> None:
    async def story(stage: Stage) -> None:
        second = await stage.front(1, Listener())
        assert await second.admit("its", 2)
        assert await stage.heart.full()
        assert stage.door is not None
        stage.door.lost(b"1.x")
        assert await stage.heart.admit("mine", 2)
        stage.heart.add(ev.Add("a", (b"x",), place="mine"))
        stage.heart.add(ev.Add("b", (b"x",), place="mine"))
        assert await stage.heart.full()
        assert stage.door.sides[b"0.x"].places == set(), "nothing is remembered of places that were taken"

    play("remote", story)


@pytest.mark.parametrize("kind", KINDS)
def test_ends_without_a_worker_are_told_by_name(kind: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.join()
        assert (await stage.ears.told.get())[0] == "ready"
        for name, wish in (("a", ev.OnDeath.ABORT), ("e", ev.OnDeath.ERROR)):
            stage.heart.add(ev.Add(name, (b"x",), on_death=wish))
            assert (await stage.gets())[0] == b"add"
        stage.lose()
        assert await stage.ears.told.get() == ("cut", "a")
        assert (await stage.ears.told.get())[:3] == ("fail", "e", "worker_gone")

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_serving_slots_are_waited_for_with_a_bound(kind: str) -> None:
    async def story(stage: Stage) -> None:
        assert not await stage.heart.serving("")
        with pytest.raises(NoHealthySlot):
            await stage.heart.slots(0.01, "")
        waiting = asyncio.create_task(stage.heart.slots(100.0, "s"))
        await stage.join()
        assert await waiting == ["s"]
        assert await stage.heart.serving("")
        assert await stage.heart.serving("s")
        assert not await stage.heart.serving("other")

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_an_admin_call_is_answered_once_or_its_worker_was_lost(kind: str) -> None:
    async def story(stage: Stage) -> None:
        with pytest.raises(WorkerGone, match="no worker"):
            await stage.heart.call("s", 1, [b"x"]) if stage.core.slots else await no_slot(stage)
        await stage.join()
        call = asyncio.create_task(stage.heart.call("s", 7, [b"frames", b"more"]))
        assert await stage.gets() == [b"util", b"frames", b"more"]
        result = UtilityResult({"answer": [1, None]})
        await stage.says(utility_output=UtilityOutput(call_id=7, result=result))
        assert (await call).result.result == {"answer": [1, None]}
        call = asyncio.create_task(stage.heart.call("s", 8, [b"frames"]))
        await stage.gets()
        await stage.says(utility_output=UtilityOutput(call_id=8, failure_message="it cannot"))
        assert (await call).failure_message == "it cannot"
        call = asyncio.create_task(stage.heart.call("s", 9, [b"frames"]))
        await stage.gets()
        stage.lose()
        with pytest.raises(WorkerGone, match="before it answered"):
            await call

    async def no_slot(stage: Stage) -> None:
        await stage.join()
        stage.lose()
        await stage.heart.call("s", 1, [b"x"])

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_inside_an_admin_call_may_be_silent_as_long_as_that_may_take(kind: str) -> None:
    """It runs calls in its loop and answers no question meanwhile. How long is legal, the caller or the slot says."""

    async def story(stage: Stage) -> None:
        stage.shell.link_silence_s = 0.5  # of one question
        stage.shell.call_s = {"s": 60.0} if kind == "local" else {}
        await stage.join()
        asked = 0
        within_s = 0.0 if kind == "local" else 60.0
        call = asyncio.create_task(stage.heart.call("s", 7, [b"frames"], within_s))
        while asked < 6:
            asked += (await stage.worker.recv_multipart())[1] == b"hello"
        assert not call.done()
        await stage.says(utility_output=UtilityOutput(call_id=7, result=UtilityResult("done")))
        assert (await call).result.result == "done"
        assert stage.core.counters.torn_links == 0
        stage.shell.call_s = {}
        late = asyncio.create_task(stage.heart.call("s", 8, [b"frames"]))
        with pytest.raises(WorkerGone, match="before it answered"):
            await late  # the same silence, which nobody allows now
        assert stage.core.counters.torn_links == 1

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_joins_while_paused_is_paused_first(kind: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.join()
        await stage.heart.pausing(["s"], True)
        stage.lose()
        stage.heart.add(ev.Add("r", (b"frame",)))
        await stage.join()
        first = await stage.gets()
        assert first[0] == b"util"
        assert b"pause_scheduler" in first[1]
        assert (await stage.gets())[0] == b"add"
        await stage.heart.pausing(["s"], False)
        stage.lose()
        await stage.join()
        assert (await stage.gets())[0] == b"add"

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_what_clients_do_wrong_is_counted_in_one_place(kind: str) -> None:
    async def story(stage: Stage) -> None:
        stage.heart.declined["body_too_large"] += 1
        for _ in range(2):
            stage.heart.mistakes[413] += 1
        await stage.heart.full()  # it is answered after what was said before it
        assert (dict(stage.local.declined), dict(stage.local.mistakes)) == ({"body_too_large": 1}, {413: 2})

    play(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_whose_ready_info_cannot_be_read_does_not_join(kind: str) -> None:
    async def story(stage: Stage) -> None:
        with pytest.raises(BadMessage):
            await stage.join(b"\xc1")
        assert not await stage.heart.serving("")
        await stage.join()
        assert await stage.ears.told.get() == ("ready", READY)

    play(kind, story)
