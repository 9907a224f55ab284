"""A whole host whose router has two fronts, with real engines: streams through both while a main, a front and the
router are killed, and while weights are updated; ids, limits, metrics and admin calls are one, whichever front is
asked; deaths of fronts are told like other failures.

One host serves all tests, in their order. While a trainer's pause holds the engine, what is under way stays under way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from belayer import procs
from belayer.clock import wall
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.common import FaultProof
from belayer.messages.control import EndWeightsUpdate, HostStatusReply, WeightsUpdated
from belayer.messages.owner import Role
from belayer.messages.router import InjectFrontFault
from belayer.rpc import call_sync
from gpuowner.attach import OwnerClient
from gpuowner.update import begin_update
from tests.e2e import test_weight_updates as updates
from tests.support import fronts
from tests.support.host_words import ctl
from tests.support.patience import SLOT, patient
from tests.support.streams import Seen, Stream, completion, tokens_in
from tests.support.told_versions import NORM, misfits, norm_of, spans
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

MODEL = Path(__file__).parents[2] / ".cache/models/SmolLM2-135M-Instruct"
LOGS = Path(__file__).parents[2] / ".cache/logs/test_fronts"
TOKENS, LIVE = 100, 8
LONG = 96  # an update begins after its first tokens
WINDOW_S = 20.0  # of repeated failures


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    port = free_port()
    alert = f"['sh', '-c', 'cat >>{root}/alerts; echo >>{root}/alerts']"
    policy = f"[policy]\nrepeat_window_s = {WINDOW_S}\nalert_command = {alert}\n"
    text = demo_config(MODEL, port, slots=1, extra_slot=SLOT, extra=f"{policy}[envkeeper]\nenabled = false\n")
    text = text.replace("[router]\n", f"[router]\nfronts = 2\nmax_requests = {LIVE}\n", 1)
    host = LocalHost(root, patient(text))
    try:
        host.start(ROLLOUT)
        host.until_protected()
        yield host
    finally:
        host.stop()
        shutil.copytree(host.paths.state / "log", LOGS, dirs_exist_ok=True)
        remove_tree(root)


@pytest.fixture(scope="module")
def url(host: LocalHost) -> str:
    return host.status().router_url


@pytest.fixture(scope="module")
def truth(url: str) -> Seen:
    seen = [ended(begun(stream(url))) for _ in range(2)]
    assert seen[0].token_ids == seen[1].token_ids
    assert len(seen[0].token_ids) == TOKENS
    return seen[0]


def stream(url: str, name: str = "", position: int | None = None) -> Stream:
    headers = {"x-request-id": name} if name else {}
    if position is not None:
        headers["x-belayer-position"] = str(position)
    return Stream(url, "/v1/completions", completion(TOKENS, ignore_eos=True), headers)


def begun(one: Stream) -> Stream:
    one.start()
    return one


def ended(one: Stream) -> Seen:
    seen = one.result(600)
    assert (seen.error, seen.errors, seen.done) == (None, [], 1)
    return seen


def same(one: Stream, truth: Seen) -> None:
    seen = ended(one)
    assert (seen.token_ids, seen.text, seen.finishes) == (truth.token_ids, truth.text, truth.finishes)
    assert (seen.usages, seen.roles) == (truth.usages, truth.roles)


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    eventually(lambda: procs.is_dead(pidfd), what=f"death of {pid}")
    os.close(pidfd)


def main_pid(host: LocalHost) -> int:
    return next(worker.pid for worker in host.status().slots[0].workers if worker.role == "main")


def pause(client: httpx.Client, mode: str = "keep") -> None:
    assert client.post("/pause", params={"mode": mode}).status_code == 200


def resume(client: httpx.Client) -> None:
    assert client.post("/resume").status_code == 200


@contextmanager
def at_each(url: str) -> Iterator[dict[int, httpx.Client]]:
    """A client whose connection is at one front, for each front, by its pid. Engines run when it ends."""
    found = fronts.clients(url)
    try:
        yield found
    finally:
        assert httpx.post(f"{url}/resume", timeout=300).status_code == 200
        for client in found.values():
            client.close()


def flowing(*streams: Stream) -> None:
    eventually(lambda: all(len(one.seen.token_ids) >= 8 for one in streams), within=300, what="tokens on every stream")
    assert all(one.is_alive() for one in streams), "a stream ended before the fault"


def test_streams_through_both_fronts_outlive_the_main(host: LocalHost, url: str, truth: Seen) -> None:
    before = host.until_protected().slots[0].generation
    dead = main_pid(host)
    with at_each(url) as clients:
        first, second = clients.values()
        pause(first)
        served = fronts.one_on_each(url, lambda: stream(url))
        assert all(fronts.is_front(one.pid, host.pid("belayer-router")) for one in served)
        resume(second)
        flowing(*(one.stream for one in served))
        kill(dead)
        for one in served:
            same(one.stream, truth)
    assert host.until_protected().slots[0].generation > before


def test_while_paused_ids_limits_metrics_and_health_are_one(url: str, truth: Seen) -> None:
    """Paused by one front, asked at both, resumed by the other."""
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    mine = {"x-request-id": "mine"}
    with at_each(url) as clients:
        first, second = clients.values()
        pause(first)
        streams = [fronts.begin(url, lambda: stream(url, "mine")).stream]
        for client in clients.values():
            assert client.get("/is_paused").json() == {"is_paused": True}
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json=body, headers=mine).status_code == 409
        while len(streams) < LIVE:
            streams.append(fronts.begin(url, lambda: stream(url)).stream)
        for client in clients.values():
            answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        texts = [client.get("/metrics").text for client in clients.values()]
        for name in ("belayer_requests_total", 'belayer_requests_declined_total{reason="too_many_requests"}'):
            values = [row for text in texts for row in text.splitlines() if row.startswith(f"{name} ")]
            assert len(values) == 2
            assert values[0] == values[1]
        infos = [client.get("/weight_info").json() for client in clients.values()]
        assert infos[0] == infos[1]
        resume(second)
        for one in streams:
            same(one, truth)
        assert first.get("/is_paused").json() == {"is_paused": False}
        for client in clients.values():
            assert client.post("/reset_prefix_cache").status_code == 200
            whole = client.post(
                "/v1/completions", json=body | {"return_token_ids": True}, headers=mine | {"x-belayer-position": "0"}
            )
            assert whole.json()["choices"][0]["token_ids"] == truth.token_ids


def aborted(url: str) -> float:
    row = next(row for row in fronts.metrics(url).splitlines() if row.startswith("belayer_requests_aborted_total "))
    return float(row.split()[1])


def test_a_front_is_killed_and_only_its_streams_break(url: str, truth: Seen) -> None:
    before = aborted(url)
    with at_each(url) as clients:
        pause(next(iter(clients.values())))
        named = fronts.begin(url, lambda: stream(url, "goes-on"))
        others = fronts.one_on_each(url, lambda: stream(url))
        resume(clients[named.pid])
        flowing(named.stream, *(one.stream for one in others))
        kill(named.pid)
    for one in (named, *others):
        if one.pid == named.pid:
            assert one.stream.result().error is not None
        else:
            same(one.stream, truth)
    eventually(
        lambda: len([pid for pid in fronts.serving(url) if pid != named.pid]) == 2, within=300, what="a new front"
    )
    rest = fronts.begin(url, lambda: stream(url, "goes-on", named.stream.seen.position))
    assert rest.pid != named.pid
    seen = ended(rest.stream)
    assert named.stream.seen.token_ids + seen.token_ids == truth.token_ids
    assert named.stream.seen.text + seen.text == truth.text
    broken = [one for one in others if one.pid == named.pid]
    assert broken
    eventually(lambda: aborted(url) - before == len(broken), what="those without an id ended in the engine")


def test_deaths_of_fronts_are_in_status_and_incidents_and_a_repeated_one_is_an_alert(host: LocalHost) -> None:
    before = host.until("two fronts", served_by_two, 300.0).fronts
    code, proof, said = ctl(host, "inject", "kill-front", "0")
    assert code == 0, said
    second = call_sync(host.paths.router_sock, InjectFrontFault(front=1, kind="kill"), FaultProof, 300.0)
    assert [proof["pid"], second.pid] == [row.pid for row in before]
    assert all("pidfd readable" in said for said in (proof["seen"], second.seen))

    def back(status: HostStatusReply) -> bool:
        return served_by_two(status) and [row.restarts for row in status.fronts] == [row.restarts + 1 for row in before]

    after = host.until("two others", back, 300.0).fronts
    assert not {row.pid for row in before} & {row.pid for row in after}
    lives = {f"front-{row.deaths[-1].life}": row.front for row in after}

    def written() -> list[Any]:
        rows = [row for row in ctl(host, "incidents")[1] if row["incident_id"] in lives]
        return rows if [row["outcome"] for row in rows] == ["served"] * 2 else []

    for row in eventually(written, what="both ends are written"):
        assert (row["slot"], row["cause"]) == (f"router/front{lives[row['incident_id']]}", "death")
        assert row["injected"]
        assert "SIGKILL" in row["detail"]
        assert [step["step"] for step in row["steps"]] == ["1 let go", "2 forked", "3 serves"]
        assert row["to_generation"] == row["from_generation"] + 1
    (alert,) = eventually(lambda: front_alerts(host), what="an alert")
    assert f"{WINDOW_S:g} s before: killed by signal 9" in alert["reason"]
    host.until("a healthy host", lambda status: status.healthy, 300.0)
    shown = subprocess.run(
        [sys.executable, "-m", "belayerctl", "status"],
        env={**os.environ, "BELAYER_ROOT": str(host.root)}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "alive since" in shown.stdout
    assert all(f"front {row.front}: last death" in shown.stdout for row in after)


def front_alerts(host: LocalHost) -> list[dict[str, Any]]:
    """What the alert command was given of fronts."""
    path = host.root / "alerts"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    alerts = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    return [one for one in alerts if one["state"] == "front"]


def served_by_two(status: HostStatusReply) -> bool:
    return [row.state for row in status.fronts] == ["serving"] * 2


def test_the_router_is_killed_with_all_its_fronts_and_comes_back(host: LocalHost, url: str, truth: Seen) -> None:
    with at_each(url) as clients:
        pause(next(iter(clients.values())))
        served = fronts.begin(url, lambda: stream(url, "over"))
        resume(next(iter(clients.values())))
        flowing(served.stream)
        pids = [os.pidfd_open(pid) for pid in clients]
        host.kill9("belayer-router")
        eventually(lambda: all(procs.is_dead(pidfd) for pidfd in pids), what="its fronts are dead")
        for pidfd in pids:
            os.close(pidfd)
        assert served.stream.result().error is not None
        host.spawn("belayer-router")
        host.until_protected()
        eventually(lambda: healthy(url), within=300, what="the engine is known to the new router", every=0.1)
        rest = begun(stream(url, "over", served.stream.seen.position))
        assert served.stream.seen.token_ids + ended(rest).token_ids == truth.token_ids
        assert not set(fronts.serving(url)) & set(clients)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=300).status_code == 200
    except httpx.HTTPError:
        return False


def prompt_of(number: int) -> list[int]:
    return [504, 2, 3, 4, 100 + number]


def generated(url: str, number: int, position: int | None = None) -> Stream:
    """Tokens in, tokens out: its last chunk names the weight version of every token."""
    headers = {"x-request-id": f"updated-{number}"}
    if position is not None:
        headers["x-belayer-position"] = str(position)
    body = tokens_in(LONG, ignore_eos=True) | {"token_ids": prompt_of(number)}
    return Stream(url, "/inference/v1/generate", body, headers)


def at_both(url: str) -> list[fronts.Served]:
    """Streams that begin at both fronts and are held while they begin; the n-th has prompt n."""
    pids = fronts.serving(url)
    return [fronts.begin(url, partial(generated, url, number), pid) for number, pid in enumerate((*pids, pids[0]))]


@contextmanager
def writing(host: LocalHost, norm: Any) -> Iterator[int]:
    """The engine stands still inside, and goes on with the next version after it, which this yields."""
    updates.begin(host, 300.0)
    updates.paused(host)
    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=300.0)
    try:
        with begin_update(client, updates.MODEL) as update:
            yield update.version
            update.write({NORM: norm})
            update.commit()
    finally:
        client.close()
        call_sync(host.paths.belayerd_sock, EndWeightsUpdate(model=updates.MODEL), WeightsUpdated, 300.0)


def other_norm(host: LocalHost) -> Any:
    """Of the version that is not served now: the first one's, or one of another order."""
    norm = norm_of(MODEL)
    return np.roll(norm, 7) if updates.weights(host).version % 2 else norm


