"""belayerd's control link: an answer meant for a belayerd that was killed is never taken for ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq
import zmq.asyncio

from belayer import wire
from belayer.messages.common import Done
from belayer.messages.worker import FlushCache, TakeArena
from belayerd.links import WorkerLink


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
