"""An owner that was killed verifies all that it holds before it answers: minutes for a large model. It says how far it
is, and a handover waits for it; that is no fault of the device, and nobody is quarantined for it (R4, R5, R7)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq.asyncio

from belayer import procs, progress, refusals, statefile
from belayer.config import Policy, Slot, load
from belayer.errors import DaemonUnreachable, OwnerComing
from belayer.messages.owner import Role
from belayer.messages.worker import Oracle
from belayer.rpc import Client
from belayerd import pair as p
from belayerd.actions import Actions
from belayerd.gate import open_gate
from belayerd.handover import HANDOVER, Action
from belayerd.links import OwnerLink
from belayerd.records import Records
from belayerd.sealed import Sealed
from belayerd.service import Supervisor
from belayerd.slot import SlotShell
from gpuowner.attach import WeightsView
from gpuowner.digest import CHUNK
from gpuowner.update import begin_update
from tests.support.owners import Owners, tiny_model
from tests.support.wait import eventually
from tests.unit.test_slot_shell import Log, on_file

NBYTES = CHUNK + (1 << 20)  # two chunks: it can stand still between them


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Owners]:
    made = Owners({"m": tiny_model(tmp_path / "m", 1, NBYTES)})
    yield made
    made.stop()


def hold(host: Owners) -> Path:
    flag = host.paths.run / "hold"
    flag.touch()
    return flag


def reborn_slowly(host: Owners) -> subprocess.Popen[bytes]:
    """Killed, and in its next life verified to the first of two chunks."""
    host.kill("weights")
    owner = host.owners["weights"] = host.daemon("tests.support.slow_owner", "--kind", "weights")

    def halfway() -> bool:
        assert owner.poll() is None
        seen = progress.read(host.paths.owner_progress("weights"))
        return seen is not None and (seen.pid, seen.done, seen.of) == (owner.pid, CHUNK, NBYTES)

    eventually(halfway, what="the first chunk is verified")
    return owner


def status(host: Owners, stands_s: float) -> object:
    return asyncio.run(OwnerLink(host.paths, "weights", 0.05, stands_s).status())


def test_it_says_how_far_it_is_until_it_answers(host: Owners) -> None:
    first = host.up("weights")
    said = host.paths.owner_progress("weights")
    assert not said.exists(), "it answers"
    flag = hold(host)
    owner = reborn_slowly(host)
    with pytest.raises(OwnerComing, match=rf"coming back: pid {owner.pid} verifies m, 0.1 of 0.1 GB"):
        status(host, 3600.0)
    assert "does not answer yet: pid" in refusals.why_silent(host.paths.run, "owner-weights")
    link = OwnerLink(host.paths, "weights", 0.05, 0.0)
    with pytest.raises(DaemonUnreachable, match="does not get on: pid") as still:
        asyncio.run(link.status())
    assert not isinstance(still.value, OwnerComing)
    assert f"kill pid {owner.pid}" in still.value.remedy
    flag.unlink()
    eventually(lambda: not said.exists(), what="it answers")
    again = host.status("weights")
    assert (again.pid, again.owner_generation) == (owner.pid, first.owner_generation + 1)
    assert [(row.state, row.version) for row in again.weights] == [("sealed", 1)]


def test_one_that_is_killed_on_its_way_is_not_waited_for(host: Owners) -> None:
    host.up("weights")
    hold(host)
    owner = reborn_slowly(host)
    owner.kill()
    assert owner.wait(60) == -signal.SIGKILL
    with pytest.raises(DaemonUnreachable) as gone:
        status(host, 3600.0)
    assert not isinstance(gone.value, OwnerComing)


def test_slots_without_workers_say_why_and_alert_nobody_while_it_gets_on(host: Owners) -> None:
    host.up("weights")
    flag = hold(host)
    reborn_slowly(host)
    told: list[str] = []
    link = OwnerLink(host.paths, "weights", 0.05, 3600.0)

    async def main() -> None:
        sealed = Sealed(lambda: link.status(wait=False), 0.0, lambda model, why: told.append(why), Log())
        waiting = asyncio.create_task(sealed.wait("m"))
        await asyncio.to_thread(eventually, lambda: "verifies m" in sealed.waits.get("m", ""), what="why it waits")
        flag.unlink()
        await asyncio.wait_for(waiting, 60)

    asyncio.run(main())
    assert [why for why in told if "coming back" in why] == []


def test_a_reader_that_follows_hears_how_far_it_is(host: Owners) -> None:
    """A worker beats with each chunk, and is waited for while it does."""
    host.up("weights")
    view, heard = WeightsView(host.client("weights"), "m"), list[tuple[int, int]]()
    with begin_update(host.client("weights", Role.LOADER), "m", whole=True) as update:
        update.write({"w": np.zeros(NBYTES // 4, dtype=np.float32)})
        update.commit()
    assert view.follow(1, lambda done, of: heard.append((done, of)))
    assert (view.grant.version, heard) == (2, [(CHUNK, NBYTES), (NBYTES, NBYTES)])


def test_a_start_waits_for_an_owner_that_gets_on(host: Owners) -> None:
    """A worker that finds nobody ends, and three of them end the slot."""
    host.up("weights")
    flag = hold(host)
    reborn_slowly(host)

    async def main() -> None:
        supervisor = Supervisor(host.paths, load(host.paths.config), host.paths.config)
        supervisor._zygote.ready.set()
        supervisor._sealed.seen.add("m")
        start = asyncio.create_task(supervisor._startable("m"))
        await asyncio.wait({start}, timeout=2.5)  # longer than it waits for one that nobody has started
        assert not start.done()
        (slot,) = supervisor._slots.values()
        assert "coming back: pid" in supervisor._view(slot).reason
        flag.unlink()
        await asyncio.wait_for(start, 60)
        supervisor._router.close()
        supervisor._context.destroy(linger=0)
        supervisor._cgroups.remove_all()

    asyncio.run(main())


def in_a_handover(host: Owners, body: Callable[[SlotShell], Awaitable[None]], policy: Policy) -> p.Pair:
    """A belayerd that finds its slot at the gate "owners", the candidate alive."""
    candidate = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    shadow = p.Ref(worker_id="slot0-000000bb", pid=candidate.pid, start_time=procs.start_time(candidate.pid))
    running = p.Running(
        incident_id="inc-1", cause=p.Cause.DEATH, detail="killed", plan=HANDOVER, done=HANDOVER.index(Action.OWNERS),
        old=None, detected_at=0.0, serial=1,
    )  # fmt: skip
    oracle = Oracle(weight_version=1, token=7, logprob=-0.5)
    pair = p.Pair(
        slot="slot0", state=p.State.HANDOVER, generation=1, shadow=shadow, running=running, boot_id=procs.boot_id(),
        oracle=oracle,
    )  # fmt: skip
    statefile.save(host.paths.slot_state("slot0"), pair)

    async def at_once(*_: object) -> None:
        pass

    async def main() -> None:
        context, cgroups = zmq.asyncio.Context(), procs.Cgroups(f"test-{os.getpid()}")
        router, records = Client(host.paths.router_sock, context), Records(host.paths.incidents, Log())
        actions = Actions(host.paths, router, cgroups, open_gate([]), policy)
        # Nobody beats for the candidate, and nobody is to find that out meanwhile.
        slot = Slot(name="slot0", model="m", start_deadline_s=3600.0)
        shell = SlotShell(
            slot, policy, host.paths, actions, cgroups, context, records, Log(),
            lambda *_: None, lambda *_: None, at_once,
        )  # fmt: skip
        life = asyncio.create_task(shell.run())
        try:
            await body(shell)
        finally:
            life.cancel()
            await asyncio.wait({life})
            shell.close()
            router.close()
            records.close()
            context.destroy(linger=0)
            cgroups.remove_all()

    try:
        asyncio.run(main())
    finally:
        candidate.kill()
        candidate.wait(60)
    return on_file(host.paths)


def test_a_handover_waits_for_an_owner_that_gets_on_and_quarantines_nothing(host: Owners) -> None:
    """Many times the bound of a step, which quarantined the slot as if its device were broken."""
    for kind in ("weights", "kv"):
        host.up(kind)
    flag = hold(host)
    reborn_slowly(host)

    async def body(shell: SlotShell) -> None:
        def waited() -> bool:
            assert shell.pair.state is p.State.HANDOVER, shell.pair.reason
            assert shell.pair.running is not None
            return shell.pair.running.serial >= 4

        await asyncio.to_thread(eventually, waited, what="the gate is tried again and again")
        await asyncio.to_thread(eventually, lambda: "verifies m" in shell.view().reason, what="why", every=0.001)
        flag.unlink()
        # The candidate of this test is no worker: once the owner answers, the gate asks it, and it says nothing.
        await asyncio.to_thread(
            eventually, lambda: "did not answer WorkerStatus" in shell.pair.reason, what="the owner answers the gate"
        )

    in_a_handover(host, body, Policy(step_deadline_s=1.0, fence_deadline_s=60.0))


def test_a_handover_gives_up_on_an_owner_that_stands_still(host: Owners) -> None:
    for kind in ("weights", "kv"):
        host.up(kind)
    hold(host)
    owner = reborn_slowly(host)

    async def body(shell: SlotShell) -> None:
        await asyncio.to_thread(eventually, lambda: shell.pair.state is p.State.QUARANTINED, what="it gives up")

    after = in_a_handover(host, body, Policy(step_deadline_s=0.2, fence_deadline_s=60.0, owner_deadline_s=0.5))
    assert f"gpuowner@weights does not get on: pid {owner.pid} verifies m" in after.reason
