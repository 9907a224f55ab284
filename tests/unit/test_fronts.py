"""Several fronts: what their death does to requests, when one is given up, how long until the next life."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
import structlog
import zmq
import zmq.asyncio

from belayerd.router import events as ev
from belayerd.router import front_door
from belayerd.router.core import Core, Limits
from belayerd.router.front_loads import AWAY, Loads
from belayerd.router.fronts import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s
from belayerd.router.local_heart import LocalHeart

FRAMES = (b"request",)


def serve(core: Core, slot: str = "a", generation: int = 0) -> None:
    core.step(ev.Register(slot, generation, f"{slot}-{generation}", "ipc://w"), 0.0)
    core.step(ev.Ready(slot, generation, f"{slot}-{generation}"), 0.0)


def test_a_lost_front_ends_what_nobody_can_ask_for() -> None:
    core = Core(Limits())
    serve(core)
    for reader, name in (("r", ""), ("n", "mine")):
        core.step(ev.Add(reader, FRAMES, name=name), 0.0)
    done = core.step(ev.FrontLost(("r", "n", "ended before")), 1.0)
    assert [effect for effect in done if isinstance(effect, ev.SendAbort)] == [ev.SendAbort("a-0", ("r",))]
    assert list(core.requests) == ["n"]
    assert core.requests["n"].readers == []
    assert core.counters.aborted == 1
    again = core.step(ev.Add("n2", FRAMES, name="mine", position=0), 2.0)
    assert [type(effect) for effect in again] == [ev.Replay]
    assert core.requests["n"].readers == ["n2"]


def test_a_lost_front_takes_only_its_own_readers() -> None:
    core = Core(Limits())
    serve(core)
    core.step(ev.Add("one", FRAMES, name="mine"), 0.0)
    core.step(ev.Add("two", FRAMES, name="mine", position=0), 0.0)
    assert core.step(ev.FrontLost(("one",)), 1.0) == []
    assert core.requests["one"].readers == ["two"]
    out = core.step(ev.Outputs("a", 0, "a-0", 0, (ev.Item("one", (5,)),)), 1.0)
    assert [effect.readers for effect in out if isinstance(effect, ev.Deliver)] == [("two",)]


def test_a_named_request_that_waits_goes_on_waiting() -> None:
    core = Core(Limits(waiting_s=10.0))
    core.step(ev.Add("n", FRAMES, name="mine"), 0.0)
    core.step(ev.FrontLost(("n",)), 1.0)
    assert core.waiting == 1
    done = core.step(ev.Tick(), 11.0)
    assert [(effect.code, effect.readers) for effect in done if isinstance(effect, ev.Fail)] == [
        ("no_healthy_slot", ())
    ]


def test_pauses_grow_to_a_bound() -> None:
    pauses = [pause_s(number) for number in range(1, 12)]
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_loads_are_shared_by_port_and_a_dead_front_counts_no_more() -> None:
    loads = Loads(fronts=2, ports=2)
    for number in range(2):
        for port in range(2):
            row, own = loads.at(number).of(port)
            assert row[own] == AWAY
            row[own] = 10 * number + port
    assert [list(loads.of(port)[0]) for port in range(2)] == [[0, 10], [1, 11]]
    loads.away(1)
    assert [list(loads.of(port)[0]) for port in range(2)] == [[0, AWAY], [1, AWAY]]


class Plain:
    """Stands where the codec stands."""

    def check_ready(self, payload: bytes) -> None: ...


class Deaf:
    """A front that is greeted, says that it serves, and then reads nothing more."""

    def __init__(self, door: front_door.FrontDoor, path: Path) -> None:
        self.door, self.side = door, door.expect(b"0.x", 0)
        self.context = zmq.asyncio.Context()
        self.socket: Any = self.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTING_ID, b"0.x")
        self.socket.connect(f"ipc://{path}")

    async def serves(self) -> None:
        await self.socket.send_multipart([b"serving"])
        while not self.side.serving:
            self.door.changed.clear()
            await self.door.changed.wait()


def given_up(silence_s: float, most: int, story: Any) -> bytes:
    """The front that is to be killed after ``story(door, deaf)``."""

    async def scene() -> bytes:
        with tempfile.TemporaryDirectory(prefix="bl-") as folder:
            path = Path(folder) / "f"
            heart = LocalHeart(Plain(), ["s"], 10)
            door = front_door.FrontDoor(path, heart, Plain(), silence_s, structlog.get_logger(), most)
            named: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            door.give_up = named.set_result  # a second call would raise
            serving = asyncio.create_task(door.serve())
            deaf = Deaf(door, path)
            try:
                async with asyncio.timeout(60):
                    await story(door, deaf)
                    return await named
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                deaf.socket.close()
                deaf.context.term()
                door.close()

    return asyncio.run(scene())


def test_a_front_that_leaves_too_much_unread_is_given_up_once_and_its_queue_ends() -> None:
    async def story(door: front_door.FrontDoor, deaf: Deaf) -> None:
        await deaf.serves()
        while not deaf.side.given_up:
            door.ready(b"x" * 1000)
        sent = deaf.side.sent
        assert sent < 1 << 20
        door.ready(b"x" * 1000)
        assert deaf.side.sent == sent, "nothing more is kept for it"

    assert given_up(1000.0, 100_000, story) == b"0.x"


def test_a_front_that_does_not_answer_is_given_up() -> None:
    async def story(door: front_door.FrontDoor, deaf: Deaf) -> None:
        await deaf.serves()

    assert given_up(0.6, 1 << 30, story) == b"0.x"


@pytest.mark.parametrize(
    "frames", [[b"add", b"\xc1"], [b"what"], [b"add"], [b"ask", b"1", b"\x80"], [b"heard", b"\xc1"]]
)
def test_a_front_that_says_what_cannot_be_read_is_given_up(frames: list[bytes]) -> None:
    async def story(door: front_door.FrontDoor, deaf: Deaf) -> None:
        await deaf.socket.send_multipart(frames)

    assert given_up(1000.0, 1 << 30, story) == b"0.x"
