"""A worker that does not come up says why: its own words, or how the kernel ended it, in status, incident and alert;
and whoever waits for the slot is told at once.

One host with one slot of two ranks serves most of it; only the last test brings its shadow back.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from belayer import procs
from belayer.daemon import OnlyOne
from belayer.errors import WorkerFailed
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.control import IncidentList, ListIncidents, SlotView
from belayer.rpc import call_sync
from benchmarks import tiny
from tests.support import oom
from tests.support.host_words import ctl, main_pid, slot
from tests.support.patience import SLOT
from tests.support.saboteurs import SaboteurHost
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
LOGS = CACHE / "logs/test_failed_starts"
ONE = "slot0"
PARTS = f"kv_bytes = {32 << 20}\ntensor_parallel = 2\n{SLOT}"
OOM = pytest.param("oom", "of the kernel's OOM killer|OOM killer has ended", marks=pytest.mark.skipif(
    not oom.available(), reason="no memory control group can be made here"
))  # fmt: skip


@pytest.fixture(scope="module")
def host() -> Iterator[SaboteurHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
    text = demo_config(model, free_port(), slots=1).replace(f"kv_bytes = {128 << 20}", PARTS)
    text = text.replace('dtype = "float32"', 'dtype = "float32"\nupdate = "in_place"')  # its memory is not sealed
    host = SaboteurHost(root, text, "restart_budget = 2\nrestart_backoff_s = 0.01")
    try:
        host.begin()
        yield host
    finally:
        host.stop()
        oom.sweep()
        shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
        remove_tree(root)


def told_everywhere(host: SaboteurHost, name: str, state: str) -> str:
    """The reason, after it was found in the status, on record, in the alert, and in the way of whoever waits."""

    def given_up(row: SlotView) -> bool:
        last = row.last_incident
        said = (last.detail, last.outcome.partition(": ")[2]) if last else ()
        return row.state == state and row.gave_up and row.reason in said  # the incident comes right after the state

    view = slot(host.until(state, lambda s: given_up(slot(s, name)), 300.0), name)
    rows = call_sync(host.paths.belayerd_sock, ListIncidents(), IncidentList, 300.0).incidents
    assert next(row for row in rows if row.slot == name) == view.last_incident
    sent = {"slot": name, "state": state, "reason": view.reason}
    eventually(lambda: any(sent.items() <= row.items() for row in host.alerted()), what="the alert")
    with pytest.raises(WorkerFailed) as told:
        host.until_protected()
    assert f"slot {name}: {view.reason}" in told.value.message
    code, _, _ = ctl(host, "status")
    assert code == 1
    return view.reason


def shadow_fails(host: SaboteurHost, how: str) -> str:
    """From protected, or from where the last one has left it: another start is asked for, and fails at once."""
    with host.sabotage(how):
        protected = slot(host.status(), ONE).protected
        words = ("inject", "kill-worker", ONE, "--shadow") if protected else ("restore", ONE)
        assert ctl(host, *words)[0] == 0
        return told_everywhere(host, ONE, "exposed")


def mended(host: SaboteurHost) -> None:
    assert ctl(host, "restore", ONE)[0] == 0
    assert slot(host.until_protected(), ONE).reason == ""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "HostUnfit: no such device, on purpose and a second line; mend it"),
        ("exit", "ended with status 3"),
        ("signal", "killed by signal 15 (SIGTERM)"),
        OOM,
    ],
)
def test_a_shadow_that_does_not_start_says_why(host: SaboteurHost, how: str, said: str) -> None:
    reason = shadow_fails(host, f"start {how}")
    assert "starts in a row failed, the last one: shadow did not start: " in reason, reason
    assert any(word in reason for word in said.split("|")), reason
    log = Path(reason.rpartition("log at ")[2])
    assert log.parent == host.paths.state / "log"
    assert log.exists()
    assert how != "oom" or oom.sweep() > 0, "it ended in the group that had no memory left"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "shadow did not start: rank 1: HostUnfit: no such device, on purpose"),
        ("signal", "shadow did not start: rank 1 (pid "),
    ],
)
def test_a_rank_that_does_not_start_is_named(host: SaboteurHost, how: str, said: str) -> None:
    reason = shadow_fails(host, f"rank {how}")
    assert said in reason
    assert how != "signal" or "killed by signal 15 (SIGTERM)" in reason, reason


def link_of(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # closed meanwhile: a connection comes and goes
        return ""


def asked(host: LocalHost, status: int) -> str:
    """What a client is answered, with this status."""
    host.until("the router", lambda s: bool(s.router), 300.0)
    body = {"model": "smollm2", "prompt": "x", "max_tokens": 2}
    answer = httpx.post(f"{host.status().router_url}/v1/completions", json=body, timeout=600)
    assert answer.status_code == status, answer.text
    return answer.text


@contextmanager
def wrong_byte(host: SaboteurHost, rank: int) -> Iterator[None]:
    """The lowest bit of the last weight of a rank's part is another one in the owner's memory."""
    owner = Path(f"/proc/{host.pid('gpuowner@weights')}/fd")
    door = next(fd for fd in owner.iterdir() if link_of(fd).startswith(f"/memfd:belayer-weights-smollm2-{rank}"))
    door.chmod(0o600)
    fd = os.open(door, os.O_RDWR)
    try:
        at = os.fstat(fd).st_size - 4
        good = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([good[0] ^ 1]), at)
        assert os.pread(fd, 1, at) != good
        yield
        os.pwrite(fd, good, at)
    finally:
        door.chmod(0o400)
        os.close(fd)


@pytest.mark.parametrize(("rank", "who"), [(0, ""), (1, "rank 1: ")])
def test_a_wrong_byte_is_found_beside_the_build_of_the_engine(host: SaboteurHost, rank: int, who: str) -> None:
    """R4: hashing overlaps with the build (ADR 0019), and a shadow of other bytes is never ready; no token of the bit
    is computed, by any rank. The byte is mended, and so is the slot, in the test after this one."""
    with wrong_byte(host, rank):
        reason = shadow_fails(host, "")
        assert f"shadow did not start: {who}WeightsBroken: weights of smollm2 v1: chunk 0 differs" in reason
        assert not slot(host.status(), ONE).protected


def test_a_main_that_does_not_start_quarantines_with_its_words(host: SaboteurHost) -> None:
    """The shadow is gone, then the main: nobody is left, and each that is started fails."""
    shadow_fails(host, "start exit")
    with host.sabotage("start raise"):
        pid = main_pid(host, ONE)
        assert ctl(host, "inject", "kill-worker", ONE)[0] == 0
        reason = told_everywhere(host, ONE, "quarantined")
    assert "main did not start: HostUnfit: no such device, on purpose" in reason
    last = slot(host.status(), ONE).last_incident
    assert last is not None
    assert "all slots of this host have given up" in asked(host, 503), "not after router.request_deadline_s"
    assert last.detail == f"pid {pid} ended (pidfd): killed by signal 9 (SIGKILL)"
    mended(host)
    asked(host, 200)
    known = {worker.worker_id for row in host.status().slots for worker in row.workers}
    folder = host.paths.run / "w"

    def left() -> set[str]:
        return {path.name.split(".")[0] for path in folder.iterdir() if not path.name.startswith("zygote")} - known

    eventually(lambda: not left(), what="nothing of those who failed is left")


def test_a_zygote_that_does_not_start_is_told_once_with_its_words() -> None:
    """Before it imports anything: another one seems to hold this host's lock. Then it is killed."""
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
    host = SaboteurHost(root, demo_config(model, free_port(), slots=1))
    try:
        lock = OnlyOne(host.paths.run, "zygote")
        host.start(ROLLOUT)
        with pytest.raises(WorkerFailed, match="the zygote did not start: AlreadyRuns: zygote already runs below"):
            host.until_protected()
        status = host.status()
        assert f"log at {host.paths.log('zygote')}" in status.zygote
        alert = eventually(host.alerted, what="the alert")
        assert [(row["state"], row["reason"]) for row in alert] == [("zygote", status.zygote)]
        assert "all slots of this host have given up" in asked(host, 503), "no client waits for it either"
        del lock
    finally:
        host.stop()
        remove_tree(root)


