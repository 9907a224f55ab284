"""A slot of two tensor-parallel ranks over gloo fails over as one: whichever process dies or stands still, the stream
goes on with the tokens of the unfailed run, and nothing of the old group is left.

One host with one slot of two ranks serves all tests of this module. Each test leaves it protected.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from belayer import procs
from belayer.errors import Refused, WeightsTorn
from belayer.localhost import LocalHost, demo_config, free_port
from belayer.messages.control import HostStatusReply
from tests.e2e.test_kv_reuse import cached
from tests.e2e.test_trainer_group import Group
from tests.e2e.test_weight_updates import MODEL, ONE, TWO, begin, end, paused, publish
from tests.support.host_words import ctl, facts, slot
from tests.support.rank_host import all_follow, arenas, descriptors, group_of, laid_out, leader, rank_of, send, weights
from tests.support.rank_updates import abandoned, killed_before_its_commit, long_stream, mapped, updated, whole, writing
from tests.support.saboteurs import SaboteurHost
from tests.support.streams import Stream, completion
from tests.support.wait import eventually, remove_tree
from tests.support.worker_client import FrontClient, engine_request

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
LOGS = CACHE / "logs/test_tensor_parallel"
HANG_S = 3.0
SLOT = f"tensor_parallel = 2\nhang_limit_s = {HANG_S}\nkv_bytes = {32 << 20}\nmax_model_len = 512\n"
TOKENS = 120
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
    assert {name: facts(one.result()) for name, one in streams.items()} == truth

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
        300.0,
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
        assert {name: facts(one.result()) for name, one in streams.items()} == truth
    with host.sabotage(f"apart {how}"):
        eventually((host.paths.run / "sabotage.begun").exists, what="the rank goes its own way")
        host.until("the handover", lambda s: slot(s, "slot0").generation > before.generation, 300.0)
    (host.paths.run / "sabotage.begun").unlink()
    assert {name: facts(one.result()) for name, one in streams.items()} == truth

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
        ended = host.until("quarantine", lambda s: slot(s, "slot0").state == "quarantined", 300.0)
    reason = slot(ended, "slot0").reason
    assert reason.startswith(said), reason
    assert fault != "rank digest" or "(rank 1) maps version 1 (000000000000)" in reason
    eventually(lambda: all(not procs.lives(one) for one in group), what="both processes are dead")
    eventually(lambda: [row.state for row in arenas(host)] == ["quarantined"] * 2, what="both arenas")
    assert ctl(host, "restore", "slot0")[0] == 0
    host.until_protected()
    assert facts(stream(host, "greedy").result()) == truth["greedy"]


def test_the_ranks_are_shown(host: LocalHost) -> None:
    host.until_protected()

    def shown(status: HostStatusReply) -> bool:  # what belayerd looks at now and then
        workers = slot(status, "slot0").workers
        return all(
            [(row.rank, row.pid) for row in one.ranks] == [(1, rank_of(one.pid))] and one.ranks[0].rss_mb > 1
            for one in workers
        )

    host.until("the ranks", shown, 300.0)
    code, told, _ = ctl(host, "status")
    assert (code, len(told["host"]["slots"][0]["workers"][0]["ranks"])) == (0, 1)
    for one in told["host"]["slots"][0]["workers"]:  # a name in /dev/shm is left by who is killed
        for pid in (one["pid"], rank_of(one["pid"])):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert ("memfd:" in maps, "/dev/shm/" in maps) == (True, False)


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
    return facts(stream(host, "greedy").result())


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
    if when == "before":
        send(victim, signal.SIGKILL)
    with writing(host) as update:
        if when == "inside":
            send(victim, signal.SIGKILL)
        update.write_folder(folder)
        update.commit()
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
    with writing(host) as update:
        update.write_folder(folder)
        update.commit()
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
    abandoned(host, folder)
    eventually(lambda: [row.state for row in weights(host)] == ["torn"] * 2, what="both parts are torn")
    with pytest.raises(WeightsTorn):
        end(host)
    waiting = stream(host, "greedy")
    send(rank_of(leader(slot(host.status(), "slot0"))[1]), signal.SIGKILL)
    held = host.until("its gate", lambda s: "owners: an update of" in slot(s, "slot0").reason, 300.0)
    assert slot(held, "slot0").state == "handover"
    assert waiting.seen.chunks == []
    with writing(host) as update:
        update.write_folder(folder)
        update.commit()
    end(host)
    all_follow(host, version + 1)
    assert facts(waiting.result()) == said == greedy(host)


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
    assert httpx.post(f"{host.status().router_url}/reset_prefix_cache", timeout=300).status_code == 200
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
    killed_before_its_commit(host, folder)
    all_follow(host, version)
    assert weights(host)[0].state == "sealed"
    assert greedy(host) == now


def test_an_update_by_swap_is_of_all_ranks(host: LocalHost, truth: dict[str, Any], truth_two: Any) -> None:
    """From here on all is by swap: what came by one is sealed for ever, and nothing is written in place any more."""
    folder, said = other(host, truth, truth_two)
    updated(host, folder, "swap")
    assert greedy(host) == said
    before = slot(host.until_protected(), "slot0")
    send(leader(before)[1], signal.SIGKILL)
    host.until("the handover", lambda s: slot(s, "slot0").generation > before.generation, 300.0)
    assert greedy(host) == said, "each rank of the shadow had followed"
    with pytest.raises(Refused, match="came by a swap"):
        publish(host, ONE, "in_place")
    assert greedy(host) == said


@pytest.mark.parametrize("when", ["before the commit", "between two ranks"])
def test_a_group_killed_inside_a_swap_is_followed_by_one_on_the_sealed_version(
    host: SaboteurHost, truth: dict[str, Any], truth_two: Any, when: str
) -> None:
    """All is written and nothing sealed, so the last version goes on beside it; all is sealed and the leader has moved,
    its rank has not, so the next one serves, of all ranks. (Told of an update, belayerd lets nobody serve before its
    end: on a model that may be updated in place the writer could still choose that.)"""
    (folder, said), now = other(host, truth, truth_two), greedy(host)
    before = slot(host.until_protected(), "slot0")
    version, (_, pid) = weights(host)[0].version, leader(before)
    rank, running, begun = rank_of(pid), long_stream(host), host.paths.run / "sabotage.begun"
    if when == "between two ranks":
        begin(host)
        paused(host)
        assert running.is_alive(), "no step is taken, so it goes on over the update"
    with writing(host, "swap") as update:
        update.write_folder(folder)
        if when == "before the commit":
            send(rank, signal.SIGKILL)
            served = host.until("the handover", lambda s: slot(s, "slot0").generation > before.generation, 120.0)
            assert slot(served, "slot0").weight_version == version
            assert (weights(host)[0].state, greedy(host)) == ("updating", now)
        update.commit()
    if when == "between two ranks":
        with host.sabotage("rank hangs"), ThreadPoolExecutor(1) as pool:
            ended = pool.submit(end, host)
            eventually(begun.exists, what="the rank hangs before it moves")
            apart = {(0, pid): version + 1, (1, rank): version}
            eventually(lambda: apart.items() <= mapped(host).items(), what="its leader has moved")
            send(pid, signal.SIGKILL)
            ended.result(120)
        begun.unlink()
    after = slot(all_follow(host, version + 1), "slot0")
    assert after.generation == before.generation + 1
    assert greedy(host) == said
    whole(running)


def test_a_shadow_whose_ranks_attach_on_both_sides_of_a_commit_is_not_armed(
    host: SaboteurHost, truth: dict[str, Any], truth_two: Any
) -> None:
    """Its leader has the last version, its rank the next one. The one that is armed instead serves the next one."""
    folder, said = other(host, truth, truth_two)
    before = slot(host.until_protected(), "slot0")
    version, known = weights(host)[0].version, {pid for _, pid in mapped(host)}
    begun = host.paths.run / "sabotage.begun"

    def attached() -> list[int]:
        return [at for (rank, pid), at in mapped(host).items() if rank == 0 and pid not in known]

    with host.sabotage("late rank"):
        send(leader(before, "shadow")[1], signal.SIGKILL)
        eventually(lambda: begun.exists() and attached() == [version], what="its leader is attached, its rank is not")
        assert publish(host, folder, "swap") == version + 1
    begun.unlink()

    def refused(status: HostStatusReply) -> bool:
        view = slot(status, "slot0")
        assert not view.protected, "armed with a mix"
        return f"the ranks map weights of versions {version}, {version + 1}" in view.reason

    host.until("a shadow that is refused by name", refused, 120.0)
    after = slot(all_follow(host, version + 1), "slot0")
    assert (after.generation, greedy(host)) == (before.generation, said)
    send(leader(after)[1], signal.SIGKILL)
    host.until("the handover", lambda s: slot(s, "slot0").generation > after.generation, 120.0)
    assert greedy(host) == said


def test_row_51_a_trainer_updates_a_group_one_of_whose_ranks_dies_inside(
    host: LocalHost, truth: dict[str, Any], truth_two: Any
) -> None:
    """``Trainer.update``: what it wrote is served by all ranks of the shadow at its end; it is told so, and begins
    no other update before its word. (A model that may be updated in place is served by nobody else meanwhile.)"""
    folder, said = other(host, truth, truth_two)
    before = slot(host.until_protected(), "slot0")
    version = weights(host)[0].version
    with closing(Group(host)) as group:
        receiver = group.form(stop_after=5, mode="swap")
        group.trainer.tell("update", folder=str(folder))
        receiver.stopped()
        send(rank_of(leader(before)[1]), signal.SIGKILL)
        host.until("its gate", lambda s: "owners: an update of" in slot(s, "slot0").reason, 120.0)
        receiver.child.send_signal(signal.SIGCONT)
        assert group.trainer.answer() == {"said": version + 1}
        after = slot(all_follow(host, version + 1), "slot0")
        assert (after.generation, greedy(host)) == (before.generation + 1, said)
        assert group.trainer.ask("update", folder=str(folder))["error"] == "replacement_owed"
        assert group.trainer.ask("ack", generation=after.generation) == {"said": "acknowledged"}
        assert group.trainer.ask("replaced", within_s=0.0) == {"said": []}
