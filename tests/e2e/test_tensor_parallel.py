"""A slot of two tensor-parallel ranks over gloo fails over as one: whichever process dies or stands still, the stream
goes on with the tokens of the unfailed run, and nothing of the old group is left.

One host with one slot of two ranks serves all tests of this module. Each test leaves it protected.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from belayer import procs
from belayer.errors import Refused, WeightsTorn
from belayer.localhost import LocalHost, demo_config, free_port
from belayer.messages import owner as o
from belayer.messages.control import HostStatusReply
from gpuowner.attach import OwnerClient
from gpuowner.update import begin_update
from tests.e2e.test_host import ctl, facts, slot
from tests.e2e.test_kv_reuse import cached
from tests.e2e.test_weight_updates import MODEL, ONE, TWO, begin, end, paused, publish
from tests.support.rank_host import all_follow, arenas, descriptors, group_of, laid_out, leader, rank_of, send, weights
from tests.support.saboteurs import SaboteurHost
from tests.support.streams import Stream, completion
from tests.support.wait import eventually, remove_tree
from tests.support.worker_client import FrontClient, engine_request

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
LOGS = CACHE / "logs/test_tensor_parallel"
HANG_S = 1.5
SLOT = f"tensor_parallel = 2\nhang_limit_s = {HANG_S}\nkv_bytes = {32 << 20}\nmax_model_len = 512\n"
TOKENS = 120
LONG = completion(200, ignore_eos=True)
PROMPT = [(7 * i + 3) % 1000 for i in range(300)]  # it begins as the prompt that a worker warms up with
FRONT = 500  # client index of a front of ours, beside the router's
BODIES: dict[str, dict[str, Any]] = {
    "greedy": completion(TOKENS, ignore_eos=True),
    "seeded": completion(TOKENS, ignore_eos=True, temperature=0.9, seed=5),
}


@pytest.fixture(scope="module")
def host() -> Iterator[SaboteurHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    text = demo_config(ONE, free_port(), slots=1, extra_slot="@")
    text = text.replace(f'name = "{MODEL}"', f'name = "{MODEL}"\nupdate = "in_place"', 1)
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


@pytest.fixture(scope="module")
def at_rest(host: LocalHost, truth: dict[str, Any]) -> int:
    """Descriptors with main and shadow up, once for all faults: what each of them left would add up."""
    return min(descriptors(host) for _ in range(50))  # connections of a status come and go


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


@pytest.mark.parametrize(
    ("fault", "said"),
    [("rank digest", "owners failed"), ("FlushCache", "flush failed"), ("CheckOracle", "oracle failed")],
)
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


def test_the_weights_lie_in_two_parts_with_their_own_digests(host: LocalHost) -> None:
    host.until_protected()
    eventually(
        lambda: all(len(row.readers) == 2 for row in weights(host)), what="main and shadow read, each rank its part"
    )
    rows = weights(host)
    assert [(row.rank, row.state, row.version) for row in rows] == [(0, "sealed", 1), (1, "sealed", 1)]
    assert len({row.digest for row in rows}) == 2


# --- updates: the weights of the group change, of all ranks or of none ---


def greedy(host: LocalHost) -> Any:
    return facts(stream(host, "greedy").result(120))


def long_stream(host: LocalHost) -> Stream:
    made = Stream(host.status().router_url, "/v1/completions", LONG)
    made.start()
    eventually(lambda: len(made.seen.token_ids) >= 8, what="tokens")
    return made


def whole(made: Stream) -> None:
    """It came to its end, over the update."""
    seen = made.result(180)
    assert (seen.error, seen.errors, seen.finishes, seen.done) == (None, [], ["length"], 1)
    assert len(seen.token_ids) == LONG["max_tokens"]


@pytest.fixture(scope="module")
def truth_two(host: LocalHost, truth: dict[str, Any]) -> Any:
    """What the other weights say; the first ones are back afterwards."""
    before = slot(host.until_protected(), "slot0")
    version = publish(host, TWO)
    all_follow(host, version)
    assert [row.digest for row in weights(host)] == laid_out(host, TWO)
    said = greedy(host)
    assert said[0] != truth["greedy"][0]
    assert greedy(host) == said
    assert publish(host, ONE) == version + 1
    after = slot(all_follow(host, version + 1), "slot0")
    assert greedy(host) == truth["greedy"]
    assert [worker.pid for worker in after.workers] == [worker.pid for worker in before.workers], "nobody was restarted"
    return said


def other(host: LocalHost, truth: dict[str, Any], truth_two: Any) -> tuple[Path, Any]:
    """The weights that are not served now, and what they will say."""
    two = [row.digest for row in weights(host)] == laid_out(host, TWO)
    return (ONE, truth["greedy"]) if two else (TWO, truth_two)


def own(host: LocalHost) -> dict[str, str]:
    """Of a trainer's process on this host."""
    return {**os.environ, "BELAYER_ROOT": str(host.root), "PYTHONPATH": str(Path(__file__).parents[2])}


