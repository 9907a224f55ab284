"""Who waits for a daemon that is on its way counts how long it stood still."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from belayer import procs, progress, wire
from belayer.errors import WorkerFailed
from belayer.heartbeat import Beat
from belayer.messages.common import Done
from belayer.messages.worker import FlushCache
from belayer.paths import Paths
from belayer.progress import Patience, Progress, Teller
from belayerd.links import WorkerLink
from belayerd.pair import Ref
from belayerd.policy import Limits
from belayerd.watch import Watched

AT = Progress(pid=7, start_time=1, doing="verifies m", done=3_000_000_000, of=9_000_000_000)


def further(gigabytes: int, within_s: float = 0.0) -> Progress:
    return msgspec.structs.replace(AT, done=gigabytes * 1_000_000_000, within_s=within_s)


def test_what_moves_is_waited_for_however_long_and_what_stands_still_is_not() -> None:
    patience = Patience(10.0)
    assert all(patience.moves(further(n), 9.0 * n) for n in range(100)), "a quarter of an hour in all"
    last = 9.0 * 99
    assert patience.moves(further(99), last + 10.0)
    assert not patience.moves(further(99), last + 10.1)
    assert patience.stood_s(last + 12.0) == 12.0
    assert patience.moves(further(100), last + 13.0), "it got on after all"


def test_nobody_on_the_way_is_not_waited_for_and_the_next_one_begins_anew() -> None:
    patience = Patience(10.0)
    assert not patience.moves(None, 0.0)
    assert patience.moves(AT, 100.0)
    assert not patience.moves(None, 101.0)
    assert patience.moves(AT, 105.0)
    assert patience.moves(msgspec.structs.replace(AT, pid=8), 120.0), "another life"


def test_a_silence_that_was_announced_is_legal() -> None:
    patience = Patience(10.0)
    asks = further(0, within_s=300.0)
    assert patience.moves(asks, 0.0)
    assert patience.moves(asks, 299.0)
    assert not patience.moves(asks, 301.0)


def test_what_a_killed_one_left_is_nobody(tmp_path: Path) -> None:
    path = tmp_path / "owner-weights.progress"
    assert progress.read(path) is None
    teller = Teller(path)
    teller.tell("verifies m", 1 << 30, 4 << 30)
    found = progress.read(path)
    assert found is not None
    assert str(found) == f"pid {os.getpid()} verifies m, 1.1 of 4.3 GB"
    child = subprocess.Popen(["sleep", "3600"])
    other = msgspec.structs.replace(found, pid=child.pid, start_time=procs.start_time(child.pid))
    path.write_bytes(msgspec.msgpack.encode(other))
    assert progress.read(path) == other
    child.kill()
    child.wait(60)
    assert progress.read(path) is None
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(found, start_time=found.start_time + 1)))
    assert progress.read(path) is None, "another process with its pid"
    path.write_bytes(b"\xc1")
    assert progress.read(path) is None
    teller.tell("starts")
    teller.over()
    assert not path.exists()


def test_a_disk_without_room_ends_nobody(tmp_path: Path) -> None:
    Teller(tmp_path / "no" / "such" / "folder").tell("starts")
    (tmp_path / "file").write_text("")
    Teller(tmp_path / "file" / "x").tell("starts")


@pytest.mark.parametrize("stops", [False, True])
def test_a_worker_that_follows_weights_is_waited_for_while_it_gets_on(tmp_path: Path, stops: bool) -> None:
    """Its bound, many times over; it was two minutes in all, whatever the size of a model."""
    beats = 0

    async def main() -> Done:
        nonlocal beats
        context = zmq.asyncio.Context()
        worker = context.socket(zmq.ROUTER)
        worker.set(zmq.LINGER, 0)
        worker.bind(f"ipc://{tmp_path}/w")
        link = WorkerLink(context, tmp_path / "w")
        try:
            asked = asyncio.create_task(link.call(FlushCache(), Done, 0.2, lambda: beats))
            peer, kind, call, _ = await worker.recv_multipart()
            while not stops and beats < 12:  # each of them within the bound, together far beyond it
                await asyncio.wait({asked}, timeout=0.1)
                assert not asked.done()
                beats += 1
            if not stops:
                await worker.send_multipart([peer, kind, call, wire.encode(Done(detail="followed"))])
            return await asked
        finally:
            link.close()
            context.destroy(linger=0)

    if stops:
        with pytest.raises(WorkerFailed, match=r"FlushCache in 0.2 s, and stood still at 0"):
            asyncio.run(main())
    else:
        assert asyncio.run(main()).detail == "followed"


def test_only_a_beat_about_the_weights_says_that_a_worker_gets_on_with_them() -> None:
    """One that beats and serves is not waited for without end because it beats."""
    child = subprocess.Popen(["sleep", "3600"])

    async def main(paths: Paths) -> list[str]:
        ref = Ref(worker_id="slot0-00000000", pid=child.pid, start_time=procs.start_time(child.pid))
        context, said = zmq.asyncio.Context(), list[str]()
        watched = Watched(ref, procs.open_pidfd(ref.pid, ref.start_time), paths, context, lambda *_: None)
        beat = Beat(paths.heartbeat(ref.worker_id))
        for now, phase in enumerate(("step", "weights v7: 0.07 of 0.14 GB", "weights v7: 0.14 of 0.14 GB", "idle")):
            beat.beat(phase, now, 0, 0, 0, 600.0)
            watched.look(float(now), Limits())
            said.append(watched.moving())
        beat.close()
        watched.close()
        context.destroy(linger=0)
        return said

    try:
        with tempfile.TemporaryDirectory(prefix="bl-") as folder:  # short: sockets lie below it
            said = asyncio.run(main(Paths(folder).make()))
    finally:
        child.kill()
        child.wait(60)
    assert said == ["", "weights v7: 0.07 of 0.14 GB", "weights v7: 0.14 of 0.14 GB", ""]
