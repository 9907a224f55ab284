"""What trainers are owed: the ledger by itself, and its shell stopped and started again after each step."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from belayer import procs
from belayer.errors import BelayerError, Fenced, Refused, ReplacementOwed
from belayer.messages import trainer as m
from belayer.messages.common import Done
from belayer.paths import Paths
from belayer.rpc import Server
from belayer.trainer import Trainer
from belayerd import replacements as r
from belayerd.pair import Pair, Ref
from belayerd.trainers import COMMAND, Trainers


def serving(generation: int, slot: str = "slot0") -> m.Member:
    return m.Member(slot=slot, generation=generation, worker_id=f"{slot}-{generation}", pid=7, weight_version=3)


def owed(ledger: r.Ledger, name: str = "t") -> list[tuple[str, int, int]]:
    return [(e.slot, e.old_generation, e.new_generation) for e in ledger.trainers[name].owed]


def made(*names: str) -> r.Ledger:
    ledger = r.Ledger(boot_id="b")
    for name in names:
        ledger = r.register(ledger, name, "model", [serving(1)])
    return ledger


def see(ledger: r.Ledger, *generations: int, model: str = "model") -> r.Ledger:
    for generation in generations:
        ledger = r.observed(ledger, serving(generation), model, "death", 1.0)
    return ledger


def test_each_trainer_is_owed_a_replacement_once_and_in_order() -> None:
    ledger = see(made("t", "u"), 1, 2, 2, 3)
    assert owed(ledger) == owed(ledger, "u") == [("slot0", 1, 2), ("slot0", 2, 3)]
    assert see(ledger, 1, 2, 3) is ledger, "nothing new is nothing to save"
    assert owed(see(made("t"), 2, model="other")) == []
    assert owed(r.observed(made("t"), m.Member(slot="slot0", generation=2), "model", "", 0.0)) == [], "nobody serves"


def test_acknowledged_by_generation_and_a_stale_one_is_fenced() -> None:
    ledger = see(made("t"), 2, 3)
    first = r.acknowledged(ledger, "t", 1, "slot0", 2)
    assert owed(first) == [("slot0", 2, 3)]
    with pytest.raises(ReplacementOwed, match="t \\(generation 3 of slot0\\)") as why:
        r.refuse_owed(first, "model")
    assert "--forget" in why.value.remedy
    r.refuse_owed(first, "other")
    both = r.acknowledged(ledger, "t", 1, "slot0", 3)
    assert owed(both) == []
    r.refuse_owed(both, "model")
    assert r.acknowledged(both, "t", 1, "slot0", 3) is both, "its answer was lost, it asks again"
    with pytest.raises(Fenced):
        r.acknowledged(both, "t", 1, "slot0", 2)
    with pytest.raises(Refused, match="never told"):
        r.acknowledged(both, "t", 1, "slot0", 4)


def test_an_earlier_life_of_a_trainer_is_fenced_and_owed_nothing() -> None:
    again = r.register(see(made("t"), 2), "t", "model", [serving(2)])
    assert owed(again) == []
    assert again.named("t", 2)
    for epoch, error in ((1, Fenced), (3, Refused)):
        with pytest.raises(error):
            again.named("t", epoch)
    gone = r.left(again, ["t"])
    with pytest.raises(Fenced):
        gone.named("t", 2)
    assert r.register(gone, "t", "model", []).trainers["t"].epoch == 3, "an epoch is never used twice"


@given(st.lists(st.one_of(st.integers(2, 9).map(lambda g: ("see", g)), st.integers(1, 9).map(lambda g: ("ack", g)))))
def test_no_order_of_events_tells_an_acknowledged_one_again_or_loses_one(steps: list[tuple[str, int]]) -> None:
    ledger, newest, acked = made("t"), 1, 0
    for what, generation in steps:
        if what == "see":
            ledger, newest = see(ledger, generation), max(newest, generation)
        else:
            try:
                ledger = r.acknowledged(ledger, "t", 1, "slot0", generation)
                acked = max(acked, generation)
            except BelayerError:
                pass
        told = [new for _, _, new in owed(ledger)]
        assert told == sorted(set(told))
        assert all(new > acked for new in told)
        assert (told[-1] if told else max(acked, 1)) == newest, "the newest is owed until it is acknowledged"


def test_one_that_takes_nothing_is_owed_the_newest_and_an_old_word_of_it_still_counts() -> None:
    """Its ledger grew with every replacement, for ever."""
    ledger = see(made("t", "u"), *range(2, r.MOST + 12))  # one more than is kept: MOST + 10 in all
    ledger = r.acknowledged(ledger, "u", 1, "slot0", r.MOST + 11)
    told = [new for _, _, new in owed(ledger)]
    assert told == list(range(12, r.MOST + 12))
    trainer = ledger.trainers["t"]
    assert (r.left_out(trainer), trainer.left_out["slot0"].newest) == (10, 11)
    said = "t has not taken 32 replacement(s), 10 older one(s) are told no more: updates of model wait"
    assert r.said(trainer, 0) == said
    assert r.said(trainer, 7).startswith("t failed 7 time(s) in a row and has not taken")
    assert r.said(ledger.trainers["u"], 7) == "", "it took them"
    late = r.acknowledged(ledger, "t", 1, "slot0", 5)
    assert owed(late) == owed(ledger), "it was told of 5 in time; the newer ones stand"
    with pytest.raises(Fenced):
        r.acknowledged(late, "t", 1, "slot0", 4)
    taken = r.acknowledged(late, "t", 1, "slot0", 12)
    assert [new for _, _, new in owed(taken)] == told[1:]
    assert r.left_out(taken.trainers["t"]) == 0, "settled by a newer one"
    with pytest.raises(ReplacementOwed):
        r.refuse_owed(taken, "model")


def test_the_bound_is_of_each_slot() -> None:
    ledger = see(made("t"), *range(2, r.MOST + 10))
    ledger = r.observed(ledger, serving(2, "slot1"), "model", "death", 1.0)
    assert ("slot1", 0, 2) in owed(ledger)
    assert sum(name == "slot0" for name, _, _ in owed(ledger)) == r.MOST


class Slot:
    """What Trainers asks of a slot."""

    name = model = "slot0"

    def __init__(self) -> None:
        self.generation = 1

    @property
    def pair(self) -> Pair:
        ref = Ref(worker_id=f"w{self.generation}", pid=1, start_time=1)
        return Pair(slot="slot0", generation=self.generation, main=ref)


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def error(self, event: str, **fields: object) -> None:
        self.said.append(event)

    info = error


def run(path: Path, body: Callable[[Trainers, Slot], object], command: tuple[str, ...] = ()) -> None:
    """One life of belayerd's part, which ends without a word (SIGKILL)."""

    async def main() -> None:
        slot = Slot()
        done = body(Trainers(path, [slot], command, Log(), again_s=0.01), slot)
        if asyncio.iscoroutine(done):
            await done

    asyncio.run(main())


