"""The shell of a slot over real files, real processes and peers that are not there."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import zmq.asyncio

from belayer import lastwords, procs, statefile, wire
from belayer.config import Policy, Slot, load
from belayer.errors import DaemonUnreachable
from belayer.messages.worker import Oracle, SpawnWorker
from belayer.paths import Paths
from belayer.rpc import Client
from belayerd import pair as p
from belayerd.actions import Actions
from belayerd.gate import open_gate
from belayerd.handover import HANDOVER, Action
from belayerd.peers import Zygote
from belayerd.records import Records
from belayerd.service import Supervisor
from belayerd.slot import SlotShell
from tests.support.wait import eventually

LIMITS = Policy(step_deadline_s=0.2, fence_deadline_s=60.0, restart_backoff_s=3600.0)


class Log:
    def bind(self, **fields: Any) -> Log:
        return self

    def info(self, event: str, **fields: Any) -> None:
        pass

    error = warning = info


def ended(name: str) -> p.Ref:
    """A worker that is seen dead."""
    child = subprocess.Popen(["sleep", "3600"])
    ref = p.Ref(worker_id=name, pid=child.pid, start_time=procs.start_time(child.pid))
    child.kill()
    child.wait(60)
    return ref


@pytest.fixture
def paths() -> Iterator[Paths]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:  # short: sockets lie below it
        yield Paths(folder).make()


def on_file(paths: Paths) -> p.Pair:
    saved: p.Pair = statefile.load(paths.slot_state("slot0"), p.Pair)
    return saved


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


async def at_once(*_: Any) -> None:
    pass


def adopted(paths: Paths, startable: Callable[[str], Awaitable[None]] = never) -> p.Pair:
    """What a new life of belayerd makes of the pair on file, once it was decided that a candidate is lost. Raises what
    ends that life. ``startable``: as of a SlotShell."""

    async def main() -> p.Pair:
        context, cgroups = zmq.asyncio.Context(), procs.Cgroups(f"test-{os.getpid()}")
        router, records = Client(paths.router_sock, context), Records(paths.incidents, Log())
        actions = Actions(paths, router, cgroups, open_gate([]), LIMITS)
        shell = SlotShell(
            Slot(name="slot0", model="m"), LIMITS, paths, actions, cgroups, context, records, Log(),
            lambda *_: None, lambda *_: None, startable,
        )  # fmt: skip
        life = asyncio.create_task(shell.run())
        await asyncio.to_thread(eventually, lambda: life.done() or on_file(paths).failed_starts, what="the loss")
        if life.done():
            await life
        life.cancel()
        await asyncio.wait({life})
        shell.close()
        router.close()
        records.close()
        context.destroy(linger=0)
        cgroups.remove_all()
        return on_file(paths)

    return asyncio.run(main())


@pytest.mark.parametrize("at", range(len(HANDOVER)))
def test_a_candidate_that_ended_while_belayerd_was_down_is_replaced(paths: Paths, at: int) -> None:
    """belayerd and the candidate of a handover die together (no memory left, say): the next belayerd finds an action
    under way with nobody to do it. It ended on that, and so did every life after it."""
    main, shadow = ended("slot0-000000aa"), ended("slot0-000000bb")
    running = p.Running(
        incident_id="inc-1", cause=p.Cause.DEATH, detail="killed", plan=HANDOVER, done=at, old=main, detected_at=0.0,
        serial=at + 1,
    )  # fmt: skip
    saved = p.Pair(
        slot="slot0", state=p.State.HANDOVER, generation=1, shadow=shadow, running=running, boot_id=procs.boot_id(),
        oracle=Oracle(weight_version=1, token=7, logprob=-0.5),
    )  # fmt: skip
    statefile.save(paths.slot_state("slot0"), saved)
    lastwords.leave(paths.last_words(shadow.worker_id), "HostUnfit: no memory")
    after = adopted(paths)
    assert after.state is p.State.ARMING
    assert (after.shadow, after.failed_starts) == (None, 1)
    assert "HostUnfit: no memory" in after.reason
    assert after.running is not None
    leased = at >= HANDOVER.index(Action.LEASE)
    assert after.running.old == (shadow if leased else main), "what may hold the lease is fenced"


def test_a_worker_of_a_zygote_that_died_after_the_fork_dies_too(paths: Paths) -> None:
    """Nobody was told its pid: it would load a model beside the one that is tried next, and wait for ever."""
    forked: list[subprocess.Popen[bytes]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(paths.zygote_sock))
        listener.listen()

        def zygote() -> None:
            sock, _ = listener.accept()
            message = wire.Decoder[SpawnWorker](SpawnWorker).decode(sock.recv(1 << 14))
            forked.append(subprocess.Popen(["sleep", "3600"]))
            with open(f"{message.cgroup}/cgroup.procs", "w") as file:
                file.write(str(forked[0].pid))
            listener.close()
            sock.close()

        thread = Thread(target=zygote)
        thread.start()
        statefile.save(paths.slot_state("slot0"), p.Pair(slot="slot0", boot_id=procs.boot_id()))
        after = adopted(paths, at_once)
        thread.join(60)
    assert "main did not start" in after.reason
    (child,) = forked
    try:
        assert child.wait(60) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_no_worker_is_started_on_bytes_that_an_update_writes_over(paths: Paths) -> None:
    """Each would fail at its digests, and after three the slot gives up and somebody is called."""
    (paths.state / "model").mkdir()
    (paths.state / "model/config.json").write_text("{}")
    paths.config.write_text(
        f'[[model]]\nname = "m"\npath = "{paths.state}/model"\n[[slot]]\nname = "slot0"\nmodel = "m"\n'
    )

    async def main() -> None:
        supervisor = Supervisor(paths, load(paths.config), paths.config)
        supervisor._zygote.ready.set()
        supervisor._sealed.seen.add("m")
        supervisor._actions.held.add("m")
        start = asyncio.create_task(supervisor._startable("m"))
        await asyncio.wait({start}, timeout=0.3)
        assert not start.done()
        supervisor._actions.held.discard("m")
        with pytest.raises(DaemonUnreachable, match=r"nothing listens at .*owner-weights"):  # it went on, and asks
            await asyncio.wait_for(start, 60)
        supervisor._router.close()
        supervisor._context.destroy(linger=0)
        supervisor._cgroups.remove_all()

    asyncio.run(main())


def test_a_zygote_that_cannot_be_forked_ends_nobody(paths: Paths) -> None:
    """Here its log has no room: a folder is where the file should be. With no memory left it is the same error."""
    paths.log("zygote").mkdir()
    told: list[str] = []

    async def main() -> None:
        zygote = Zygote(paths, paths.config, Log(), told.append)
        life = asyncio.create_task(zygote.run())
        await asyncio.to_thread(eventually, lambda: life.done() or zygote.hopeless, what="three tries")
        if life.done():
            await life
        life.cancel()
        await asyncio.wait({life})

    asyncio.run(main())
    assert len(told) == 1
    assert told[0].startswith("the zygote cannot be started: ")
