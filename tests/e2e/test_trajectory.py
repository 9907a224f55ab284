"""A trajectory over a real sandbox: log and environment go back together, or not at all (E1, E3, E5)."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import Sandbox, SandboxLost, Trajectory
from belayer.errors import RestoreFailed
from tests.support.envhost import EnvHost
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def host() -> Iterator[EnvHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    host = EnvHost.start(root)
    try:
        yield host
    finally:
        host.stop()
        remove_tree(root)


@pytest.fixture
def run(host: EnvHost) -> Iterator[Trajectory]:
    box = Sandbox.create(paths=host.paths)
    yield Trajectory(box, [{"role": "user", "content": "count"}])
    box.destroy()


def test_log_and_sandbox_go_back_to_one_boundary(run: Trajectory, host: EnvHost) -> None:
    run.say("first")
    assert run.act("X=1; echo one > /root/file; echo $X").stdout == "1\n"
    run.say("words that do not belong to L_1 yet")
    made = run.checkpoint()
    ready = run.messages[:3]
    assert made.boundary == 1
    assert run.act("X=2; echo two >> /root/file; echo $X").stdout == "2\n"
    run.say("third")
    before = list(run.messages)
    killer = threading.Thread(target=kill_when_acting, args=(run, host))
    killer.start()
    with pytest.raises(SandboxLost):
        run.act("echo three >> /root/file; touch /begun; sleep 1000")
    killer.join()
    assert run.messages == before, "a lost action leaves nothing in the log"
    back = run.recover()
    assert back.boundary == 1
    assert run.messages == ready
    assert run.act("echo $X; cat /root/file").stdout == "1\none\n"


def kill_when_acting(run: Trajectory, host: EnvHost) -> None:
    assert isinstance(run.sandbox, Sandbox)
    sandbox_id = run.sandbox.sandbox_id
    begun = Path(f"/proc/{host.info(sandbox_id).pid}/root/begun")
    eventually(begun.exists, what="an action in flight")
    other = Sandbox.attach(run.sandbox.sandbox_id, paths=host.paths)
    assert "dead" in other.kill().seen
    other.close()


def test_a_sandbox_of_another_log_is_refused(run: Trajectory) -> None:
    run.say("first")
    run.act("true")
    assert isinstance(run.sandbox, Sandbox)
    run.sandbox.checkpoint([{"role": "user", "content": "somebody else's context"}])
    before = list(run.messages)
    with pytest.raises(RestoreFailed, match="another context"):
        run.recover()
    assert run.messages == before
