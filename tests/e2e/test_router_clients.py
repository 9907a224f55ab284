"""Clients of other projects, unchanged, through a SIGKILL of the main of a real engine: their answers are those of the
unfailed run (issue 5, item 9). Each runs in a process of its own, from .venv or from what setup/clients.sh made."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from belayer.localhost import free_port
from tests.support.owner_stack import MODEL, REPO
from tests.support.router_stack import RouterStack
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

SCRIPTS = Path(__file__).parents[1] / "support/clients"
OTHERS = REPO / ".cache/clients/bin/python"  # setup/clients.sh
LOGS = REPO / ".cache/logs/test_router_clients"
# script -> (its Python, what it is told after the URL, how many requests it has in flight at once)
CLIENTS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "openai_sdk": (sys.executable, (), 3),
    "litellm_sdk": (str(OTHERS), (), 2),
    "vllm_bench": (sys.executable, (str(MODEL), "FOLDER"), 4),
    "renderer": (str(OTHERS), (str(MODEL),), 2),
    "trl_rollout": (str(OTHERS), (str(MODEL),), 4),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


class Client:
    """A client's process. ``ask`` blocks until its answer is there; it has one question at a time."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        python, words, self.requests = CLIENTS[name]
        told = [url, *(str(folder) if word == "FOLDER" else word for word in words)]
        LOGS.mkdir(parents=True, exist_ok=True)
        with (LOGS / f"{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                [python, str(SCRIPTS / f"{name}.py"), *told],
                env={**os.environ, **ENVIRONMENT},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the client has ended with {self._process.wait(300)}; see {LOGS}"
        return line

    def until_ready(self) -> None:
        assert self._line() == "ready\n"

    def ask(self) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> None:
        """SIGKILL to all of its processes, which are of a session of their own."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, and its test has failed
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(300)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@dataclass
class Scene:
    host: RouterStack
    clients: dict[str, Client]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """All clients start before the host: they import for as long as it does."""
    port, clients = free_port(), {}
    try:
        for name in CLIENTS:
            clients[name] = Client(name, f"http://127.0.0.1:{port}", tmp_path_factory.mktemp(name))
        host = RouterStack.up(port=port)
        try:
            host.promote(host.stack.spawn())
            yield Scene(host, clients)
        finally:
            host.stop()
    finally:
        for client in clients.values():
            client.end()


def floats_apart(thing: Any, floats: list[float]) -> Any:
    """The same thing with its floats taken out and put into ``floats``."""
    if isinstance(thing, float):
        floats.append(thing)
        return None
    if isinstance(thing, dict):
        return {name: floats_apart(one, floats) for name, one in thing.items()}
    return [floats_apart(one, floats) for one in thing] if isinstance(thing, list) else thing


def assert_equal(seen: Any, truth: Any) -> None:
    """Logprobs as close as prefill and decode kernels are, all else exactly."""
    got: list[float] = []
    wanted: list[float] = []
    assert floats_apart(seen, got) == floats_apart(truth, wanted)
    assert got == pytest.approx(wanted, abs=1e-3)


def in_the_middle(host: RouterStack, client: Client, answer: Future[Any], made: int) -> bool:
    """Wait until the engine has all requests of the client and some tokens of each. True: the worker stands still
    there, and not all have ended; False: the answer came before that was seen. ``made``: tokens before."""

    def reached() -> bool:
        now = host.status()
        middle = now.running >= client.requests and now.tokens_total - made >= 5 * client.requests
        return middle or answer.done()

    eventually(reached, what=f"{client.requests} requests are in their middle")
    return not answer.done() and host.caught_running(host.last, 1)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_real_client_sees_nothing_of_a_kill(scene: Scene, name: str) -> None:
    host, client = scene.host, scene.clients[name]
    client.until_ready()
    truth = client.ask()
    assert truth
    shadow = host.stack.spawn()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            before = host.status()
            answer = pool.submit(client.ask)
            if in_the_middle(host, client, answer, before.tokens_total):
                break
            assert_equal(answer.result(), truth)
        else:
            raise AssertionError("five answers were whole before anybody looked")
        host.retire()
        interrupted = host.status().waiting
        assert interrupted >= 1
        host.promote(shadow)
        assert_equal(answer.result(300), truth)
    after = host.status()
    assert after.resumed_total - before.resumed_total >= interrupted
    assert after.failed_total == before.failed_total
