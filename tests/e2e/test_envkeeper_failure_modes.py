"""The five ways in which a correct rollback still goes wrong (secure checkpoint and rollback of agents): each is
refused, prevented, or in the restore's record; none is silent. Each has a control: the danger is real."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from belayer.errors import BelayerError, CheckpointRefused, Fenced, SandboxLost
from belayer.messages.sandbox import RestoreInfo
from belayer.sandbox import Sandbox
from envkeeper import upper
from envkeeper.aftermath import judge
from envkeeper.recipe import Recipe
from tests.support.envhost import EnvHost
from tests.support.ran import ran
from tests.support.wait import eventually

IMAGE = "belayer-sandbox:base"

LOG = """python3 - <<'P' >/dev/null 2>&1 &
f = open("/log", "w"); n = 0
while True:
    n += 1; f.write(f"{n}\\n"); f.flush()
P
until [ -s /log ]; do :; done
"""
GAP = "awk '$1 != NR { exit 1 }' /log && echo none || echo gap"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("modes"))
    yield found
    found.stop()


def upper_of(host: EnvHost, box: Sandbox) -> Path:
    client = docker.APIClient(timeout=300)
    try:
        seen = client.inspect_container(host.info(box.sandbox_id).container_id)
    finally:
        client.close()
    return Path(seen["GraphDriver"]["Data"]["UpperDir"])


@pytest.mark.docker
def test_1_incomplete_state_is_refused(host: EnvHost, box: Sandbox) -> None:
    """A process that no dump of PID 1's tree carries. Control: it really is in the sandbox and outside of that tree."""
    box.exec("X=1")
    client = docker.APIClient(timeout=300)
    try:
        made = client.exec_create(host.info(box.sandbox_id).container_id, ["sleep", "1000"])["Id"]
        client.exec_start(made, detach=True)
        eventually(lambda: client.exec_inspect(made)["Running"], what="the exec runs")
        until = "until pgrep -x sleep >/dev/null; do :; done"  # started is more than that: it may still be runc
        assert box.exec(f"{until}; ps -o ppid= -C sleep", timeout_s=60).stdout.split() == ["0"]
        with pytest.raises(CheckpointRefused, match="foreign_process"):
            box.checkpoint()
    finally:
        client.close()
    assert box.checkpoints().checkpoints == ()
    assert host.info(box.sandbox_id).state == "running"


@pytest.mark.docker
def test_2_inconsistent_state_cannot_be_captured(host: EnvHost, box: Sandbox, tmp_path: Path) -> None:
    """File and memory are of one instant: the log goes on without a gap. Control: the same layer copied unfrozen, after
    or before the memory was, has one."""
    box.exec(LOG)
    for _ in range(2):
        box.checkpoint()
        box.kill()
        box.restore()
        assert box.exec(f"n=$(wc -l < /log); until [ $(wc -l < /log) -gt $n ]; do :; done; {GAP}").stdout == "none\n"
    # Unfrozen: what the process counts when it is asked is not what a copy of its file holds.
    box.exec("n=$(wc -l < /log); until [ $(wc -l < /log) -gt $((n + 1000)) ]; do :; done")
    layer = upper_of(host, box)
    (tmp_path / "early").mkdir()
    upper.write_index(upper.capture(layer, tmp_path / "early"), tmp_path / "early")
    manifest = box.checkpoint()
    folder = host.paths.checkpoints / box.sandbox_id / "ck" / manifest.checkpoint_id
    frozen, early = tmp_path / "frozen", tmp_path / "unfrozen"
    for source, target in ((folder, frozen), (tmp_path / "early", early)):
        target.mkdir()
        upper.unpack(source, target)
    lines = [len((tree / "log").read_text().splitlines()) for tree in (frozen, early)]
    assert lines[1] < lines[0], "the unfrozen copy is of an earlier instant than the memory: its log would have a gap"
    assert _continued(early / "log", lines[0] + 1) == "gap"
    assert _continued(frozen / "log", lines[0] + 1) == "none"


def _continued(log: Path, following: int) -> str:
    """``log`` after the process has appended the number that it holds in memory."""
    with log.open("a") as file:
        file.write(f"{following}\n")
    words = GAP.replace("/log", str(log))
    return ran("sh", "-c", words).strip()


