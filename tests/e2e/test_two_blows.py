"""A main dies, and something else is wrong at the same time: the disk is full, or belayerd and the candidate die too.

One host with one slot of a tiny model; its state lies on a file system of its own, which can be filled.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from belayer import procs, statefile
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.control import IncidentList, ListIncidents
from belayer.rpc import call_sync
from belayerd.handover import Action
from belayerd.pair import Pair
from benchmarks import tiny
from tests.support.host_words import ctl, facts, slot
from tests.support.patience import patient
from tests.support.streams import Stream, completion
from tests.support.wait import eventually

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
LOGS = CACHE / "logs/test_two_blows"
ONE = "slot0"
BODY = completion(400, temperature=0.9, seed=5, ignore_eos=True)
EXTRA = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    (root / "state").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "belayer-test", root / "state"], check=True)
    model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
    config = demo_config(model, free_port(), slots=1, extra_slot="hang_limit_s = 60.0", extra=EXTRA)
    host = LocalHost(root, patient(config))
    try:
        host.start(ROLLOUT)
        host.until_protected()
        yield host
    finally:
        host.stop()
        shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
        subprocess.run(["umount", "-l", root / "state"], check=True)
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def truth(host: LocalHost) -> Any:
    return facts(start(host).result())


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """Not a byte is left."""
    balloon = folder / ".balloon"
    with balloon.open("wb") as file:
        for size in (1 << 20, 4096):
            with pytest.raises(OSError, match="No space left"):
                write_for_ever(file.fileno(), bytes(size))
    try:
        yield
    finally:
        balloon.unlink()


def write_for_ever(fd: int, data: bytes) -> None:
    while True:
        os.write(fd, data)


def start(host: LocalHost) -> Stream:
    stream = Stream(host.status().router_url, "/v1/completions", BODY)
    stream.start()
    return stream


def under_way(host: LocalHost) -> Stream:
    stream = start(host)
    eventually(lambda: len(stream.seen.token_ids) >= 8, what="tokens")
    assert stream.is_alive(), "it ended before the fault"
    return stream


def pids(host: LocalHost) -> dict[str, int]:
    return {worker.role: worker.pid for worker in slot(host.status(), ONE).workers}


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not procs.lives(pid), what=f"{pid} is dead")


def causes(host: LocalHost) -> list[str]:
    rows = call_sync(host.paths.belayerd_sock, ListIncidents(), IncidentList, 300.0).incidents
    return [row.cause for row in rows]


def test_a_full_disk_costs_no_handover(host: LocalHost, truth: Any) -> None:
    """Two of them: the second one's shadow was started on the full disk. What is lost is their record."""
    before = slot(host.until_protected(), ONE).generation
    known = causes(host)
    with full(host.paths.state):
        for _ in range(2):
            stream = under_way(host)
            killed(pids(host)["main"])
            assert facts(stream.result()) == truth
            host.until_protected()  # and no daemon has ended
        assert causes(host) == known
    assert slot(host.status(), ONE).generation == before + 2
    assert ctl(host, "handover", ONE)[0] == 0
    assert slot(host.until_protected(), ONE).generation == before + 3
    assert causes(host)[0] == "operator"


def test_belayerd_dies_together_with_the_candidate_of_its_handover(host: LocalHost, truth: Any) -> None:
    """As when no memory is left. The next belayerd finds an action under way and nobody to do it: it makes another
    worker, and the stream ends as if nothing had happened (O1)."""
    before = slot(host.until_protected(), ONE).generation
    stream, old = under_way(host), pids(host)
    os.kill(old["shadow"], signal.SIGSTOP)
    eventually(lambda: procs.state(old["shadow"]) == "T", what="it answers no action")
    killed(old["main"])

    def asked() -> bool:
        running = statefile.load(host.paths.slot_state(ONE), Pair).running
        return running is not None and running.action is Action.OWNERS

    eventually(asked, what="the candidate is asked")
    host.kill9("belayerd")
    killed(old["shadow"])
    host.spawn("belayerd")
    after = host.until_protected()
    assert facts(stream.result()) == truth
    assert slot(after, ONE).generation == before + 1
    assert not {old["main"], old["shadow"]} & set(pids(host).values())