async def ask(trainers: Trainers, message: msgspec.Struct) -> msgspec.Struct:
    return await trainers.handle(message)


def test_what_is_owed_is_on_disk_before_it_is_told_and_an_ack_before_it_is_answered(tmp_path: Path) -> None:
    """A life that ends after each step: the next one tells what was not acknowledged, and nothing else."""
    path = tmp_path / "trainers.msgpack"
    wait = m.AwaitReplaced(trainer="t", epoch=1)

    async def registers(trainers: Trainers, slot: Slot) -> None:
        await ask(trainers, m.RegisterTrainer(trainer="t", model="slot0"))

    async def dies_before_it_could_write(trainers: Trainers, slot: Slot) -> None:
        slot.generation = 2  # the pair is saved with it, the ledger is not

    async def finds_it(trainers: Trainers, slot: Slot) -> None:
        slot.generation = 2
        trainers.observe(slot, lambda: "death")

    async def tells(trainers: Trainers, slot: Slot) -> None:
        slot.generation = 2
        trainers.observe(slot, lambda: "hang")
        reply = await ask(trainers, wait)
        assert isinstance(reply, m.ReplacedEvents)
        assert [(e.new_generation, e.worker_id, e.cause) for e in reply.events] == [(2, "w2", "death")]
        with pytest.raises(ReplacementOwed):
            trainers.refuse_owed("slot0")

    async def takes_the_ack(trainers: Trainers, slot: Slot) -> None:
        assert isinstance(await ask(trainers, m.AckReplaced(trainer="t", epoch=1, slot="slot0", generation=2)), Done)

    async def is_silent(trainers: Trainers, slot: Slot) -> None:
        slot.generation = 2
        trainers.observe(slot, lambda: "death")
        trainers.refuse_owed("slot0")
        assert await ask(trainers, wait) == m.ReplacedEvents(events=(), members=(_member(2),))

    for body in (registers, dies_before_it_could_write, finds_it, tells, tells, takes_the_ack, is_silent, is_silent):
        run(path, body)


