"""A slot of two tensor-parallel ranks over gloo fails over as one: whichever process dies or stands still, the stream
goes on with the tokens of the unfailed run, and nothing of the old group is left.

One host with one slot of two ranks serves all tests of this module. Each test leaves it protected.
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
from belayer.errors import Refused
from belayer.localhost import LocalHost, demo_config, free_port
from belayer.messages import owner as o
from belayer.messages.control import HostStatusReply, SlotView
from belayer.seqpacket import SeqClient
from benchmarks import tiny
from gpuowner.publish import publishing
from tests.e2e.test_host import ctl, facts, slot
from tests.support.saboteurs import SaboteurHost
from tests.support.streams import Stream, completion
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
LOGS = CACHE / "logs/test_tensor_parallel"
HANG_S = 1.5
SLOT = f"tensor_parallel = 2\nhang_limit_s = {HANG_S}\nkv_bytes = {32 << 20}\nmax_model_len = 512\n"
TOKENS = 120
BODIES: dict[str, dict[str, Any]] = {
    "greedy": completion(TOKENS, ignore_eos=True),
    "seeded": completion(TOKENS, ignore_eos=True, temperature=0.9, seed=5),
}


@pytest.fixture(scope="module")
def host() -> Iterator[SaboteurHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    model = tiny.make(CACHE / "models/belayer-tiny", CACHE / "models/SmolLM2-135M-Instruct")
    text = demo_config(model, free_port(), slots=1, extra_slot="@")
    host = SaboteurHost(root, text.replace(f"kv_bytes = {128 << 20}\nmax_model_len = 2048\n@", SLOT))
    try:
        host.begin()
        yield host
    finally:
        host.stop()
        shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
        remove_tree(root)


@pytest.fixture(scope="module")
def truth(host: LocalHost) -> dict[str, Any]:
    once, again = ({name: facts(stream(host, name).result()) for name in BODIES} for _ in range(2))
    assert once == again
    assert all(len(fact[0]) == TOKENS for fact in once.values())
    return once


def stream(host: LocalHost, name: str) -> Stream:
    made = Stream(host.status().router_url, "/v1/completions", BODIES[name])
    made.start()
    return made


def leader(view: SlotView, role: str = "main") -> tuple[str, int]:
    """Worker id and pid."""
    return next((worker.worker_id, worker.pid) for worker in view.workers if worker.role == role)


def rank_of(pid: int) -> int:
    """The process of rank 1: the leader's first child, which was forked before any other."""
    return procs.children(pid)[0]


def group_of(host: LocalHost, worker: str, pid: int) -> set[int]:
    cgroups = procs.Cgroups(procs.tag_of(host.paths.run))
    return set(cgroups.pids(worker) if cgroups.base is not None else procs.session_pids(pid))


def arenas(host: LocalHost) -> list[o.ArenaInfo]:
    client = SeqClient(host.paths.owner_sock("kv"))
    try:
        return sorted(client.call(o.OwnerStatus(), o.OwnerStatusReply)[0].arenas, key=lambda row: row.rank)
    finally:
        client.close()


def descriptors(host: LocalHost) -> int:
    """Of the owners, which hold the memory, the pidfds and the connections of every rank."""
    return sum(len(os.listdir(f"/proc/{host.pid(name)}/fd")) for name in ("gpuowner@weights", "gpuowner@kv"))


@pytest.fixture(scope="module")
def at_rest(host: LocalHost, truth: dict[str, Any]) -> int:
    """Descriptors with main and shadow up, once for all faults: what each of them left would add up."""
    return min(descriptors(host) for _ in range(50))  # connections of a status come and go


