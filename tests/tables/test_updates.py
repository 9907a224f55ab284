"""Who may open an update and who may end it: belayerd's part, over workers and an owner that only answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from belayer.config import Policy
from belayer.errors import DaemonUnreachable, Fenced, Refused, WeightsTorn, WorkerFailed, WorkerGone
from belayer.messages import trainer as m
from belayer.messages.common import Done
from belayer.messages.control import BeginWeightsUpdate, EndWeightsUpdate
from belayer.messages.owner import OwnerStatusReply, WeightsInfo
from belayer.messages.worker import (
    FollowWeights,
    Oracle,
    OracleReply,
    Pause,
    Proceed,
    WorkerState,
    WorkerStatusReply,
)
from belayerd.pair import Pair, Ref
from belayerd.trainers import Trainers
from belayerd.updates import Opener, Seat, Updates

MODEL = "slot0"


class Log:
    def info(self, event: str, **fields: object) -> None:
        pass

    error = warning = info


class Owner:
    """gpuowner@weights, as an update asks it."""

    def __init__(self) -> None:
        self.version, self.writer = 1, ""
        self.states: tuple[str, ...] = ("sealed",)  # of each rank's part

    async def status(self) -> OwnerStatusReply:
        rows = tuple(
            WeightsInfo(
                model=MODEL, state=state, version=self.version, nbytes=1, digest=f"d{rank}", readers=(), load_ms=0.0,
                load_mb_s=0.0, owner_generation=1, writer=self.writer, rank=rank,
            )
            for rank, state in enumerate(self.states)
        )  # fmt: skip
        return OwnerStatusReply(kind="weights", pid=7, backend="memfd", owner_generation=1, weights=rows)


class Slot:
    """A slot whose main only answers; it is its own link. ``orders``: what its main was told."""

    name = model = MODEL

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.version, self.paused = 1, False
        self.in_handover = self.asked = False
        self.ranks: tuple[str, ...] = ()  # digests that ranks 1 and up map
        self.left: list[str] = []

    @property
    def pair(self) -> Pair:
        return Pair(slot=MODEL, generation=1, main=Ref(worker_id="w1", pid=1, start_time=1))

    def settled(self) -> bool:
        self.asked = True
        return not self.in_handover

    def seats(self) -> tuple[Seat | None, Seat | None]:
        link: Any = self
        return Seat("w1", link, 1, self.version, self.paused), None

    def followed(self, worker_id: str, reply: OracleReply) -> None: ...
    def left_behind(self, worker_id: str, why: str) -> None:
        self.left.append(why)

    def try_again(self) -> None: ...

    async def call(self, message: msgspec.Struct, reply: type[Any], within: float, moving: Any = None) -> Any:
        self.orders.append(type(message).__name__)
        match message:
            case Pause():
                self.paused = True
            case Proceed():
                self.paused = False
            case FollowWeights():
                self.version = message.version
                return OracleReply(
                    oracle=Oracle(weight_version=self.version, token=1, logprob=0.0), equal=False, ms=0.0
                )
            case _:
                return WorkerStatusReply(
                    worker_id="w1", slot=MODEL, pid=1, state=WorkerState.MAIN, weight_version=self.version,
                    weights_digest="d0", rank_digests=self.ranks, paused=self.paused,
                )  # fmt: skip
        return Done(detail="")


class LongStep(Slot):
    """Its main is inside a step, and takes no message before its end; or ``dies`` in it."""

    def __init__(self, *, dies: bool = False) -> None:
        super().__init__()
        self.dies, self.gone, self.within = dies, False, 0.0

    def seats(self) -> tuple[Seat | None, Seat | None]:
        return (None, None) if self.gone else super().seats()

    async def call(self, message: msgspec.Struct, reply: type[Any], within: float, moving: Any = None) -> Any:
        if isinstance(message, Pause):
            self.within, self.gone = within, self.dies
            raise WorkerGone("it has ended") if self.gone else WorkerFailed("no answer")
        return await super().call(message, reply, within, moving)


class FollowedUnheard(Slot):
    """Its main has moved to version 2 while no belayerd was there; the file says 1."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.paused, self.on_file = 2, True, 1

    def seats(self) -> tuple[Seat | None, Seat | None]:
        link: Any = self
        return Seat("w1", link, 1, self.on_file, self.paused), None

    def followed(self, worker_id: str, reply: OracleReply) -> None:
        self.on_file = reply.oracle.weight_version

    async def call(self, message: msgspec.Struct, reply: type[Any], within: float, moving: Any = None) -> Any:
        answer = await super().call(message, reply, within, moving)
        if isinstance(answer, WorkerStatusReply):
            return msgspec.structs.replace(answer, oracle=Oracle(weight_version=2, token=1, logprob=0.0))
        return answer


