"""The zygote: refusals leave no process, and its own death hurts no worker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import procs
from belayer.errors import BadMessage, Refused, WorkerFailed
from belayer.messages import owner as o
from belayer.messages import worker as w
from belayer.messages.common import Ping, Pong
from belayer.seqpacket import SeqClient
from tests.support.wait import eventually
from tests.support.worker_client import engine_request
from tests.support.worker_stack import WorkerStack

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stack() -> Iterator[WorkerStack]:
    made = WorkerStack("max_num_batched_tokens = 64\nmax_model_len = 256")
    made.start()
    yield made
    made.stop()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_what_it_cannot_do_it_declines_and_leaves_nothing(stack: WorkerStack) -> None:
    zygote = SeqClient(stack.paths.zygote_sock)
    pid = zygote.call(Ping(), Pong)[0].pid
    with pytest.raises(Refused, match="nowhere"):
        zygote.call(w.SpawnWorker(worker_id="nowhere-00000000", slot="nowhere"), w.Spawned)
    with pytest.raises(Refused, match=r"\.\./evil"):
        zygote.call(w.SpawnWorker(worker_id="../evil", slot="slot0"), w.Spawned)
    with pytest.raises(BadMessage):
        zygote.call(o.OwnerStatus(), w.Spawned)
    with pytest.raises(WorkerFailed, match="control group"):
        zygote.call(w.SpawnWorker(worker_id="slot0-00000000", slot="slot0", cgroup="/nonexistent"), w.Spawned)
    eventually(lambda: not children(pid), what="no child is left")
    zygote.close()


def test_workers_outlive_the_zygote_and_the_next_one_serves(stack: WorkerStack) -> None:
    worker = stack.spawn()
    worker.become_main(stack.arena().epoch, 1)
    zygote = SeqClient(stack.paths.zygote_sock)
    pid = zygote.call(Ping(), Pong)[0].pid
    zygote.close()
    pidfd = procs.open_pidfd(pid, procs.start_time(pid))
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    eventually(lambda: procs.is_dead(pidfd), what="the zygote's death")
    front = worker.front()
    stream = front.generate(engine_request("alone", [5, 6, 7], max_tokens=4, temperature=0.0, ignore_eos=True))
    assert len(stream.tokens) == 4
    front.close()
    stack.wait_socket(stack.daemon("belayerd.worker.zygote"), stack.paths.zygote_sock)
    shadow = stack.spawn()
    assert shadow.status.oracle == worker.status.oracle
    worker.kill()
    eventually(lambda: stack.arena().state == "fencing", what="FENCING")
    shadow.become_main(stack.end_fence().epoch, 2)
