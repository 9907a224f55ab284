"""What must stop a slot does stop it: a tree that does not die, each gate that fails, a loop that makes no step.

Two slots and a spare on a tiny model. Each test ends with the slots protected again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from belayer import procs, statefile
from belayer.localhost import LocalHost, demo_config, free_port
from belayer.messages.control import HostStatusReply
from belayerd.pair import Pair
from benchmarks import tiny
from tests.support.host_words import ctl, facts, main_pid, pids, slot
from tests.support.saboteurs import SaboteurHost
from tests.support.streams import Stream, completion
from tests.support.under_way import on_one_slot
from tests.support.wait import eventually, remove_group, remove_tree

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
LOGS = CACHE / "logs/test_pair_faults"
FREEZER = Path("/sys/fs/cgroup/freezer")
# A process in a version 1 freezer shows as waiting in the kernel, which counts as starved for ten hang limits.
HANG_S = 2.0
NAP_S = 3 * HANG_S
GIVEN_S = 2 * HANG_S  # for a call that never ends
BODY = completion(400, ignore_eos=True, temperature=0.9, seed=5)


class Pair2(SaboteurHost):
    """Two slots and one spare."""

    def __init__(self, root: Path) -> None:
        model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
        slots = demo_config(model, free_port(), slots=3, extra_slot=f"hang_limit_s = {HANG_S}")
        head, _, last = slots.rpartition('name = "slot2"')
        super().__init__(
            root, f'{head}name = "spare0"\nspare = true{last}', "fence_deadline_s = 5.0\nstep_deadline_s = 20.0"
        )


@pytest.fixture(scope="module")
def host() -> Iterator[Pair2]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    host = Pair2(root)
    try:
        host.begin()
        yield host
    finally:
        groups = procs.Cgroups(procs.tag_of(host.paths.run)).base
        host.stop()
        assert groups is None or not groups.exists(), "no control group is left"
        shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
        remove_tree(root)


@pytest.fixture(scope="module")
def truth(host: Pair2) -> Any:
    first, again = (facts(stream(host).result()) for _ in range(2))
    assert first == again
    return first


def stream(host: LocalHost) -> Stream:
    made = Stream(host.status().router_url, "/v1/completions", BODY)
    made.start()
    return made


def begun(host: LocalHost) -> tuple[Stream, str]:
    """A stream under way and the slot that it runs on."""
    return on_one_slot(host, lambda: stream(host))


def arena(status: HostStatusReply, name: str) -> str:
    return next(row.state for owner in status.owners for row in owner.arenas if row.slot == name)


def test_the_spare_waits_and_takes_no_requests(host: Pair2) -> None:
    status = host.until_protected()
    spare = slot(status, "spare0")
    assert (spare.state, len(spare.workers)) == ("reserve", 1)
    code, shown, _ = ctl(host, "status")
    assert (code, shown["host"]["healthy"]) == (0, True)
    assert {seat["slot"] for seat in shown["router"]["slots"] if seat["registered"]} == {"slot0", "slot1"}


def test_a_stopped_main_that_is_continued_in_its_handover_does_nothing_more(host: Pair2, truth: Any) -> None:
    """R1: SIGCONT while the steps run finds a process that is being killed, and no token of it is delivered."""
    before = host.until_protected()
    made, name = begun(host)
    pid = main_pid(host, name)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: procs.state(pid) == "T", what="the main is stopped")

    def under_way() -> bool:
        saved = statefile.load(host.paths.slot_state(name), Pair)  # or it is over: nobody looked in time
        return saved.running is not None or saved.generation > slot(before, name).generation

    eventually(under_way, what="the handover", every=0.0005)
    continued = True
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        continued = False
    assert facts(made.result()) == truth
    after = host.until_protected()
    assert slot(after, name).generation == slot(before, name).generation + 1
    assert not procs.lives(pid), f"continued: {continued}"


def test_a_loop_that_makes_no_step_is_handed_over(host: Pair2, truth: Any) -> None:
    """Its heart beats, its requests stand still: only the step counter tells."""
    before = host.until_protected()
    made, name = begun(host)
    with host.sabotage("stuck"):
        host.until("the handover", lambda s: slot(s, name).generation > slot(before, name).generation, 300.0)
    assert facts(made.result()) == truth
    last = slot(host.until_protected(), name).last_incident
    assert last is not None
    assert last.cause == "stuck"


def call(host: LocalHost, **body: Any) -> tuple[int, Any]:
    """(status, body) of an admin call, which goes to every main."""
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{host.status().router_url}/collective_rpc", data=data, headers=kind)
    try:
        with urllib.request.urlopen(request, timeout=180) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as why:
        return why.code, why.read().decode()


def generations(status: HostStatusReply) -> list[int]:
    return [row.generation for row in status.slots if row.state != "reserve"]


def test_an_admin_call_may_take_its_time_in_the_loop(host: Pair2) -> None:
    """No step and no beat for three hang limits: the call was announced."""
    before = host.until_protected()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(call, host, method="nap", args=[str(NAP_S)])
        busy = host.until(
            "the phase", lambda s: any(w.phase == "call collective_rpc" for r in s.slots for w in r.workers), 300.0
        )
        assert asked.result() == (200, {"results": ["False"]})
    assert generations(busy) == generations(before)
    assert generations(host.until_protected()) == generations(before)


def test_an_admin_call_that_never_ends_is_found_after_the_time_that_it_was_given(host: Pair2, truth: Any) -> None:
    before = host.until_protected()
    status, said = call(host, method="nap", args=["600"], timeout=GIVEN_S)
    assert status >= 500, said
    due = [generation + 1 for generation in generations(before)]
    host.until("both handovers", lambda s: generations(s) == due, 300.0)
    after = host.until_protected()
    assert generations(after) == due
    last = slot(after, "slot0").last_incident
    assert last is not None
    assert last.cause == "hang"
    assert f"in phase call collective_rpc (allowed {GIVEN_S:g} s)" in last.detail
    assert facts(stream(host).result()) == truth


@pytest.mark.skipif(not FREEZER.is_dir(), reason="only the version 1 freezer keeps a killed process from dying")
def test_a_tree_that_does_not_die_quarantines_and_the_spare_takes_its_place(host: Pair2, truth: Any) -> None:
    """R1, R7: the arena of a main that cannot be seen dead is granted to nobody; requests move; the alert leaves the
    host; a spare takes the place; after the repair the operator brings the slot back."""
    host.until_protected()
    made, name = begun(host)
    other = {"slot0": "slot1", "slot1": "slot0"}[name]
    pid = main_pid(host, name)
    with frozen(pid):
        ended = host.until("quarantine", lambda s: slot(s, name).state == "quarantined", 300.0)
        assert procs.lives(pid), "it was not dead when the slot was given up"
        assert "fence failed" in slot(ended, name).reason
        assert str(pid) in slot(ended, name).reason
        assert facts(made.result()) == truth
        status = host.until("the spare", lambda s: slot(s, "spare0").protected, 300.0)
        status = host.until("the arena", lambda s: arena(s, name) == "quarantined", 300.0)
        assert slot(status, other).protected
        code, shown, _ = ctl(host, "status")
        assert (code, shown["host"]["healthy"]) == (1, False)
        assert {seat["slot"] for seat in shown["router"]["slots"] if seat["registered"]} == {other, "spare0"}
        told = {"slot": name, "state": "quarantined", "reason": slot(status, name).reason}
        eventually(lambda: any(told.items() <= row.items() for row in host.alerted()), what="the alert command")
    eventually(lambda: not procs.lives(pid), what="thawed, it dies of the SIGKILL that was waiting")
    assert ctl(host, "gpu", "restore", name)[0] == 0
    assert slot(host.until_protected(), name).protected
    assert facts(stream(host).result()) == truth


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ("WorkerStatus", "owners"),
        ("TakeArena", "lease"),
        ("FlushCache", "flush"),
        ("Unpark", "unpark"),
        ("CheckOracle", "oracle"),
        ("BecomeMain", "become"),
    ],
)
def test_a_shadow_that_fails_a_gate_never_serves(host: Pair2, truth: Any, message: str, action: str) -> None:
    """R5: nothing of the slot is reused, its status and its incident say which gate, its requests go on elsewhere."""
    host.until_protected()
    made, name = begun(host)
    shadow = pids(host.status(), name)[1]
    with host.sabotage(message):
        os.kill(main_pid(host, name), signal.SIGKILL)
        ended = host.until("quarantine", lambda s: slot(s, name).state == "quarantined", 300.0)
    assert slot(ended, name).reason.startswith(f"{action} failed"), slot(ended, name).reason
    assert slot(ended, name).workers == ()
    assert facts(made.result()) == truth
    eventually(lambda: not procs.lives(shadow), what="the shadow is dead")
    host.until("the arena", lambda s: arena(s, name) == "quarantined", 300.0)

    def told(status: HostStatusReply) -> bool:  # it is written down right after the state
        last = slot(status, name).last_incident
        return last is not None and last.outcome.startswith(f"quarantined: {action} failed")

    host.until("the incident", told, 300.0)
    assert ctl(host, "restore", name)[0] == 0
    host.until_protected()


def test_a_weights_owner_that_is_gone_fails_the_gate(host: Pair2, truth: Any) -> None:
    host.until_protected()
    made, name = begun(host)
    host.kill9("gpuowner@weights")
    os.kill(main_pid(host, name), signal.SIGKILL)
    ended = host.until("quarantine", lambda s: slot(s, name).state == "quarantined", 300.0)
    assert slot(ended, name).reason.startswith("owners failed"), slot(ended, name).reason
    assert facts(made.result()) == truth
    host.spawn("gpuowner@weights")
    host.until("both owners", lambda s: len(s.owners) == 2, 300.0)
    assert ctl(host, "restore", name)[0] == 0
    host.until_protected()
    assert facts(stream(host).result()) == truth


def test_shadows_that_failed_while_their_owner_was_away_are_started_when_it_answers(host: Pair2) -> None:
    """Each start dies of the missing owner until the budget is used up; the owner's return is reason enough to try."""
    before = host.until_protected()
    main = main_pid(host, "slot0")
    host.kill9("gpuowner@weights")
    assert ctl(host, "inject", "kill-worker", "slot0", "--shadow")[0] == 0
    exposed = host.until("exposed", lambda s: slot(s, "slot0").state == "exposed", 300.0)
    assert "starts in a row failed" in slot(exposed, "slot0").reason
    host.spawn("gpuowner@weights")
    after = host.until_protected(mending=True)
    assert main_pid(host, "slot0") == main
    assert slot(after, "slot0").generation == slot(before, "slot0").generation


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """``pid`` in a frozen control group of its own; SIGKILL waits there until it is thawed."""
    group = FREEZER / f"belayer-test-{secrets.token_hex(4)}"
    group.mkdir()
    state = group / "freezer.state"
    try:
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        eventually(lambda: state.read_text().strip() == "FROZEN", what="the freezer", every=0.01)
        yield
    finally:
        state.write_text("THAWED")
        remove_group(group)