def whole(seen: Seen, *before: Seen) -> list[int]:
    """Its tokens, with those of the parts before it."""
    assert (seen.error, seen.errors, seen.done, seen.finishes) == (None, [], 1, ["length"])
    tokens = [token for part in (*before, seen) for token in part.token_ids]
    assert (len(tokens), seen.usages[0]["completion_tokens"], len(seen.usages)) == (LONG, LONG, 1)
    return tokens


def window_is_over(host: LocalHost) -> None:
    """Since the last handover: the next failure is none that repeats."""
    last = host.until_protected().slots[0].last_incident
    ended = last.at + last.total_ms / 1e3 if last else 0.0
    eventually(lambda: wall() > ended + WINDOW_S + 1, what="it is over", every=0.1)


def changed(url: str, number: int, old: int, new: int, *parts: Seen) -> None:
    """Its first tokens are of ``old``, the rest of ``new``, which is served now and would have said the same rest."""
    tokens = whole(parts[-1], *parts[:-1])
    (first, _, bound), (second, _, _) = spans(*parts)
    assert (first, second) == (old, new)
    wrong = misfits(url, prompt_of(number), tokens)
    assert [at for at in wrong if at >= bound] == []
    assert wrong, "the other version says something else, or this would have shown nothing"


def test_weights_change_under_streams_of_both_fronts_while_the_main_is_killed(host: LocalHost, url: str) -> None:
    window_is_over(host)
    generation, old, norm = host.status().slots[0].generation, updates.weights(host).version, other_norm(host)
    with at_each(url) as clients:
        pause(next(iter(clients.values())))
        served = at_both(url)
        resume(next(iter(clients.values())))
        flowing(*(one.stream for one in served))
        with writing(host, norm) as new:
            assert all(one.stream.is_alive() for one in served), "they ended before the update"
            kill(main_pid(host))
        seen = [one.stream.result(600) for one in served]
    updates.all_follow(host, new)
    for number, one in enumerate(seen):
        changed(url, number, old, new, one)
        assert {chunk["belayer"]["generation"] for chunk in one.chunks} == {generation, generation + 1}


def test_weights_change_while_a_front_is_killed_and_its_client_goes_on_at_another(host: LocalHost, url: str) -> None:
    old, norm = updates.weights(host).version, other_norm(host)
    with at_each(url) as clients:
        pause(next(iter(clients.values())))
        served = at_both(url)
        resume(next(iter(clients.values())))
        flowing(*(one.stream for one in served))
        victim = served[0].pid
        with writing(host, norm) as new:
            assert all(one.stream.is_alive() for one in served), "they ended before the update"
            kill(victim)
    updates.all_follow(host, new)
    for number, one in enumerate(served):
        parts = [one.stream.result(600)]
        if one.pid == victim:
            assert parts[0].error is not None
            parts.append(begun(generated(url, number, parts[0].position)).result(600))
        changed(url, number, old, new, *parts)