def _member(generation: int) -> m.Member:
    return m.Member(slot="slot0", generation=generation, worker_id=f"w{generation}", pid=1, start_time=1)


def test_a_wait_hears_of_a_replacement_at_once_and_other_names_are_refused(tmp_path: Path) -> None:
    async def body(trainers: Trainers, slot: Slot) -> None:
        await ask(trainers, m.RegisterTrainer(trainer="t", model="slot0"))
        waiting = asyncio.create_task(ask(trainers, m.AwaitReplaced(trainer="t", epoch=1, within_s=60.0)))
        await asyncio.sleep(0)
        slot.generation = 2
        trainers.observe(slot, lambda: "death")
        reply = await waiting
        assert isinstance(reply, m.ReplacedEvents)
        assert len(reply.events) == 1
        gone = await asyncio.create_subprocess_exec("true")
        await gone.wait()
        with pytest.raises(Refused, match="watched=False"):
            await ask(trainers, m.RegisterTrainer(trainer="u", model="slot0", pid=gone.pid, start_time=7))
        for name, model in ((COMMAND, "slot0"), ("", "slot0"), ("a/b", "slot0"), ("t", "nothing")):
            with pytest.raises(Refused):
                await ask(trainers, m.RegisterTrainer(trainer=name, model=model))

    run(tmp_path / "l", body)


def test_a_trainer_whose_process_has_ended_holds_no_update(tmp_path: Path) -> None:
    async def body(trainers: Trainers, slot: Slot) -> None:
        child = await asyncio.create_subprocess_exec("sleep", "600")
        born = procs.start_time(child.pid)
        await ask(trainers, m.RegisterTrainer(trainer="t", model="slot0", pid=child.pid, start_time=born))
        slot.generation = 2
        trainers.observe(slot, lambda: "death")
        with pytest.raises(ReplacementOwed):
            trainers.refuse_owed("slot0")
        child.kill()
        await child.wait()
        trainers.refuse_owed("slot0")

    run(tmp_path / "l", body)


def test_a_second_trainer_of_a_name_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    async def body(trainers: Trainers, slot: Slot) -> None:
        child = await asyncio.create_subprocess_exec("sleep", "600")
        first = m.RegisterTrainer(trainer="t", model="slot0", pid=child.pid, start_time=procs.start_time(child.pid))
        await ask(trainers, first)
        mine = msgspec.structs.replace(first, pid=os.getpid(), start_time=procs.start_time(os.getpid()))
        for again in (first, mine):
            with pytest.raises(Refused, match=f"'t' is process {child.pid} already .life 1., which runs") as why:
                await ask(trainers, again)
            assert "take_over=True" in why.value.remedy
        await ask(trainers, m.AckReplaced(trainer="t", epoch=1, slot="slot0", generation=0))  # the first one lives on
        await ask(trainers, msgspec.structs.replace(mine, take_over=True))
        with pytest.raises(Fenced, match="life 1 of trainer 't' has ended"):
            await ask(trainers, m.AwaitReplaced(trainer="t", epoch=1))
        child.kill()
        await child.wait()

    run(tmp_path / "l", body)


def test_one_whose_process_has_ended_is_taken_over_and_shown_no_more(tmp_path: Path) -> None:
    async def body(trainers: Trainers, slot: Slot) -> None:
        child = await asyncio.create_subprocess_exec("sleep", "600")
        message = m.RegisterTrainer(trainer="t", model="slot0", pid=child.pid, start_time=procs.start_time(child.pid))
        await ask(trainers, message)
        child.kill()
        await child.wait()
        assert await ask(trainers, m.ListTrainers()) == m.TrainerList(trainers=())
        mine = msgspec.structs.replace(message, pid=os.getpid(), start_time=procs.start_time(os.getpid()))
        assert isinstance(await ask(trainers, mine), m.TrainerRegistered)

    run(tmp_path / "l", body)