def updated(host: LocalHost, folder: Path, mode: str) -> None:
    """By the command; a stream goes on over it."""
    version = weights(host)[0].version
    running = long_stream(host)
    command = [sys.executable, "-m", "gpuowner.publish", MODEL, str(folder), "--mode", mode]
    done = subprocess.run(command, env=own(host), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{MODEL} v{version + 1} is served" in done.stdout
    all_follow(host, version + 1)
    assert [row.digest for row in weights(host)] == laid_out(host, folder)
    whole(running)


def test_an_update_in_place_is_of_all_ranks(host: LocalHost, truth: dict[str, Any], truth_two: Any) -> None:
    folder, said = other(host, truth, truth_two)
    updated(host, folder, "in_place")
    assert greedy(host) == said


@pytest.mark.parametrize(("when", "who"), [("before", "leader"), ("inside", "rank"), ("after", "leader")])
def test_a_group_killed_around_an_update_is_followed_by_one_on_the_new_version(
    host: LocalHost, truth: dict[str, Any], truth_two: Any, when: str, who: str
) -> None:
    """Before the first byte, among the bytes, after the commit: each rank of the shadow follows inside the gate."""
    folder, said = other(host, truth, truth_two)
    before = slot(host.until_protected(), "slot0")
    version, (_, pid) = weights(host)[0].version, leader(before)
    victim = rank_of(pid) if who == "rank" else pid
    running = long_stream(host)
    begin(host)
    paused(host)
    assert running.is_alive(), "no step is taken, so it goes on over the update"
    client = OwnerClient(host.paths.owner_sock("weights"), o.Role.LOADER, "test", timeout=120.0)
    if when == "before":
        send(victim, signal.SIGKILL)
    with begin_update(client, MODEL, whole=True) as update:
        if when == "inside":
            send(victim, signal.SIGKILL)
        update.write_folder(folder)
        update.commit()
    client.close()
    if when == "after":
        send(victim, signal.SIGKILL)
    end(host)
    after = slot(all_follow(host, version + 1), "slot0")
    assert after.generation == before.generation + 1
    assert greedy(host) == said
    whole(running)


def test_belayerd_killed_inside_an_update_brings_every_rank_along(
    host: LocalHost, truth: dict[str, Any], truth_two: Any
) -> None:
    folder, said = other(host, truth, truth_two)
    version = weights(host)[0].version
    running = long_stream(host)
    begin(host)
    paused(host)
    assert running.is_alive(), "no step is taken, so it goes on over the update"
    host.kill9("belayerd")
    client = OwnerClient(host.paths.owner_sock("weights"), o.Role.LOADER, "test", timeout=120.0)
    with begin_update(client, MODEL, whole=True) as update:
        update.write_folder(folder)
        update.commit()
    client.close()
    host.spawn("belayerd")
    all_follow(host, version + 1)
    assert greedy(host) == said
    whole(running)


def test_torn_parts_are_served_by_nobody_until_they_are_published_again(
    host: LocalHost, truth: dict[str, Any], truth_two: Any
) -> None:
    """R4, in place: the writer is gone with bytes of both parts written and none of them sealed."""
    folder, said = other(host, truth, truth_two)
    host.until_protected()
    version = weights(host)[0].version
    begin(host)
    client = OwnerClient(host.paths.owner_sock("weights"), o.Role.LOADER, "test", timeout=120.0)
    begin_update(client, MODEL, mode="in_place", whole=True).write_folder(folder)
    client.close()
    eventually(lambda: [row.state for row in weights(host)] == ["torn"] * 2, what="both parts are torn")
    with pytest.raises(WeightsTorn):
        end(host)
    waiting = stream(host, "greedy")
    send(rank_of(leader(slot(host.status(), "slot0"))[1]), signal.SIGKILL)
    held = host.until("its gate", lambda s: "owners: an update of" in slot(s, "slot0").reason, 120.0)
    assert slot(held, "slot0").state == "handover"
    assert waiting.seen.chunks == []
    client = OwnerClient(host.paths.owner_sock("weights"), o.Role.LOADER, "test", timeout=120.0)
    with begin_update(client, MODEL, whole=True) as update:
        update.write_folder(folder)
        update.commit()
    client.close()
    end(host)
    all_follow(host, version + 1)
    assert facts(waiting.result(120)) == said == greedy(host)


def test_a_rank_that_cannot_follow_takes_its_group_with_it(
    host: SaboteurHost, truth: dict[str, Any], truth_two: Any
) -> None:
    """The leader is at the new version, its rank is not: not one token is made by the two."""
    folder, said = other(host, truth, truth_two)
    before = slot(host.until_protected(), "slot0")
    version = weights(host)[0].version
    running = long_stream(host)
    with host.sabotage("rank follow"):
        assert publish(host, folder) == version + 1
    eventually((host.paths.run / "sabotage.begun").exists, what="the rank does not follow")
    (host.paths.run / "sabotage.begun").unlink()
    after = slot(all_follow(host, version + 1), "slot0")
    assert after.generation == before.generation + 1
    assert after.last_incident is not None
    assert (after.last_incident.cause, after.last_incident.outcome) == ("weights", "served")
    assert greedy(host) == said
    whole(running)


def test_what_a_flush_empties_is_computed_again_by_the_group(host: LocalHost) -> None:
    """The public call, an update and a handover: no block of before is found, and the tokens are those of before."""
    counts: list[int] = []

    def ask() -> list[int]:
        worker, _ = leader(slot(host.until_protected(), "slot0"))
        front = FrontClient(host.paths.worker_sock(worker), FRONT)
        request = engine_request(f"flush-{len(counts)}", PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True)
        made = front.generate(request)
        front.close()
        counts.append(cached(made))
        return made.tokens

    first = ask()
    assert ask() == first
    assert counts[0] == 0
    assert counts[1] >= 256, "without a flush all whole blocks are found"
    assert httpx.post(f"{host.status().router_url}/reset_prefix_cache").status_code == 200
    assert ask() == first
    assert counts[2] == 0
    again = TWO if [row.digest for row in weights(host)] == laid_out(host, TWO) else ONE
    all_follow(host, publish(host, again))
    assert ask() == first
    assert counts[3] == 0
    assert ctl(host, "handover", "slot0")[0] == 0
    assert ask() == first
    assert counts[4] == 0


def test_a_trainer_killed_before_its_commit_leaves_every_rank_where_it_was(
    host: LocalHost, truth: dict[str, Any], truth_two: Any
) -> None:
    folder, _ = other(host, truth, truth_two)
    now = truth_two if folder == ONE else truth["greedy"]
    version = weights(host)[0].version
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from belayer.paths import Paths\n"
        "from gpuowner.publish import publishing\n"
        f"with publishing(Paths(), {MODEL!r}, mode='swap', within_s=600.0) as update:\n"
        f"    update.write_folder(Path({str(folder)!r}))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", script], env=own(host), timeout=180, check=False)
    assert died.returncode == -signal.SIGKILL
    all_follow(host, version)
    assert weights(host)[0].state == "sealed"
    assert greedy(host) == now


def test_an_update_by_swap_is_of_all_ranks(host: LocalHost, truth: dict[str, Any], truth_two: Any) -> None:
    """The last test of this host: what came by a swap is sealed for ever, and nothing is written in place any more."""
    folder, said = other(host, truth, truth_two)
    updated(host, folder, "swap")
    assert greedy(host) == said
    before = slot(host.until_protected(), "slot0")
    send(leader(before)[1], signal.SIGKILL)
    host.until("the handover", lambda s: slot(s, "slot0").generation > before.generation, 120.0)
    assert greedy(host) == said, "each rank of the shadow had followed"
    with pytest.raises(Refused, match="came by a swap"):
        publish(host, ONE, "in_place")
    assert greedy(host) == said
