"""Weights change under engines that serve: streams go on, every worker follows, no failure leaves a pause behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from belayer import procs
from belayer.errors import WeightsTorn
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from belayer.messages.control import BeginWeightsUpdate, EndWeightsUpdate, HostStatusReply, WeightsUpdated
from belayer.messages.owner import OwnerStatus, OwnerStatusReply, Role, WeightsInfo
from belayer.rpc import call_sync
from benchmarks import tiny
from gpuowner.attach import OwnerClient
from gpuowner.publish import publishing
from gpuowner.update import begin_update
from tests.support.host_words import ctl, main_pid, pids, slot
from tests.support.patience import SLOT, patient
from tests.support.streams import Seen, Stream, completion
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

CACHE = Path(__file__).parents[2] / ".cache"
SMOL = CACHE / "models/SmolLM2-135M-Instruct"
ONE, TWO = (tiny.make(CACHE / f"models/belayer-tiny{suffix}", SMOL, seed) for suffix, seed in (("", 0), ("-two", 1)))
MODEL = "smollm2"
LONG = completion(500, ignore_eos=True)


@contextmanager
def hosting(update: str) -> Iterator[LocalHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    extra = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"
    config = patient(demo_config(ONE, free_port(), slots=1, extra_slot=SLOT, extra=extra))
    config = config.replace(f'name = "{MODEL}"', f'name = "{MODEL}"\nupdate = "{update}"', 1)
    host = LocalHost(root, config)
    try:
        host.start(ROLLOUT)
        host.until_protected()
        yield host
    finally:
        host.stop()
        shutil.copytree(host.paths.state / "log", CACHE / f"logs/test_weight_updates_{update}", dirs_exist_ok=True)
        remove_tree(root)


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    with hosting("swap") as made:
        yield made


def weights(host: LocalHost) -> WeightsInfo:
    return next(row for owner in host.status().owners for row in owner.weights)


def tokens(host: LocalHost) -> tuple[list[int], set[str]]:
    """(a short greedy answer, weight versions that its chunks name)."""
    stream = Stream(host.status().router_url, "/v1/completions", completion(24, ignore_eos=True))
    stream.start()
    seen = stream.result()
    assert seen.errors == []
    assert len(seen.token_ids) == 24
    return seen.token_ids, versions(seen)


def versions(seen: Seen) -> set[str]:
    return {str(chunk["weight_version"]) for chunk in seen.chunks if chunk.get("weight_version")}


def long_stream(host: LocalHost) -> Stream:
    stream = Stream(host.status().router_url, "/v1/completions", LONG)
    stream.start()
    eventually(lambda: len(stream.seen.token_ids) >= 8, what="tokens")
    return stream


def whole(stream: Stream) -> Seen:
    seen = stream.result()
    assert seen.error is None
    assert seen.errors == []
    assert (len(seen.token_ids), seen.finishes, seen.done) == (500, ["length"], 1)
    return seen


def all_follow(host: LocalHost, version: int) -> HostStatusReply:
    """Both workers read ``version`` and nothing is paused."""

    def fact(status: HostStatusReply) -> bool:
        rows = [row for owner in status.owners for row in owner.weights]
        reading = {reader.pid: reader.version for row in rows for reader in row.readers}
        mine = pids(status, "slot0")
        phases = [worker.phase for worker in slot(status, "slot0").workers]
        served = slot(status, "slot0").weight_version == version
        followed = len(mine) == 2 and all(reading.get(pid) == version for pid in mine)
        return served and followed and "paused" not in phases and slot(status, "slot0").protected

    return host.until(f"all at v{version}", fact, 300.0)


def publish(host: LocalHost, folder: Path, mode: str = "") -> int:
    with publishing(host.paths, MODEL, mode=mode) as update:
        update.write_folder(folder)
    return update.version


def begin(host: LocalHost, within_s: float = 60.0) -> WeightsUpdated:
    message = BeginWeightsUpdate(model=MODEL, within_s=within_s)
    return call_sync(host.paths.belayerd_sock, message, WeightsUpdated, 300.0)


def end(host: LocalHost) -> WeightsUpdated:
    return call_sync(host.paths.belayerd_sock, EndWeightsUpdate(model=MODEL), WeightsUpdated, 300.0)


def paused(host: LocalHost) -> None:
    def fact(status: HostStatusReply) -> bool:
        return [w.phase for w in slot(status, "slot0").workers if w.role == "main"] == ["paused"]

    host.until("a paused main", fact, 300.0)


def test_a_stream_goes_on_over_an_update_and_back(host: LocalHost) -> None:
    """The new weights serve, the old ones come back as they were, and a running request notices only in its tokens."""
    before = host.until_protected()
    first, _ = tokens(host)
    stream = long_stream(host)
    assert publish(host, TWO) == 2
    after = all_follow(host, 2)
    assert pids(after, "slot0") == pids(before, "slot0"), "nobody was restarted"
    second, _ = tokens(host)
    assert second != first
    assert tokens(host)[0] == second
    whole(stream)
    assert publish(host, ONE) == 3
    all_follow(host, 3)
    assert tokens(host)[0] == first
    code, incident, said = ctl(host, "handover", "slot0")
    assert code == 0, said
    assert incident["outcome"] == "served", "the shadow's oracle equals that of the new weights"
    assert tokens(host)[0] == first
    host.until_protected()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_an_update_under_a_pause_of_vllms_own(host: LocalHost, mode: str) -> None:
    """What RL frameworks do: /pause, publish, /resume. The engine takes up nothing that waits then, so the oracle of
    the new weights waited for itself until the main was taken for one that cannot follow."""
    before = host.until_protected()
    version, url = weights(host).version, host.status().router_url
    stream = long_stream(host) if mode == "keep" else None
    assert httpx.post(f"{url}/pause", params={"mode": mode}, timeout=300).status_code == 200
    told = len(stream.seen.token_ids) if stream else 0
    assert publish(host, TWO if version % 2 else ONE) == version + 1
    after = all_follow(host, version + 1)
    assert pids(after, "slot0") == pids(before, "slot0"), "nobody was replaced"
    assert stream is None or len(stream.seen.token_ids) - told <= 4, "paused"
    assert httpx.post(f"{url}/resume", timeout=300).status_code == 200
    tokens(host)
    if stream is not None:
        whole(stream)


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_a_main_killed_around_an_update_leaves_whole_weights(host: LocalHost, when: str) -> None:
    """Killed before the first byte, among the bytes, after the commit: the shadow serves the sealed version."""
    host.until_protected()
    version = weights(host).version
    victim = main_pid(host, "slot0")
    stream = long_stream(host)
    begin(host)
    paused(host)

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: not procs.lives(victim), what="the main is dead")

    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=300.0)
    if when == "before":
        kill()
    with begin_update(client, MODEL, whole=True) as update:
        if when == "inside":
            kill()
        update.write_folder(TWO if version % 2 else ONE)
        update.commit()
    client.close()
    if when == "after":
        kill()
    end(host)
    all_follow(host, version + 1)
    whole(stream)


def test_a_trainer_that_dies_leaves_no_pause_behind(host: LocalHost) -> None:
    """SIGKILL of the writer among the bytes (swap): the last version goes on by itself, long before the time that the
    trainer had asked for is over."""
    host.until_protected()
    version = weights(host).version
    stream = long_stream(host)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from belayer.paths import Paths\n"
        "from gpuowner.publish import publishing\n"
        f"with publishing(Paths(), {MODEL!r}, within_s=600.0) as update:\n"
        f"    update.write_folder(Path({str(TWO)!r}))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "BELAYER_ROOT": str(host.root), "PYTHONPATH": str(Path(__file__).parents[2])}
    died = subprocess.run([sys.executable, "-c", script], env=env, timeout=300, check=False)
    assert died.returncode == -signal.SIGKILL
    all_follow(host, version)
    assert weights(host).state == "sealed"
    log = host.paths.log("belayerd")
    eventually(lambda: "brought to the sealed weights" in log.read_text(), what="belayerd says what it did")
    whole(stream)


def test_belayerd_killed_inside_an_update_finds_the_pause_again(host: LocalHost) -> None:
    host.until_protected()
    version = weights(host).version
    stream = long_stream(host)
    begin(host)
    paused(host)
    host.kill9("belayerd")
    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=300.0)
    with begin_update(client, MODEL, whole=True) as update:
        update.write_folder(TWO if version % 2 else ONE)
        update.commit()
    client.close()
    host.spawn("belayerd")
    all_follow(host, version + 1)
    whole(stream)


def test_in_place_a_dead_writer_leaves_torn_weights_that_nobody_serves() -> None:
    """R4: the mains stay paused and requests wait, a main that dies meanwhile is not replaced by one on torn bytes, and
    publishing again brings everything back."""
    with hosting("in_place") as host:
        first, _ = tokens(host)
        begin(host)
        client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=300.0)
        update = begin_update(client, MODEL, mode="in_place", whole=True)
        update.write_folder(TWO)
        client.close()  # the writer is gone, nothing was committed
        eventually(lambda: owner_state(host) == "torn", what="TORN")
        with pytest.raises(WeightsTorn):
            end(host)
        victim = main_pid(host, "slot0")
        waiting = Stream(host.status().router_url, "/v1/completions", completion(24, ignore_eos=True))
        waiting.start()
        os.kill(victim, signal.SIGKILL)
        host.until("the handover", lambda s: slot(s, "slot0").state == "handover", 300.0)
        held = host.until("its gate", lambda s: "owners: an update of" in slot(s, "slot0").reason, 300.0)
        assert slot(held, "slot0").state == "handover"
        assert waiting.seen.chunks == []
        assert publish_again(host, ONE) == 2
        all_follow(host, 2)
        assert waiting.result().token_ids == first
        assert tokens(host)[0] == first


def owner_state(host: LocalHost) -> str:
    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test")
    try:
        return client.call(OwnerStatus(), OwnerStatusReply)[0].weights[0].state
    finally:
        client.close()


def publish_again(host: LocalHost, folder: Path) -> Any:
    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=300.0)
    with begin_update(client, MODEL, mode="in_place", whole=True) as update:
        update.write_folder(folder)
        update.commit()
    client.close()
    end(host)
    return update.version
