"""Failures of workers that users of other systems report, by the numbers of tests/conformance/rollout_rows.py.

One host with two slots for all of them, whose workers live with a full /dev/shm (row 32), in a mount namespace of their
own. Rows that another test already tries are only in the table.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belayer import procs
from belayer.messages.control import HostStatusReply
from belayer.messages.worker import HELD
from benchmarks import tiny
from benchmarks.soak_host import SoakHost, rest, slot_of
from gpuowner.publish import publishing
from tests.support.host_words import ctl, facts, main_pid, pids, slot
from tests.support.streams import Stream, completion
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
SMOL = CACHE / "models/SmolLM2-135M-Instruct"
LOGS = CACHE / "logs/test_rollout_workers"
FULL_SHM = 'mount -t tmpfs -o size=64k none /dev/shm; cat /dev/zero >/dev/shm/full 2>/dev/null; exec "$@"'
AROUND = ("unshare", "--mount", "--propagation", "private", "sh", "-c", FULL_SHM, "sh")
BODY = completion(64, ignore_eos=True, temperature=0.9, seed=5)
UPDATES = 100
HANG_S = 2.0  # four times that of the soak: other tests run beside these


@pytest.fixture(scope="module")
def models() -> tuple[Path, Path]:
    one, two = (tiny.make(CACHE / f"models/belayer-tiny{s}", SMOL, seed) for s, seed in (("", 0), ("-two", 1)))
    return one, two


@pytest.fixture(scope="module")
def host(models: tuple[Path, Path]) -> Iterator[SoakHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    with SoakHost(root, models[0], AROUND, slot=slot_of(HANG_S)) as host:
        try:
            host.up()
            yield host
        finally:
            shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
    remove_tree(root)


@pytest.fixture(scope="module")
def truth(host: SoakHost) -> Any:
    first, again = (facts(stream(host).result()) for _ in range(2))
    assert first == again
    return first


def stream(host: SoakHost, body: dict[str, Any] = BODY) -> Stream:
    made = Stream(host.status().router_url, "/v1/completions", body)
    made.start()
    return made


def busy(host: SoakHost) -> list[str]:
    return [row.slot for row in host.status().slots if any(w.role == "main" and w.running for w in row.workers)]


def workers(status: HostStatusReply) -> dict[str, list[int]]:
    return {row.slot: pids(status, row.slot) for row in status.slots}


def test_row_32_a_full_dev_shm_is_nothing_to_a_worker(host: SoakHost, truth: Any) -> None:
    """Weights and arena are memfds: no name in /dev/shm, so nobody's leak there is a SIGBUS here. The fault is there:
    not one byte is free where the workers look. All tests of this module run like this."""
    for pid in [pid for both in workers(host.status()).values() for pid in both]:
        shm = Path(f"/proc/{pid}/root/dev/shm")
        assert os.statvfs(shm).f_bavail == 0
        assert [entry.name for entry in shm.iterdir()] == ["full"]
    assert len(truth[0]) == 64


def test_rows_12_26_and_45_each_relaunch_is_a_standby_and_takes_the_next_fault(host: SoakHost, truth: Any) -> None:
    """One death after the other, each as soon as the slot is protected: a new worker is a standby first, becomes the
    main at the next death, and says the same tokens as the first main of all."""
    before = host.until_protected()
    for turn in range(1, 5):
        main, shadow = pids(host.until_protected(), "slot0")
        os.kill(main, signal.SIGKILL)
        due = slot(before, "slot0").generation + turn
        after = host.until("the next main", lambda s, due=due: slot(s, "slot0").generation == due, 300.0)
        assert pids(after, "slot0")[0] == shadow, "what was a standby is the main now"
        answers = [facts(made.result()) for made in (stream(host), stream(host))]  # one for each slot
        assert answers == [truth, truth]
    assert slot(host.until_protected(), "slot0").handovers >= 4


def test_row_8_a_slow_start_is_no_hang(host: SoakHost) -> None:
    """Some hang limits without a beat while a worker loads: it has announced them, and becomes the shadow."""
    for _ in range(5):
        before = host.until_protected()
        dead = pids(before, "slot0")[1]
        os.kill(dead, signal.SIGKILL)
        status = host.until("a shadow that loads", lambda s, dead=dead: shadow_of(s) not in (0, dead), 300.0)
        starting = shadow_of(status)
        os.kill(starting, signal.SIGSTOP)
        eventually(lambda starting=starting: procs.state(starting) == "T", what="it is stopped")
        if slot(host.status(), "slot0").state == "rearming":
            break  # stopped before it was ready
        os.kill(starting, signal.SIGKILL)  # it was quicker than we were
        host.until("another one", lambda s, late=starting: shadow_of(s) not in (0, late), 300.0)
    else:
        raise AssertionError("five shadows were ready before they could be stopped")
    rest(3 * HANG_S)
    os.kill(starting, signal.SIGCONT)
    after = host.until_protected()
    assert workers(after)["slot0"] == [pids(before, "slot0")[0], starting]


def shadow_of(status: HostStatusReply) -> int:
    return next((w.pid for w in slot(status, "slot0").workers if w.role == "shadow"), 0)


def test_row_50_a_pause_holds_with_one_engine_idle(host: SoakHost, truth: Any) -> None:
    """Longer than any limit of the watcher; the busy engine keeps its request, the idle one takes one and holds it."""
    before = host.until_protected()
    made = stream(host, {**BODY, "max_tokens": 1000})
    eventually(lambda: len(made.seen.token_ids) >= 4, what="tokens")
    eventually(lambda: len(busy(host)) == 1, what="one engine is busy")
    host.post("/pause?mode=keep")
    second = stream(host)
    host.until("both hold", lambda s: all(row.workers[0].phase == HELD for row in s.slots), 300.0)
    rest(HANG_S)  # what was on its way to the client has come
    told = len(made.seen.token_ids)
    rest(5 * HANG_S + 1.0)
    assert len(made.seen.token_ids) - told <= 4, "paused"
    host.post("/resume")
    assert facts(second.result()) == truth
    assert len(made.result().token_ids) == 1000
    assert workers(host.until_protected()) == workers(before)


def test_row_15_an_unpark_that_fails_is_exit_1_and_says_so(host: SoakHost, truth: Any) -> None:
    host.until_protected()
    host.flag.write_text("Unpark")
    try:
        code, incident, _ = ctl(host, "handover", "slot0")
    finally:
        host.flag.unlink()
    assert code == 1
    assert "unpark failed" in incident["outcome"]
    status = host.until("quarantine", lambda s: slot(s, "slot0").state == "quarantined", 300.0)
    assert slot(status, "slot0").workers == ()
    assert facts(stream(host).result()) == truth, "the other slot serves"
    assert ctl(host, "restore", "slot0")[0] == 0
    host.until_protected()


def test_row_56_many_updates_leave_no_descriptor_and_no_memory(host: SoakHost, models: tuple[Path, Path]) -> None:
    """Every swap maps another memory in every worker: after the first few, counts stand still."""
    host.until_protected()
    size = sum(row.nbytes for owner in host.status().owners for row in owner.weights)
    before: dict[int, tuple[int, float]] = {}
    for turn in range(UPDATES):
        with publishing(host.paths, "smollm2") as update:
            update.write_folder(models[(turn + 1) % 2])
        if turn == 3:
            before = footprints(host)
    after = footprints(host)
    assert after.keys() == before.keys(), "no worker was replaced"

    def given_back() -> bool:
        now = footprints(host)
        return all(now[pid][0] <= fds for pid, (fds, _) in before.items())

    eventually(given_back, what=f"no process holds more descriptors than {before}")
    for pid, (_, rss) in before.items():
        assert after[pid][1] - rss < size / 2**20, f"{pid}: less than one of {UPDATES - 4} versions more"


def footprints(host: SoakHost) -> dict[int, tuple[int, float]]:
    """Open descriptors and resident MiB of each worker and of the owner of weights."""
    found = [pid for both in workers(host.status()).values() for pid in both] + [host.pid("gpuowner@weights")]
    return {pid: (len(os.listdir(f"/proc/{pid}/fd")), procs.rss_mb(pid)) for pid in found}


def test_row_57_any_worker_may_die_and_no_request_notices(host: SoakHost) -> None:
    """Both mains at once, in mid-stream."""
    before = host.until_protected()
    body = {**BODY, "max_tokens": 500}
    first = facts(stream(host, body).result())
    both = [stream(host, body) for _ in range(2)]
    eventually(lambda: all(len(one.seen.token_ids) >= 4 for one in both), what="tokens")
    for name in eventually(lambda: busy(host), what="a main runs something"):
        os.kill(main_pid(host, name), signal.SIGKILL)
    assert [facts(one.result()) for one in both] == [first, first]
    after = host.until_protected()
    assert sum(row.generation for row in after.slots) > sum(row.generation for row in before.slots)