def test_a_zygote_that_is_killed_while_it_imports_is_told_by_its_signal() -> None:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
    host = LocalHost(root, demo_config(model, free_port(), slots=1))
    try:
        host.start(ROLLOUT)
        lock = host.paths.run / "zygote.lock"
        pid = int(eventually(lambda: lock.exists() and lock.read_text(), within=300, what="a zygote on its way"))
        os.kill(pid, signal.SIGKILL)
        status = host.until("the failure", lambda s: "did not start" in s.zygote, 300.0)
        assert "killed by signal 9 (SIGKILL)" in status.zygote
        assert not status.zygote_failed, "once may be chance"
    finally:
        host.stop()
        remove_tree(root)


def test_a_zygote_that_still_imports_is_waited_for_by_the_next_belayerd() -> None:
    """It holds the lock and does not listen yet: no other one is tried, and nothing is said to have failed."""
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
    host = LocalHost(root, demo_config(model, free_port(), slots=1))
    try:
        host.start(ROLLOUT)
        lock, log = host.paths.run / "zygote.lock", host.paths.log("belayerd")
        pid = int(eventually(lambda: lock.exists() and lock.read_text(), within=300, what="a zygote on its way"))
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: procs.state(pid) == "T", what="it stands still")
        assert not host.paths.zygote_sock.exists(), "it does not listen yet"
        host.kill9("belayerd")
        host.spawn("belayerd")
        eventually(lambda: "a zygote is on its way" in log.read_text(), what="it is waited for")
        os.kill(pid, signal.SIGCONT)
        host.until_protected()
        assert int(lock.read_text()) == pid
        assert "did not start" not in log.read_text()
    finally:
        host.stop()
        remove_tree(root)