class LosesItsOwner(Slot):
    """The owner of its weights is killed as it begins to follow, once."""

    lost = False

    async def call(self, message: msgspec.Struct, reply: type[Any], within: float, moving: Any = None) -> Any:
        if isinstance(message, FollowWeights) and not self.lost:
            self.lost = True
            raise DaemonUnreachable("owner-weights.sock closed the connection on AttachWeights")
        return await super().call(message, reply, within, moving)


class Host:
    def __init__(self, path: Path, slot: Slot | None = None, *, in_place: bool = False) -> None:
        self.owner, self.slot = Owner(), slot or Slot()
        owner: Any = self.owner
        self.trainers = Trainers(path, [self.slot], (), Log())
        self.updates = Updates([self.slot], owner, {MODEL: in_place}, Policy(), Log(), self.trainers)

    async def registered(self) -> int:
        """A new life of trainer "t"; an earlier one is fenced."""
        reply = await self.trainers.handle(m.RegisterTrainer(trainer="t", model=MODEL))
        assert isinstance(reply, m.TrainerRegistered)
        return reply.epoch

    async def begin(self, update: str, epoch: int = 0) -> None:
        trainer = "t" if epoch else ""
        asked = BeginWeightsUpdate(model=MODEL, update=update, trainer=trainer, epoch=epoch)
        await self.updates.begin(MODEL, Opener.of(asked))

    async def end(self, update: str, epoch: int = 0) -> int:
        trainer = "t" if epoch else ""
        done = await self.updates.end(EndWeightsUpdate(model=MODEL, update=update, trainer=trainer, epoch=epoch))
        return done.version