def test_what_is_no_event_is_not_acknowledged() -> None:
    """Through the client's own socket, with belayerd's part behind it."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        paths = Paths(Path(folder)).make()

        async def body(trainers: Trainers, slot: Slot) -> None:
            server = asyncio.create_task(Server(paths.belayerd_sock, m.TrainerRequest, trainers.handle).serve())
            trainer = await asyncio.to_thread(lambda: Trainer("slot0", name="t", paths=paths))
            with pytest.raises(Refused, match=r"ack takes an event that replaced\(\) gave, not None"):
                trainer.ack(None)  # type: ignore[arg-type]
            with pytest.raises(Refused, match="which runs"):
                await asyncio.to_thread(lambda: Trainer("slot0", name="t", paths=paths))
            await asyncio.to_thread(trainer.close)
            server.cancel()

        run(paths.trainers, body)


def test_an_operators_word_settles_what_a_trainer_without_a_process_is_owed(tmp_path: Path) -> None:
    async def body(trainers: Trainers, slot: Slot) -> None:
        await ask(trainers, m.RegisterTrainer(trainer="t", model="slot0"))
        slot.generation = 2
        trainers.observe(slot, lambda: "death")
        with pytest.raises(ReplacementOwed):
            trainers.refuse_owed("slot0")
        with pytest.raises(Refused):
            await ask(trainers, m.UnregisterTrainer(trainer="t", epoch=2))
        await ask(trainers, m.UnregisterTrainer(trainer="t"))
        trainers.refuse_owed("slot0")
        with pytest.raises(Fenced):
            await ask(trainers, m.AckReplaced(trainer="t", epoch=1, slot="slot0", generation=2))
        with pytest.raises(Refused, match="no trainer 't'"):
            await ask(trainers, m.UnregisterTrainer(trainer="t"))

    run(tmp_path / "l", body)


def test_the_command_is_run_until_it_ends_with_0_and_then_never_again(tmp_path: Path) -> None:
    """It fails the first time; each replacement then reaches it once, also over belayerd's death."""
    into, path = tmp_path / "told", tmp_path / "l"
    script = 'cat >>"$0"; echo >>"$0"; test $(wc -l <"$0") -gt 1'
    command = ("sh", "-c", script, str(into))

    async def life(trainers: Trainers, slot: Slot) -> None:
        slot.generation = 2
        trainers.observe(slot, lambda: "death")
        task = asyncio.create_task(trainers.run_command())
        async with asyncio.timeout(60):
            while True:
                listed = await ask(trainers, m.ListTrainers())
                assert isinstance(listed, m.TrainerList)
                (row,) = listed.trainers
                assert row.trainer == COMMAND
                if not row.owed:
                    break
                await asyncio.sleep(0.01)
        task.cancel()

    def first(trainers: Trainers, slot: Slot) -> None:
        """Dies before anything happens."""

    run(path, first, command)
    run(path, life, command)
    run(path, life, command)
    told = [json.loads(line) for line in into.read_text().splitlines()]
    assert [row["new_generation"] for row in told] == [2, 2], "once in vain, once for good"
    run(path, lambda trainers, slot: trainers.refuse_owed("slot0"))


def test_a_command_that_always_fails_keeps_the_newest_and_the_status_says_so(tmp_path: Path) -> None:
    """Over two lives; once it works it is run for each that was kept, in order, and never again."""
    path, works, told = tmp_path / "l", tmp_path / "works", tmp_path / "told"
    command = ("sh", "-c", 'cat >>"$0"; echo >>"$0"; test -e "$1"', str(told), str(works))

    async def fails(trainers: Trainers, slot: Slot) -> None:
        task = asyncio.create_task(trainers.run_command())
        for generation in range(slot.generation + 1, r.MOST + 4):
            slot.generation = generation
            trainers.observe(slot, lambda: "death")
        async with asyncio.timeout(60):
            while not any("failed" in note for note in trainers.notes()):
                await asyncio.sleep(0.01)
        (note,) = trainers.notes()
        assert note.startswith(f"{COMMAND} failed ")
        assert note.endswith(
            f"has not taken {r.MOST} replacement(s), 2 older one(s) are told no more: updates of slot0 wait"
        )
        task.cancel()
        await asyncio.wait({task})

    async def mended(trainers: Trainers, slot: Slot) -> None:
        slot.generation = r.MOST + 3
        told.unlink()
        works.touch()
        task = asyncio.create_task(trainers.run_command())
        async with asyncio.timeout(60):
            while (await ask(trainers, m.ListTrainers())).trainers[0].owed:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
        assert trainers.notes() == ()
        task.cancel()

    run(path, lambda trainers, slot: None, command)
    run(path, fails, command)
    run(path, mended, command)
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    assert [row["new_generation"] for row in rows] == list(range(4, r.MOST + 4))
