"""belayerd's control link: an answer meant for a belayerd that was killed is never taken for ours."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from belayer import procs, wire
from belayer.errors import WorkerGone
from belayer.messages.common import Done
from belayer.messages.worker import FlushCache, TakeArena
from belayer.paths import Paths
from belayerd.links import WorkerLink
from belayerd.pair import Cause, Ref
from belayerd.watch import Watched


def test_a_worker_that_ends_answers_its_callers_at_once() -> None:
    """Not at their deadline: an update's two minutes would hold the handover of that very worker."""
    script = (
        "import sys, zmq\ns = zmq.Context().socket(zmq.ROUTER)\ns.bind('ipc://' + sys.argv[1])\n"
        "s.recv_multipart()\nprint('asked', flush=True)\nsys.stdin.read()\n"
    )
    told: list[tuple[str, Cause]] = []

    async def main(paths: Paths) -> None:
        context = zmq.asyncio.Context()
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(paths.worker_sock("slot0-00000000")),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert child.stdout is not None
        ref = Ref(worker_id="slot0-00000000", pid=child.pid, start_time=procs.start_time(child.pid))
        pidfd = procs.open_pidfd(ref.pid, ref.start_time)
        watched = Watched(ref, pidfd, paths, context, lambda worker, cause, _: told.append((worker, cause)))
        asked = asyncio.create_task(watched.link.call(FlushCache(), Done, 3600.0))
        assert await child.stdout.readline() == b"asked\n"
        child.kill()
        with pytest.raises(WorkerGone, match="slot0-00000000 has ended"):
            await asked
        with pytest.raises(WorkerGone):
            await watched.link.call(FlushCache(), Done, 3600.0)
        await child.wait()
        watched.close()
        context.destroy(linger=0)

    with tempfile.TemporaryDirectory(prefix="bl-") as folder:  # short: sockets lie below it
        asyncio.run(main(Paths(folder).make()))
    assert told == [("slot0-00000000", Cause.DEATH)]


def test_a_link_that_is_closed_leaves_no_caller_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        link = WorkerLink(context, tmp_path / "w")
        asked = asyncio.create_task(link.call(FlushCache(), Done, 3600.0))
        await asyncio.sleep(0)  # it has begun
        link.close()
        with pytest.raises(WorkerGone):
            await asked
        context.destroy(linger=0)

    asyncio.run(main())


def test_a_late_answer_to_a_former_life_is_passed_over(tmp_path: Path) -> None:
    async def main() -> Done:
        context = zmq.asyncio.Context()
        worker = context.socket(zmq.ROUTER)
        worker.set(zmq.LINGER, 0)
        worker.set(zmq.ROUTER_HANDOVER, 1)
        worker.bind(f"ipc://{tmp_path}/w")
        killed = WorkerLink(context, tmp_path / "w")
        asked = asyncio.create_task(killed.call(TakeArena(epoch=1), Done, 5.0))
        peer, _, old_call, _ = await worker.recv_multipart()
        asked.cancel()
        killed.close()
        link = WorkerLink(context, tmp_path / "w")
        answer = asyncio.create_task(link.call(FlushCache(), Done, 5.0))
        peer, _, call, _ = await worker.recv_multipart()
        await worker.send_multipart([peer, b"ctl", old_call, wire.encode(Done(detail="lease of the former life"))])
        await worker.send_multipart([peer, b"ctl", call, wire.encode(Done(detail="flushed"))])
        seen = await answer
        link.close()
        worker.close()
        context.destroy(linger=0)
        return seen

    assert asyncio.run(main()).detail == "flushed"