def run(path: Path, body: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        host = Host(path)
        await body(host)
        assert host.slot.left == []

    asyncio.run(main())


def test_a_trainer_whose_place_was_taken_pauses_nobody(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        old, new = await host.registered(), await host.registered()
        with pytest.raises(Fenced, match="life 1 of trainer 't' has ended"):
            await host.begin("a", old)
        assert host.slot.orders == []
        await host.begin("b", new)
        assert host.slot.paused
        with pytest.raises(Fenced):
            await host.begin("a", old)
        with pytest.raises(Fenced):
            await host.end("a", old)
        assert host.slot.paused, "the new life's update stands"
        await host.end("b", new)
        assert not host.slot.paused

    run(tmp_path / "l", body)


def test_one_whose_place_is_taken_while_it_waits_for_a_handover_pauses_nobody(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        old = await host.registered()
        host.slot.in_handover = True
        waiting = asyncio.create_task(host.begin("a", old))
        while not host.slot.asked:
            await asyncio.sleep(0)
        await host.registered()
        host.slot.in_handover = False
        with pytest.raises(Fenced):
            await waiting
        assert "Pause" not in host.slot.orders
        await host.begin("b")

    run(tmp_path / "l", body)


def test_one_whose_place_is_taken_inside_its_update_ends_its_pause_and_hears_of_it(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        old = await host.registered()
        await host.begin("a", old)
        await host.registered()
        host.owner.version = 2
        with pytest.raises(Fenced):
            await host.end("a", old)
        assert (host.slot.version, host.slot.paused) == (2, False)

    run(tmp_path / "l", body)


def test_an_end_asked_again_answers_with_what_is_sealed_and_tells_nobody_anything(tmp_path: Path) -> None:
    """Of the same life, and of the next one, which knows of no update."""

    async def body(host: Host) -> None:
        await host.begin("a")
        host.owner.version = 2
        assert await host.end("a") == 2
        told = [order for order in host.slot.orders if order != "WorkerStatus"]
        assert told == ["Pause", "FollowWeights", "Proceed"]
        assert await host.end("a") == 2
        assert [order for order in host.slot.orders if order != "WorkerStatus"] == told

    async def killed_inside(host: Host) -> None:
        host.slot.paused, host.owner.version = True, 2
        assert await host.end("a") == 2
        assert (host.slot.version, host.slot.paused) == (2, False)

    run(tmp_path / "l", body)
    run(tmp_path / "l", killed_inside)


def test_an_end_asked_again_does_not_end_the_pause_of_the_next_update(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        await host.begin("b")
        with pytest.raises(Refused, match="another update of slot0 is open") as why:
            await host.end("a")
        assert "v1 is sealed" in why.value.kept
        assert host.slot.paused
        host.owner.writer = "b's writer"
        for _ in range(2):
            with pytest.raises(Refused, match="b's writer is still writing"):
                await host.end("b")
        host.owner.writer = ""
        await host.end("")  # a caller that names none ends whichever is open
        assert not host.slot.paused

    run(tmp_path / "l", body)


@pytest.mark.parametrize("in_place", [True, False])
def test_nothing_is_written_in_place_under_a_main_that_takes_a_step(tmp_path: Path, in_place: bool) -> None:
    """Its tokens would be of two versions (R4). Beside the last version, a writer harms nobody."""

    async def main() -> None:
        slot = LongStep()
        host = Host(tmp_path / "t", slot, in_place=in_place)
        if in_place:
            with pytest.raises(Refused, match="does not pause: no answer"):
                await host.begin("a")
            assert host.updates.held == set()
            assert slot.within > Policy().step_deadline_s, "waited for as long as the writer waits"
        else:
            await host.begin("a")

    asyncio.run(main())


def test_a_main_that_ends_instead_of_pausing_stops_no_update(tmp_path: Path) -> None:
    """Its successor waits at the gate."""

    async def main() -> None:
        host = Host(tmp_path / "t", LongStep(dies=True), in_place=True)
        await host.begin("a")
        assert host.updates.held == {MODEL}

    asyncio.run(main())


def test_a_main_that_followed_unheard_is_asked_once(tmp_path: Path) -> None:
    """belayerd was killed while its main verified the new version. The next life asked it again every second, and told
    routers and trainers the old version."""

    async def main() -> None:
        slot = FollowedUnheard()
        host = Host(tmp_path / "t", slot)
        host.owner.version = 2
        await host.updates.look(await host.owner.status())
        assert (slot.on_file, slot.paused) == (2, False)
        assert slot.orders == ["WorkerStatus", "Proceed"]
        await host.updates.look(await host.owner.status())
        assert slot.orders == ["WorkerStatus", "Proceed"]

    asyncio.run(main())


def test_an_end_waits_for_the_part_of_every_rank(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        host.owner.states, host.slot.ranks = ("sealed", "torn"), ("d1",)
        await host.begin("a")
        with pytest.raises(WeightsTorn, match="are torn"):
            await host.end("a")
        host.owner.states, host.owner.writer = ("updating", "updating"), "trainer"
        with pytest.raises(Refused, match="trainer is still writing"):
            await host.end("a")
        assert host.slot.paused
        host.owner.states, host.owner.writer, host.owner.version = ("sealed", "sealed"), "", 2
        await host.updates.look(await host.owner.status())
        assert (host.slot.version, host.slot.paused) == (2, False)

    run(tmp_path / "l", body)


def test_a_worker_whose_rank_maps_other_bytes_is_replaced_and_takes_no_step(tmp_path: Path) -> None:
    async def body(host: Host) -> None:
        host.owner.states, host.slot.ranks = ("sealed", "sealed"), ("other",)
        await host.begin("a")
        host.owner.version = 2
        await host.end("a")
        assert host.slot.orders[-2:] == ["FollowWeights", "WorkerStatus"]
        (why,) = host.slot.left
        assert "(rank 1) maps version 2 (other), the owner holds 2 (d1)" in why
        host.slot.left.clear()

    run(tmp_path / "l", body)


def test_a_main_whose_owner_dies_under_it_is_not_replaced_for_that(tmp_path: Path) -> None:
    """It stays paused at the last version, and follows when an owner answers again."""

    async def main() -> None:
        slot = LosesItsOwner()
        host = Host(tmp_path / "t", slot)
        await host.begin("a")
        host.owner.version = 2
        await host.end("a")
        assert (slot.version, slot.paused, slot.left) == (1, True, [])
        await host.updates.look(await host.owner.status())
        assert (slot.version, slot.paused, slot.left) == (2, False, [])

    asyncio.run(main())
