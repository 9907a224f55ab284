"""A main that is whole, and that the router does not talk to any more, is handed over: its slot would stay dark."""

from __future__ import annotations

import asyncio
import tempfile

import pytest

from belayer.config import load
from belayer.messages.router import RouterSlot, RouterStatusReply
from belayer.paths import Paths
from belayerd import pair as p
from belayerd.peers import links_given_up
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.service import _row
from belayerd.service import Supervisor
from tests.unit.test_router_core import serve

MAIN = p.Ref(worker_id="s-aa", pid=7, start_time=1)
RUNNING = p.Running(
    incident_id="i", cause=p.Cause.DEATH, detail="", plan=(), done=0, old=None, detected_at=0.0
)  # fmt: skip


def pair(**changes: object) -> p.Pair:
    given: dict[str, object] = {"slot": "s", "state": p.State.PROTECTED, "generation": 3, "main": MAIN, "boot_id": "b"}
    return p.Pair(**(given | changes))  # type: ignore[arg-type]


def said(**changes: object) -> RouterStatusReply:
    given: dict[str, object] = {"slot": "s", "generation": 3, "registered": False, "worker_id": "s-aa"}
    row = RouterSlot(**(given | {"link_given_up": True} | changes))  # type: ignore[arg-type]
    return RouterStatusReply(instance="i", pid=1, url="u", slots=(row,), running=0, waiting=0)


def test_a_main_whose_link_was_given_up_is_named() -> None:
    assert links_given_up(said(), [pair()]) == [("s", "s-aa")]


@pytest.mark.parametrize(
    ("status", "row"),
    [
        (said(link_given_up=False), pair()),  # being connected to, or about to be registered
        (said(generation=2), pair()),  # of before the handover
        (said(worker_id="s-bb"), pair()),
        (said(), pair(main=None, state=p.State.FENCING)),
        (said(), pair(running=RUNNING, state=p.State.HANDOVER)),
        (said(slot="other"), pair()),
    ],
)
def test_what_is_on_its_way_already_is_left_alone(status: RouterStatusReply, row: p.Pair) -> None:
    assert links_given_up(status, [row]) == []


def test_the_router_says_which_link_it_gave_up_until_a_newer_generation_comes() -> None:
    core = Core(Limits(tears=1))
    serve(core, "a", 0)
    core.step(ev.Torn("a", "a-0"), 1.0)
    assert not _row(core.slots["a"], 0, "u").link_given_up, "made anew once"
    core.step(ev.Ready("a", 0, "a-0"), 1.5)
    core.step(ev.Torn("a", "a-0"), 2.0)
    assert _row(core.slots["a"], 0, "u").link_given_up
    serve(core, "a", 1)
    assert not _row(core.slots["a"], 0, "u").link_given_up


def test_belayerd_takes_it_for_a_main_that_hangs() -> None:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        paths = Paths(folder).make()
        (paths.state / "model").mkdir()
        (paths.state / "model/config.json").write_text("{}")
        text = f'[[model]]\nname = "m"\npath = "{paths.state}/model"\n[[slot]]\nname = "s"\nmodel = "m"\n'
        paths.config.write_text(text)

        async def main() -> list[p.Event]:
            supervisor = Supervisor(paths, load(paths.config), paths.config)
            slot = supervisor._slots["s"]
            slot.pair = pair()
            supervisor._seen(said(generation=2))
            assert slot._inbox.empty()
            supervisor._seen(said())
            event = slot._inbox.get_nowait()
            slot.close()
            supervisor._router.close()
            supervisor._context.destroy(linger=0)
            supervisor._cgroups.remove_all()
            return [event]

        (event,) = asyncio.run(main())
    assert isinstance(event, p.WorkerLost)
    assert (event.worker_id, event.cause) == ("s-aa", p.Cause.HANG)