def send(pid: int, number: signal.Signals) -> None:
    """The fault, and its proof."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        if number is signal.SIGKILL:
            eventually(lambda: procs.is_dead(pidfd), what=f"death of {pid}")
        else:
            eventually(lambda: procs.state(pid) in ("T", "", "Z"), what=f"{pid} is stopped", every=0.001)
    finally:
        os.close(pidfd)


FAULTS = [("rank", signal.SIGKILL, "death"), ("leader", signal.SIGKILL, "death"), ("rank", signal.SIGSTOP, "hang")]


@pytest.mark.parametrize(("who", "number", "cause"), FAULTS, ids=["kill-rank", "kill-leader", "stop-rank"])
def test_the_group_fails_over_as_one(
    host: LocalHost, truth: dict[str, Any], at_rest: int, who: str, number: signal.Signals, cause: str
) -> None:
    before = slot(host.until_protected(), "slot0")
    worker, pid = leader(before)
    rank = rank_of(pid)
    group = group_of(host, worker, pid)
    assert {pid, rank} <= group, "both ranks are in the group that a fence kills"
    held = arenas(host)
    assert [(row.rank, row.holder, row.holder_pid) for row in held] == [(0, worker, pid), (1, worker, rank)]
    streams = {name: stream(host, name) for name in BODIES}
    eventually(lambda: all(len(one.seen.token_ids) >= 8 for one in streams.values()), what="tokens")
    send(rank if who == "rank" else pid, number)
    assert all(one.is_alive() for one in streams.values()), "the fault came while both streams ran"
    assert {name: facts(one.result(120)) for name, one in streams.items()} == truth

    after = slot(host.until_protected(), "slot0")
    assert after.generation == before.generation + 1, "one fault, one handover"
    incident = after.last_incident
    assert incident is not None
    assert (incident.cause, incident.outcome) == (cause, "served")
    assert all(not procs.lives(one) for one in group), "nothing of the old group lives"
    order = [word for step in incident.steps for word in ("fence", "lease") if word in step.step]
    assert order == ["fence", "lease"], "the old group was dead before the lease"
    new, new_pid = leader(after)
    now = arenas(host)
    assert [(row.rank, row.state, row.holder, row.holder_pid) for row in now] == [
        (0, "leased", new, new_pid),
        (1, "leased", new, rank_of(new_pid)),
    ]
    assert now[0].epoch == now[1].epoch == held[0].epoch + 1
    eventually(lambda: descriptors(host) <= at_rest, what="no descriptor of the old group is kept")
    left = (host.paths.worker_tmp(worker), host.paths.heartbeat(worker))
    eventually(lambda: not any(path.exists() for path in left), what="no file of the old group is kept")


def test_a_shadow_whose_rank_stands_still_while_idle_is_replaced(host: LocalHost, truth: dict[str, Any]) -> None:
    """No step runs that could block: the leader's question in each idle turn does."""
    before = slot(host.until_protected(), "slot0")
    worker, pid = leader(before, "shadow")
    group = group_of(host, worker, pid)
    send(rank_of(pid), signal.SIGSTOP)
    host.until(
        "another shadow",
        lambda s: slot(s, "slot0").protected and leader(slot(s, "slot0"), "shadow")[0] != worker,
        120.0,
    )
    assert slot(host.status(), "slot0").generation == before.generation
    eventually(lambda: all(not procs.lives(one) for one in group), what="nothing of the old shadow lives")
    assert facts(stream(host, "seeded").result()) == truth["seeded"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("again", "pulse: it is at call "),
        ("step", "execute_model: it heard another step than the leader said"),
        ("weights", "execute_model: it computes with weights v9"),
    ],
)
def test_ranks_that_come_apart_are_a_failure_of_the_group(
    host: SaboteurHost, truth: dict[str, Any], how: str, said: str
) -> None:
    """Each of them computes on and would give plausible tokens: what the ranks add up is the same wrong sum on all."""
    before = slot(host.until_protected(), "slot0")
    streams = {name: stream(host, name) for name in BODIES}
    eventually(lambda: all(len(one.seen.token_ids) >= 8 for one in streams.values()), what="tokens")
    if how == "again":  # of a group at rest
        assert {name: facts(one.result(120)) for name, one in streams.items()} == truth
    with host.sabotage(f"apart {how}"):
        eventually((host.paths.run / "sabotage.begun").exists, what="the rank goes its own way")
        host.until("the handover", lambda s: slot(s, "slot0").generation > before.generation, 120.0)
    (host.paths.run / "sabotage.begun").unlink()
    assert {name: facts(one.result(120)) for name, one in streams.items()} == truth

    def told() -> bool:
        last = slot(host.status(), "slot0").last_incident
        return last is not None and f"have come apart in {said}" in last.detail

    eventually(told, what="the incident says how")
    assert slot(host.until_protected(), "slot0").generation == before.generation + 1


@pytest.mark.parametrize(("fault", "said"), [("rank digest", "owners failed"), ("CheckOracle", "oracle failed")])
def test_a_group_that_fails_a_gate_never_serves(
    host: SaboteurHost, truth: dict[str, Any], fault: str, said: str
) -> None:
    """R5: also for the part of a rank whose leader is in order; both arenas stay shut, both processes end."""
    before = slot(host.until_protected(), "slot0")
    shadow, pid = leader(before, "shadow")
    group = group_of(host, shadow, pid)
    assert len(group) >= 2
    with host.sabotage(fault):
        send(leader(before)[1], signal.SIGKILL)
        ended = host.until("quarantine", lambda s: slot(s, "slot0").state == "quarantined", 120.0)
    reason = slot(ended, "slot0").reason
    assert reason.startswith(said), reason
    assert fault != "rank digest" or "(rank 1) maps version 1 (000000000000)" in reason
    eventually(lambda: all(not procs.lives(one) for one in group), what="both processes are dead")
    eventually(lambda: [row.state for row in arenas(host)] == ["quarantined"] * 2, what="both arenas")
    assert ctl(host, "restore", "slot0")[0] == 0
    host.until_protected()
    assert facts(stream(host, "greedy").result(120)) == truth["greedy"]


def test_the_ranks_are_shown(host: LocalHost) -> None:
    host.until_protected()

    def shown(status: HostStatusReply) -> bool:  # what belayerd looks at now and then
        workers = slot(status, "slot0").workers
        return all(
            [(row.rank, row.pid) for row in one.ranks] == [(1, rank_of(one.pid))] and one.ranks[0].rss_mb > 1
            for one in workers
        )

    host.until("the ranks", shown, 120.0)
    code, shown, _ = ctl(host, "status")
    assert (code, len(shown["host"]["slots"][0]["workers"][0]["ranks"])) == (0, 1)


def test_an_update_of_weights_in_parts_is_refused_and_changes_nothing(host: LocalHost, truth: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="tensor_parallel"), publishing(host.paths, "smollm2"):
        raise AssertionError("a writer was let in")
    assert facts(stream(host, "greedy").result()) == truth["greedy"]


def test_the_weights_lie_in_two_parts_with_their_own_digests(host: LocalHost) -> None:
    def read() -> tuple[o.WeightsInfo, ...]:
        client = SeqClient(host.paths.owner_sock("weights"))
        try:
            rows = client.call(o.OwnerStatus(), o.OwnerStatusReply)[0].weights
        finally:
            client.close()
        return rows if all(len(row.readers) == 2 for row in rows) else ()

    host.until_protected()
    rows = eventually(read, what="main and shadow read, each rank its own part")
    assert sorted((row.rank, row.state, row.version) for row in rows) == [(0, "sealed", 1), (1, "sealed", 1)]
    assert len({row.digest for row in rows}) == 2
