"""Slots whose weights are not whole yet: they wait, somebody is told once, and nobody else waits with them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from belayer.config import load
from belayer.errors import DaemonUnreachable
from belayer.messages.owner import OwnerStatusReply, WeightsInfo
from belayer.paths import Paths
from belayerd.sealed import Sealed, unsealed
from belayerd.service import Supervisor
from tests.support.wait import eventually


@pytest.fixture
def paths() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:  # short: sockets lie below it
        yield Paths(Path(folder)).make()


def part(state: str, rank: int = 0, model: str = "m", reason: str = "") -> WeightsInfo:
    return WeightsInfo(model=model, state=state, version=1, nbytes=1, digest="d", rank=rank, reason=reason)


def owner(*rows: WeightsInfo) -> OwnerStatusReply:
    return OwnerStatusReply(kind="weights", pid=7, owner_generation=1, backend="memfd", weights=rows)


class Log:
    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (None, "gpuowner@weights does not answer"),
        (owner(), "gpuowner@weights (pid 7) does not hold m yet"),
        (owner(part("sealed", model="other")), "gpuowner@weights (pid 7) does not hold m yet"),
        (owner(part("building")), "m is building"),
        (owner(part("torn", reason="its writer died")), "m is torn: its writer died"),
        (owner(part("sealed"), part("building", 1)), "the part of rank 1 of m is building"),
        (owner(part("sealed"), part("building", model="other")), ""),
        (owner(part("sealed"), part("sealed", 1)), ""),
    ],
)
def test_why_no_worker_can_be_made(status: OwnerStatusReply | None, why: str) -> None:
    assert unsealed("m", status) == why


class Script:
    """An owner's answers, one after the other; the last one for ever. None: it does not answer."""

    def __init__(self, answers: Sequence[OwnerStatusReply | None]) -> None:
        self._answers, self.asked = list(answers), 0

    async def status(self) -> OwnerStatusReply:
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is None:
            raise DaemonUnreachable("no owner")
        return answer


def test_two_slots_of_a_model_wait_and_one_word_is_said() -> None:
    told: list[tuple[str, str]] = []
    script = Script([None, None, owner(), owner(part("building")), owner(part("building")), owner(part("sealed"))])

    async def main() -> None:
        sealed = Sealed(script.status, 0.0, lambda model, why: told.append((model, why)), Log())
        waiting = [asyncio.create_task(sealed.wait("m")) for _ in range(2)]
        await asyncio.wait(waiting, timeout=0.05)
        assert sealed.waits == {"m": "waits for its weights: gpuowner@weights does not answer"}
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert sealed.waits == {}
        asked = script.asked
        await sealed.wait("m")
        assert script.asked == asked, "once whole, an absence is the gate's affair"

    asyncio.run(main())
    assert told == [("m", "no worker can be made for 0 s now: gpuowner@weights does not answer")]


def test_a_model_that_takes_longer_than_a_deadline_ends_no_belayerd(paths: Paths) -> None:
    """It did, for the slots of every model, and its next life after it: a model of hundreds of gigabytes was enough."""
    (paths.state / "model").mkdir()
    (paths.state / "model/config.json").write_text("{}")
    alerts = paths.state / "alerts"
    paths.config.write_text(
        f'[policy]\nowner_deadline_s = 0.001\nalert_command = ["sh", "-c", "cat >> {alerts}; echo >> {alerts}"]\n'
        f'[[model]]\nname = "m"\npath = "{paths.state}/model"\n'
        '[[slot]]\nname = "slot0"\nmodel = "m"\n[[slot]]\nname = "slot1"\nmodel = "m"\n'
    )

    def heard() -> bool:
        return alerts.exists() and alerts.read_text().count('"waiting"') >= 2

    async def main() -> None:
        supervisor = Supervisor(paths, load(paths.config), paths.config)
        supervisor._zygote.ready.set()
        async with asyncio.TaskGroup() as group:
            slots = supervisor._start_slots(group)
            await asyncio.to_thread(eventually, heard, what="an alert for each slot")
            assert not any(slot.done() for slot in slots)
            rows = [supervisor._view(slot) for slot in supervisor._slots.values()]
            assert {row.reason for row in rows} == {"waits for its weights: gpuowner@weights does not answer"}
            for slot in slots:
                slot.cancel()
        supervisor._router.close()
        supervisor._context.destroy(linger=0)
        supervisor._cgroups.remove_all()

    asyncio.run(main())
    assert alerts.read_text().count('"waiting"') == 2
