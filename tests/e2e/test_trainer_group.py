"""Conformance row 51: a trainer with a gloo group into the host, and a main that dies inside its update."""

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
from belayer.localhost import ROLLOUT, LocalHost, demo_config, free_port
from benchmarks import tiny
from tests.e2e.test_weight_updates import CACHE, MODEL, SMOL, all_follow, publish, tokens, weights
from tests.support.host_words import ctl, main_pid, slot
from tests.support.patience import SLOT, patient
from tests.support.trainer_group import Process
from tests.support.wait import eventually, remove_tree

pytestmark = pytest.mark.engine

ONE, TWO = (tiny.make(CACHE / f"models/belayer-tiny{suffix}", SMOL, seed) for suffix, seed in (("", 0), ("-two", 1)))


@pytest.fixture(scope="module")
def host() -> Iterator[LocalHost]:
    root = Path(tempfile.mkdtemp(prefix="bl-"))
    extra = "[policy]\nrepeat_window_s = 0.001\n[envkeeper]\nenabled = false\n"
    host = LocalHost(root, patient(demo_config(ONE, free_port(), slots=1, extra_slot=SLOT, extra=extra)))
    try:
        host.start(ROLLOUT)
        host.until_protected()
        yield host
    finally:
        host.stop()
        shutil.copytree(host.paths.state / "log", CACHE / "logs/test_trainer_group", dirs_exist_ok=True)
        remove_tree(root)


class Group:
    """A trainer, and its receiver of the moment; each group has a store of its own."""

    def __init__(self, host: LocalHost) -> None:
        self.host = host
        self.trainer = Process(host.root, "trainer", MODEL)
        self.receiver: Process | None = None
        self.members = self.trainer.answer()["said"]

    def form(self, stop_after: int = -1, mode: str = "") -> Process:
        """``mode``: of the update that the receiver opens."""
        if self.receiver is not None:
            self.receiver.kill()
            assert self.trainer.ask("leave") == {"said": "left"}
        store = Path(tempfile.mkdtemp(dir=self.host.root)) / "store"  # one that was used leads to members that are gone
        self.receiver = Process(self.host.root, "receiver", MODEL, str(store), str(stop_after), str(ONE), mode)
        assert self.trainer.ask("join", store=str(store)) == {"said": "joined"}
        return self.receiver

    def close(self) -> None:
        self.trainer.kill()
        if self.receiver is not None:
            self.receiver.kill()


@pytest.fixture
def group(host: LocalHost) -> Iterator[Group]:
    made = Group(host)
    yield made
    made.close()


def generation(host: LocalHost) -> int:
    return slot(host.status(), "slot0").generation


def kill_main(host: LocalHost) -> None:
    victim = main_pid(host, "slot0")
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: not procs.lives(victim), what="the main is dead")


def worker(host: LocalHost) -> str:
    return next(w.worker_id for w in slot(host.status(), "slot0").workers if w.role == "main")


def reborn(host: LocalHost) -> None:
    host.kill9("belayerd")
    host.spawn("belayerd")
    host.until_protected()


@pytest.mark.parametrize("member", ["stopped", "killed"])
def test_row_51_main_killed_inside_an_update_and_the_group_is_made_anew(
    host: LocalHost, group: Group, member: str
) -> None:
    """The collective would hang (its member stopped) or fail (killed); the trainer is told which main serves instead,
    once, over two deaths of belayerd, may update only after its word, and the promoted engine serves that update."""
    host.until_protected()
    born, version = generation(host), weights(host).version
    assert group.members == [["slot0", born, worker(host)]]
    receiver = group.form(stop_after=5)
    group.trainer.tell("update", folder=str(TWO))
    receiver.stopped()
    kill_main(host)
    if member == "killed":
        receiver.kill()
    failed = group.trainer.answer()
    assert failed["error"] == "member_replaced", failed
    assert "ack" in failed["remedy"]
    host.until_protected()
    told = [["slot0", born, born + 1, worker(host), version]]
    assert group.trainer.ask("replaced", within_s=0.0) == {"said": told}

    group.form()
    refused = group.trainer.ask("update", folder=str(TWO))
    assert refused["error"] == "replacement_owed", refused
    assert f"generation {born + 1} of slot0" in refused["message"]
    assert "belayerctl trainers --forget" in refused["remedy"]
    assert slot(host.status(), "slot0").protected
    reborn(host)
    assert group.trainer.ask("replaced", within_s=0.0) == {"said": told}, "told again until acknowledged"

    assert group.trainer.ask("ack", generation=born + 1) == {"said": "acknowledged"}
    reborn(host)
    assert group.trainer.ask("replaced", within_s=0.0) == {"said": []}, "acknowledged is never told again"
    before, _ = tokens(host)
    done = group.trainer.ask("update", folder=str(TWO))
    assert done == {"said": version + 1}
    all_follow(host, version + 1)
    after, served = tokens(host)
    assert served in ({str(version + 1)}, set())
    assert generation(host) == born + 1
    assert after != before
    assert publish(host, ONE) == version + 2
    all_follow(host, version + 2)


def test_row_51_a_second_replacement_before_the_ack_is_told_in_order(host: LocalHost, group: Group) -> None:
    """Acknowledged by generation: the first leaves the second standing; a stale word is fenced. Nothing hangs when the
    trainer itself is killed."""
    born = generation(host)
    for _ in range(2):
        host.until_protected()
        code, incident, said = ctl(host, "handover", "slot0")
        assert (code, incident["outcome"]) == (0, "served"), said
    told: list[list[Any]] = group.trainer.ask("replaced", within_s=30.0)["said"]
    assert [row[1:3] for row in told] == [[born, born + 1], [born + 1, born + 2]]
    assert group.trainer.ask("ack", generation=born + 1) == {"said": "acknowledged"}
    assert group.trainer.ask("update", folder=str(TWO))["error"] == "replacement_owed"
    assert group.trainer.ask("ack", generation=born + 3)["error"] == "refused"
    code, rows, _ = ctl(host, "trainers")
    assert (code, [[e["new_generation"] for e in row["owed"]] for row in rows]) == (0, [[born + 2]])
    assert group.trainer.ask("ack", generation=born + 2) == {"said": "acknowledged"}
    assert group.trainer.ask("ack", generation=born + 1)["error"] == "fenced"
    host.until_protected()
    code, _, said = ctl(host, "handover", "slot0")
    assert code == 0, said
    assert group.trainer.ask("update", folder=str(TWO))["error"] == "replacement_owed"
    group.trainer.kill()
    assert publish(host, ONE) > 0, "a trainer that has ended holds nobody up"