@pytest.mark.docker
def test_3_stale_dependencies_are_in_the_record(host: EnvHost) -> None:
    """The clock jumped, a credential expired, the tag names another image."""
    ended, valid = (token(time.time() + more) for more in (-1, 86400))
    client, tag = docker.APIClient(timeout=300), "belayer-test-moving:tag"
    try:
        old = client.inspect_image(IMAGE)["Id"]
        client.tag(IMAGE, "belayer-test-moving", "tag")
        box = Sandbox.create(tag, env={"TOKEN": ended, "FRESH": valid, "OTHER": "a.b.c"}, paths=host.paths)
        first = box.checkpoint()
        box.kill()
        assert _kinds(box.restore_info()) == ["expired_credential"]
        other = client.create_container(IMAGE, "true")["Id"]
        new = client.commit(other, "belayer-test-moving", "tag")["Id"]
        client.remove_container(other)
        assert client.inspect_image(tag)["Id"] == new != old
        box.kill()
        back = box.restore_info()
        assert back.checkpoint_id == first.checkpoint_id
        assert back.clock_gap_s >= 0
        assert _kinds(back) == ["expired_credential", "changed_image"]
        assert "TOKEN" in back.stale[0]
        assert ended.split(".")[1] not in str(back.stale), "the record names a credential and never shows it"
        assert old in back.stale[1]
        assert client.inspect_container(back.container_id)["Image"] == old, "restored from what was captured"
        box.destroy()
        client.remove_image(tag)
    finally:
        client.close()


@pytest.mark.docker
def test_4_nothing_is_replayed(host: EnvHost, box: Sandbox) -> None:
    """An action that draws at random dies unobserved: its fate is unknown, no part of it is seen again, and only a new
    generation may act. Control: run twice, it draws differently."""
    draw = "head -c 16 /dev/urandom | sha256sum"
    assert box.exec(draw).stdout != box.exec(draw).stdout
    box.checkpoint()
    boundary, told = box.boundary, list[BelayerError]()
    stale = Sandbox.attach(box.sandbox_id, paths=host.paths)

    def act() -> None:
        try:
            stale.exec(f"{draw} > /drawn; sleep 1000", timeout_s=900)
        except BelayerError as why:
            told.append(why)

    thread = threading.Thread(target=act)
    thread.start()
    root = f"/proc/{host.info(box.sandbox_id).pid}/root"
    eventually(lambda: Path(f"{root}/drawn").exists(), what="the action has drawn")
    box.kill()
    thread.join(120)
    assert [type(why) for why in told] == [SandboxLost], told
    assert box.restore()[0] == boundary
    assert box.exec("cat /drawn 2>/dev/null; echo nothing").stdout == "nothing\n"
    with pytest.raises(Fenced):
        stale.exec("true")  # the same request again, as a retry would send it
    stale.close()


@pytest.mark.docker
def test_5_effects_outside_cannot_happen_or_are_in_the_record(box: Sandbox) -> None:
    """Without egress an action has no way out; with it, the record says what is not undone."""
    seen = box.exec("cat < /dev/tcp/10.0.0.1/80; cat < /dev/tcp/169.254.169.254/80; ls /sys/class/net")
    assert seen.stdout == "lo\n"
    assert seen.stderr.count("connect: Network is unreachable") == 2
    box.checkpoint()
    box.kill()
    assert box.restore_info().stale == ()


def test_5_with_egress_the_record_names_what_is_not_undone() -> None:
    recipe = Recipe(
        image_id="i", agent="a", hostname="h", memory_mb=1, cpus=1, pids=1, env={}, allow=("203.0.113.7:443",)
    )
    found = judge(recipe, captured_at=100.0, boundary=3, lost_at=5, now=130.0, image_now="")
    assert found.clock_gap_s == 30.0
    assert [words.split(":")[0] for words in found.stale] == ["outside_effects"]
    assert "after 3, up to 5" in found.stale[0]
    assert "203.0.113.7:443" in found.stale[0]


def token(end: float) -> str:
    """A JSON Web Token with this expiry."""
    claims = base64.urlsafe_b64encode(json.dumps({"exp": end}).encode()).decode().rstrip("=")
    return f"e30.{claims}.c2ln"


def _kinds(back: RestoreInfo) -> list[str]:
    return [words.split(":")[0] for words in back.stale]
