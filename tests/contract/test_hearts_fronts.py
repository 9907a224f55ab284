"""Several fronts of one router: each hears its own, and one that dies or breaks takes nobody with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from belayerd.router import events as ev
from belayerd.router.heart import Known
from belayerd.router.remote_heart import RemoteHeart
from tests.contract.test_hearts import READY, Listener, Stage, play


def test_two_fronts_hear_their_own_and_statistics_count_once() -> None:
    async def story(stage: Stage) -> None:
        await stage.join()
        other = Listener()
        second = await stage.front(1, other)
        assert (await other.told.get()) == ("ready", READY), "also to one that comes later"
        stage.heart.add(ev.Add("a", (b"x",), name="n", digest=b"1"))
        assert (await stage.gets())[0] == b"add"
        second.add(ev.Add("b", (b"x",)))
        assert (await stage.gets())[0] == b"add"
        second.add(ev.Add("c", (b"x",), name="n", digest=b"1", position=0))
        assert (await other.told.get())[0] == "replay", "the same request, by another front"
        rows = [EngineCoreOutput("a", [5]), EngineCoreOutput("b", [6])]
        await stage.says(*rows, scheduler_stats=SchedulerStats())
        assert await stage.ears.told.get() == ("ready", READY)
        assert await stage.ears.told.get() == ("tokens", "s", 1, "a", [5], None)
        assert {(await other.told.get())[3:5][0] for _ in range(2)} == {"b", "c"}
        await stage.says(scheduler_stats=SchedulerStats())
        await stage.says(EngineCoreOutput("a", [7], finish_reason=FinishReason.LENGTH))
        assert await stage.ears.told.get() == ("tokens", "s", 1, "a", [7], FinishReason.LENGTH)
        assert (stage.ears.stats, other.stats) == (2, 0)

    play("remote", story)


def test_requests_of_a_dead_front_end_and_named_ones_go_on() -> None:
    async def story(stage: Stage) -> None:
        await stage.join()
        other = Listener()
        second = await stage.front(1, other)
        for reader, name in (("a", "n"), ("b", "")):
            stage.heart.add(ev.Add(reader, (b"x",), name=name, digest=b"1"))
            assert (await stage.gets())[0] == b"add"
        second.add(ev.Add("c", (b"x",)))
        assert (await stage.gets())[0] == b"add"
        waiting = asyncio.create_task(stage.heart.slots(100.0, "never"))
        await stage.heart.full()
        assert stage.door is not None
        stage.door.lost(b"0.x")
        assert await stage.gets() == [b"abort", msgspec.msgpack.encode(("b",))]
        assert set(stage.core.requests) == {"a", "c"}
        stage.heart.add(ev.Add("late", (b"x",)))  # still in the pipe of the dead one
        await stage.says(EngineCoreOutput("a", [5]), EngineCoreOutput("c", [6]))
        told = [await other.told.get() for _ in range(2)]  # the worker and the front speak on sockets of their own
        assert await second.known(["n"]) == Known(True, False, 0), "nobody has heard what came since"
        second.add(ev.Add("d", (b"x",), name="n", digest=b"1", position=0))
        told.append(await other.told.get())
        assert [one[0] for one in told] == ["ready", "tokens", "replay"]
        assert told[2][1].tokens == (5,)
        assert set(stage.core.requests) == {"a", "c"}, "what it said last is not heard"
        waiting.cancel()

    play("remote", story)


def test_requests_are_ended_at_all_other_fronts() -> None:
    asked: list[Sequence[str] | None] = []

    async def abort(names: Sequence[str] | None) -> int:
        asked.append(names)
        return 3

    async def story(stage: Stage) -> None:
        await stage.front(1, Listener(), abort)
        await stage.front(2, Listener(), abort)
        first = stage.remotes[0]
        assert await first.abort_elsewhere(None) == 6
        assert await first.abort_elsewhere(["x"]) == 6
        assert asked == [None, None, ("x",), ("x",)]

    play("remote", story)


def test_a_front_whose_question_cannot_be_answered_is_given_up_by_name() -> None:
    """It waits for the answer without a deadline: silence would hold its client for ever."""

    async def story(stage: Stage) -> None:
        assert stage.door is not None
        assert isinstance(stage.heart, RemoteHeart)
        killed: asyncio.Queue[bytes] = asyncio.Queue()

        def broken() -> bytes:
            raise ArithmeticError("a metric broke")

        stage.door.scrape, stage.door.give_up = broken, killed.put_nowait
        asking = asyncio.create_task(stage.heart.scrape())
        assert await killed.get() == b"0.x"
        asking.cancel()

    play("remote", story)


def test_a_front_that_breaks_in_an_abort_ends_and_holds_nobody() -> None:
    async def story(stage: Stage) -> None:
        async def broken(names: Sequence[str] | None) -> int:
            raise ArithmeticError("an abort broke")

        assert stage.door is not None
        assert isinstance(stage.heart, RemoteHeart)
        await stage.front(1, Listener(), broken)
        reading = stage.tasks[-1]
        asking = asyncio.create_task(stage.heart.abort_elsewhere(["x"]))
        await asyncio.wait((reading,))
        assert isinstance(reading.exception(), ExceptionGroup)
        stage.door.lost(b"1.x")
        assert await asking == 0

    play("remote", story)
