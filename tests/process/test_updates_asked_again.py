"""belayerd killed while a trainer waits for its answer: real sockets, a real owner, and a belayerd that only answers.

    python -m tests.process.test_updates_asked_again ROOT SILENT

is one life of that belayerd: every ``SILENT`` message is taken, said on stdout, and never answered.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from belayer.errors import DaemonUnreachable
from belayer.messages.control import BeginWeightsUpdate, EndWeightsUpdate, Request, WeightsUpdated
from belayer.messages.trainer import RegisterTrainer, TrainerRegistered
from belayer.paths import Paths
from belayer.rpc import Server
from belayer.trainer import Trainer
from gpuowner.publish import publishing
from tests.support.owner_stack import Stack
from tests.support.versions import save

REPO = Path(__file__).resolve().parents[2]
EPOCH = 3
ENDLESS = 300.0  # seconds; no test waits it out
WAIT_S = 120.0


class Life:
    """One life of the belayerd that only answers."""

    def __init__(self, root: Path, silent: str = "") -> None:
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        command = [sys.executable, "-m", "tests.process.test_updates_asked_again", str(root), silent]
        self.child = subprocess.Popen(command, env=env, cwd=REPO, text=True, stdout=subprocess.PIPE)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def killed_once_asked(self) -> msgspec.Struct:
        """The message that it never answers; then SIGKILL."""
        taken = msgspec.json.decode(self._line(), type=EndWeightsUpdate | BeginWeightsUpdate)
        self.kill()
        return taken

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(300)
        if self.child.stdout is not None:
            self.child.stdout.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    made = Stack()
    (folder := made.root / "model").mkdir()
    (folder / "config.json").write_text("{}")
    save(folder / "model.safetensors", {"w": np.ones(4, dtype=np.float32)})
    made.paths.config.write_text(f'[[model]]\nname = "m"\npath = "{folder}"\n[[slot]]\nname = "slot0"\nmodel = "m"\n')
    owner = made.daemon("gpuowner", "--kind", "weights")
    made.wait_socket(owner, made.paths.owner_sock("weights"))
    yield made
    made.stop()


@pytest.fixture
def lives(stack: Stack) -> Iterator[Callable[[str], Life]]:
    made: list[Life] = []

    def one(silent: str) -> Life:
        made.append(Life(stack.root, silent))
        return made[-1]

    yield one
    for life in made:
        life.kill()


def published(stack: Stack, within_s: float = ENDLESS) -> int:
    with publishing(stack.paths, "m", within_s=within_s) as update:
        update.write({"w": np.full(4, 7, dtype=np.float32)})
    return update.version


def shell(stack: Stack) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuowner.publish", "m", str(stack.root / "model")]
    env = {**os.environ, "BELAYER_ROOT": str(stack.root), "PYTHONPATH": str(REPO)}
    return subprocess.run(command, env=env, cwd=REPO, text=True, capture_output=True, timeout=240, check=False)


def test_the_end_of_a_publish_is_asked_again_of_the_next_belayerd(
    stack: Stack, lives: Callable[[str], Life], threads: ThreadPoolExecutor
) -> None:
    """Killed twice while it is awaited: the third life is told of the same update, and the publisher of its answer."""
    life = lives("EndWeightsUpdate")
    waiting = threads.submit(published, stack)
    first = life.killed_once_asked()
    second = lives("EndWeightsUpdate").killed_once_asked()
    assert isinstance(first, EndWeightsUpdate)
    assert first == second
    assert first.update
    lives("")
    assert waiting.result(WAIT_S) > 1


def test_without_a_next_belayerd_a_publish_says_what_is_sealed(
    stack: Stack, lives: Callable[[str], Life], threads: ThreadPoolExecutor
) -> None:
    life = lives("EndWeightsUpdate")
    waiting = threads.submit(published, stack, within_s=10.0)
    life.killed_once_asked()
    with pytest.raises(DaemonUnreachable, match=r"v\d+ of m is sealed, but no belayerd said that it is served") as why:
        waiting.result(WAIT_S)
    assert "brings the engines" in why.value.remedy


def test_a_belayerd_killed_as_an_update_begins_is_told_of_at_once(
    stack: Stack, lives: Callable[[str], Life], threads: ThreadPoolExecutor
) -> None:
    """Whether it paused anybody is unknown, so it is not asked twice; nothing was written."""
    life = lives("BeginWeightsUpdate")
    waiting = threads.submit(published, stack)
    life.killed_once_asked()
    with pytest.raises(DaemonUnreachable, match="ended before it answered"):
        waiting.result(WAIT_S)


def test_the_end_of_a_trainers_update_is_asked_again_and_names_its_life(
    stack: Stack, lives: Callable[[str], Life], threads: ThreadPoolExecutor
) -> None:
    life = lives("EndWeightsUpdate")
    trainer = Trainer("m", name="grpo", paths=stack.paths)

    def update() -> None:
        with trainer.update(within_s=ENDLESS):
            pass

    waiting = threads.submit(update)
    asked = life.killed_once_asked()
    assert isinstance(asked, EndWeightsUpdate)
    assert (asked.trainer, asked.epoch) == ("grpo", EPOCH)
    lives("")
    waiting.result(WAIT_S)


def test_a_shell_that_reaches_no_belayerd_ends_with_3(stack: Stack) -> None:
    stack.paths.belayerd_sock.unlink(missing_ok=True)  # one that was killed leaves it: it would be waited for
    done = shell(stack)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert "no daemon listens" in done.stderr


def answer(message: Any) -> msgspec.Struct:
    if isinstance(message, RegisterTrainer):
        return TrainerRegistered(epoch=EPOCH, members=())
    assert isinstance(message, BeginWeightsUpdate | EndWeightsUpdate)
    return WeightsUpdated(model=message.model, version=1, slots=())


async def be_belayerd(sock: Path, silent: str) -> None:
    async def handle(message: Any) -> msgspec.Struct:
        if type(message).__name__ != silent:
            return answer(message)
        print(msgspec.json.encode(message).decode(), flush=True)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    server = Server(sock, Request, handle)
    print("ready", flush=True)
    await server.serve()


if __name__ == "__main__":
    asyncio.run(be_belayerd(Paths(Path(sys.argv[1])).belayerd_sock, sys.argv[2]))
