"""kill -9 of owners: what they hold is adopted by the next life, and who works in it does not notice (promises R1, R4,
O1)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belayer import procs
from belayer.errors import Fenced, LeaseRefused, WeightsTorn
from belayer.messages import owner as o
from gpuowner.arenas import EPOCHS_PER_LIFE
from gpuowner.attach import ArenaView, WeightsView
from gpuowner.digest import chunk_digests, root_digest
from gpuowner.vmem import MAP_SHARED, PROT_READ, PROT_WRITE, Mapping
from tests.support.owners import SIZE, Owners, kill_pid, tiny_model
from tests.support.wait import eventually


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Owners]:
    made = Owners({"m": tiny_model(tmp_path / "m", 1), "other": tiny_model(tmp_path / "other", 2)}, ("slot0", "slot1"))
    yield made
    made.stop()


def counter(view: ArenaView) -> int:
    return ctypes.c_uint64.from_address(view.mapping.address).value


def moves(view: ArenaView) -> bool:
    """The main writes on: its counter, seen through the private view of a shadow, changes."""
    before = counter(view)
    return bool(eventually(lambda: counter(view) != before, what="the main's counter moves"))


# --- arenas ---


def test_a_main_does_not_notice_that_its_owner_is_killed(host: Owners) -> None:
    """The same lease at the same epoch in the next life; its death is seen at once there; the next main finds what it
    wrote."""
    first = host.up("kv")
    shadow_client = host.client("kv", who="shadow")
    shadow = ArenaView(shadow_client, "slot0", SIZE)
    shadow_client.keep(lambda said: None)
    main = host.streamer()
    assert moves(shadow)
    host.kill("kv")
    assert moves(shadow), "while there is no owner"
    second = host.up("kv")
    assert second.owner_generation == first.owner_generation + 1
    assert second.adopted == ("arena slot0 leased at epoch 0, holder main",)
    assert moves(shadow)
    eventually(lambda: host.the_arena().connected, what="the main reclaims")
    info = host.the_arena()
    assert (info.state, info.epoch, info.holder, info.holder_pid) == ("leased", 0, "main", main.pid)
    with pytest.raises(LeaseRefused, match="has a holder"):
        shadow.promote(0)
    main.kill()
    assert host.fence(host.arena_in("fencing")).epoch == 1
    wrote = counter(shadow)
    shadow.promote(1, second.owner_generation)
    assert counter(shadow) == wrote, "the same memory"


def test_a_main_that_dies_while_its_owner_is_away_is_fenced(host: Owners) -> None:
    host.up("kv")
    main = host.streamer()
    host.kill("kv")
    main.kill()
    main.wait()
    host.up("kv")
    info = host.the_arena()
    assert (info.state, info.epoch, info.holder, info.holder_alive) == ("fencing", 0, "main", False)
    assert host.fence(info).state == "free"


def test_an_owner_that_is_restarted_ends_no_lease_and_no_update(tmp_path: Path) -> None:
    """SIGTERM and a new start, as an upgrade does: as after a kill."""
    host = Owners({"m": tiny_model(tmp_path / "m", 1)})
    try:
        host.up("kv")
        main = host.streamer()
        host.owners["kv"].terminate()
        assert host.owners["kv"].wait(300) == 0
        host.up("kv")
        info = host.the_arena()
        assert (info.state, info.epoch, info.holder_pid) == ("leased", 0, main.pid)
        eventually(lambda: host.the_arena().connected, what="the main reclaims")
        main.kill()
        host.arena_in("fencing")
    finally:
        host.stop()


def test_an_adopted_main_that_never_comes_back_is_watched_by_its_process(host: Owners) -> None:
    host.up("kv")
    silent = host.child(
        "import sys\nfrom pathlib import Path\nfrom belayer.messages.owner import Role\n"
        "from gpuowner.attach import ArenaView, OwnerClient\n"
        "view = ArenaView(OwnerClient(Path(sys.argv[1]), Role.WORKER, 'silent'), 'slot0', int(sys.argv[2]))\n"
        "view.promote(0)\nprint('held', flush=True)\nsys.stdin.read()",
        str(host.paths.owner_sock("kv")), str(SIZE),
    )  # fmt: skip
    host.reborn("kv")
    info = host.the_arena()
    assert (info.state, info.connected, info.holder_alive) == ("leased", False, True)
    thief = host.client("kv", who="silent")
    with pytest.raises(LeaseRefused, match="another process"):
        thief.call(o.ReclaimLease(slot="slot0", epoch=0, owner_generation=2), o.ArenaInfo)
    with pytest.raises(Fenced):
        thief.call(o.ReclaimLease(slot="slot0", epoch=0, owner_generation=1), o.ArenaInfo)
    silent.kill()
    host.arena_in("fencing")  # by its pidfd


@pytest.mark.parametrize("state", ["fencing", "quarantined", "free"])
def test_every_other_state_of_an_arena_comes_back_as_it_was(host: Owners, state: str) -> None:
    host.up("kv")
    main = host.streamer()
    main.kill()
    main.wait()
    info = host.arena_in("fencing")
    if state == "quarantined":
        admin = host.client("kv", o.Role.ADMIN)
        admin.call(o.QuarantineArena(slot="slot0", epoch=0, owner_generation=1, reason="bad"), o.ArenaInfo)
    elif state == "free":
        host.fence(info)
    host.reborn("kv")
    after = host.the_arena()
    assert (after.state, after.epoch) == (state, 1 if state == "free" else 0)
    assert after.reason == ("bad" if state == "quarantined" else "")


def test_owner_and_holder_both_gone_is_said_by_name(host: Owners) -> None:
    """The memory of the arena lives only in what the main has mapped: the owner says so, gives out nothing of it, and
    a new arena begins above every epoch of the lost one."""
    host.up("kv")
    shadow = ArenaView(host.client("kv"), "slot0", SIZE)
    main = host.streamer()
    holder = host.holder_pid("kv")
    host.kill("kv")
    kill_pid(holder)
    status = host.up("kv")
    assert moves(shadow)
    assert status.arenas == ()
    assert len(status.lost) == 1
    assert f"main (pid {main.pid}) writes on" in status.lost[0]
    fresh = ArenaView(host.client("kv"), "slot0", SIZE)
    assert fresh.grant.epoch == EPOCHS_PER_LIFE
    assert counter(fresh) == 0


def test_a_killed_holder_is_replaced_and_given_everything_again(host: Owners) -> None:
    host.up("kv")
    main = host.streamer()
    first = host.holder_pid("kv")
    kill_pid(first)
    eventually(lambda: host.status("kv").store not in ("", f"holder pid {first}"), what="another holder")
    host.reborn("kv")
    assert host.the_arena().holder_pid == main.pid


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: procs.state(pid) == "T", what="the holder is stopped")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_holder_that_hangs_holds_nobody_up_and_is_named(host: Owners) -> None:
    """While it hangs the owner serves and says that it would not outlive a kill; its copies are not given up."""
    host.up("kv")
    pid = host.holder_pid("kv")
    host.streamer()
    with stopped(pid):
        ArenaView(host.client("kv"), "slot1", SIZE).promote(0)
        status = host.status("kv")
        assert status.store == ""
        assert "does not answer" in status.store_reason
        host.kill("kv")
        assert host.daemon("gpuowner", "--kind", "kv").wait(300) == 2, "another life must not begin over what it keeps"
        assert "end the workers and the stuck holder" in (host.root / "gpuowner--kindkv.log").read_text()
    after = host.up("kv")
    assert "arena slot0 leased at epoch 0, holder main" in after.adopted
    host.kill("kv")


def test_a_holder_that_hung_is_given_everything_when_it_goes_on(host: Owners) -> None:
    host.up("kv")
    pid = host.holder_pid("kv")
    with stopped(pid):
        main = host.streamer()
        assert host.status("kv").store == ""
    eventually(lambda: host.status("kv").store == f"holder pid {pid}", what="copies with the holder again")
    host.reborn("kv")
    assert host.the_arena().holder_pid == main.pid


def test_killing_one_owner_leaves_the_other_serving(host: Owners) -> None:
    host.up("kv")
    host.up("weights")
    host.kill("weights")
    view = ArenaView(host.client("kv"), "slot1", SIZE)
    view.promote(0)
    host.up("weights")
    host.kill("kv")
    WeightsView(host.client("weights"), "m").verify()


def test_ranks_and_slots_have_their_own_memory(host: Owners) -> None:
    host.up("kv")
    for slot, rank in (("slot0", 0), ("slot0", 1), ("slot1", 0)):
        host.streamer(slot, rank, f"{slot}-main")  # the ranks of a slot are one worker's
    host.reborn("kv")
    rows = {(row.slot, row.rank): row.holder for row in host.status("kv").arenas}
    assert rows == {("slot0", 0): "slot0-main", ("slot0", 1): "slot0-main", ("slot1", 0): "slot1-main"}
    host.children[1].kill()
    host.arena_in("fencing", "slot0", 1)
    assert host.the_arena("slot0", 0).state == "leased"


# --- weights ---


def publish(host: Owners, *, mode: str = "swap", fill: int = 7, keep_mapped: bool = False) -> Mapping:
    """A whole new version of "m", committed; returns the writer's mapping."""
    loader = host.client("weights", o.Role.LOADER, "trainer")
    now = host.the_model()
    grant, fds = loader.call(
        o.BeginUpdate(
            model="m", from_version=now.version, owner_generation=now.owner_generation, mode=mode, whole=True
        ),
        o.UpdateGrant,
    )
    mapping = Mapping(fds[0], grant.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED)
    ctypes.memset(mapping.address, fill, grant.nbytes)
    chunks = tuple(chunk_digests(mapping.buffer()))
    if not keep_mapped:
        mapping.close()
    info, _ = loader.call(
        o.CommitUpdate(
            model="m", version=grant.version, owner_generation=grant.owner_generation, chunk_digests=chunks,
            digest=root_digest(chunks, grant.nbytes),
        ),
        o.WeightsInfo,
    )  # fmt: skip
    assert (info.state, info.version) == ("sealed", now.version + 1)
    for fd in fds:
        os.close(fd)
    return mapping


def test_weights_are_adopted_and_not_read_from_disk_again(host: Owners, tmp_path: Path) -> None:
    """Hashed whole before they are served; a reader is known again; the files may be gone."""
    before = host.up("weights").weights
    client = host.client("weights", who="reader")
    view = WeightsView(client, "m")
    client.keep(lambda said: None)
    for name in ("m", "other"):
        (tmp_path / name / "model.safetensors").unlink()
    after = host.reborn("weights")
    assert [(row.model, row.version, row.digest) for row in after.weights] == [
        (row.model, row.version, row.digest) for row in before
    ]
    assert sorted(after.adopted) == ["weights m sealed v1", "weights other sealed v1"]
    readers = eventually(lambda: host.the_model().readers, what="the reader rejoins")
    assert [(row.who, row.version) for row in readers] == [("reader", 1)]
    WeightsView(host.client("weights"), "m").verify()
    view.verify()


def test_an_updated_version_is_adopted_as_itself(host: Owners) -> None:
    host.up("weights")
    old = WeightsView(host.client("weights", who="old"), "m")
    publish(host)
    old.verify()
    assert [(row.who, row.version) for row in host.the_model().readers] == [("old", 1)]
    host.reborn("weights")
    view = WeightsView(host.client("weights"), "m")
    view.verify()
    assert (view.grant.version, view.mapping.buffer()[0]) == (2, 7)


def test_a_lost_update_is_refused_until_it_is_published_again(host: Owners) -> None:
    """The files hold an older version than the one that was lost: they must not pass for it."""
    host.up("weights")
    publish(host)
    holder = host.holder_pid("weights")
    host.kill("weights")
    kill_pid(holder)
    status = host.up("weights")
    assert len(status.lost) == 1
    assert status.lost[0].startswith("weights m v2: their memory died")
    with pytest.raises(WeightsTorn, match="last whole version 2: their last version was lost"):
        WeightsView(host.client("weights"), "m")
    WeightsView(host.client("weights"), "other").verify()
    host.reborn("weights")
    assert host.the_model().state == "torn", "the next life remembers it too"
    command = [sys.executable, "-m", "belayerctl", "republish", "m", "--json"]
    env = {**os.environ, "BELAYER_ROOT": str(host.root)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert (info["state"], info["version"]) == ("sealed", 3)
    assert subprocess.run(command, env=env, capture_output=True, timeout=300, check=False).returncode == 1, "sealed"
    WeightsView(host.client("weights"), "m").verify()


def test_a_lost_version_of_the_files_is_loaded_again_as_itself(host: Owners) -> None:
    before = host.up("weights").weights
    holder = host.holder_pid("weights")
    host.kill("weights")
    kill_pid(holder)
    after = host.up("weights")
    assert [(row.version, row.digest) for row in after.weights] == [(row.version, row.digest) for row in before]
    assert after.lost == ()


def test_bytes_that_changed_while_the_owner_was_away_are_refused(tmp_path: Path) -> None:
    """Only memory that is updated in place can change at all; the next life hashes it and says TORN."""
    host = Owners({"m": tiny_model(tmp_path / "m", 1)}, extra='update = "in_place"\n')
    try:
        host.up("weights")
        mapping = publish(host, mode="in_place", keep_mapped=True)
        host.kill("weights")
        mapping.buffer()[4097] ^= 1
        host.up("weights")
        with pytest.raises(WeightsTorn, match="differ from their digests"):
            WeightsView(host.client("weights"), "m")
        publish(host, mode="in_place")
        WeightsView(host.client("weights"), "m").verify()
    finally:
        host.stop()


def test_a_changed_configuration_is_loaded_and_not_adopted(host: Owners, tmp_path: Path) -> None:
    before = host.up("weights").weights[0]
    tiny_model(tmp_path / "new", 3)
    host.kill("weights")
    text = host.paths.config.read_text().replace(f'"{tmp_path}/m"', f'"{tmp_path}/new"')
    host.paths.config.write_text(text)
    host.up("weights")
    now = host.the_model()
    assert (now.state, now.version) == ("sealed", 2)
    assert now.digest != before.digest
    WeightsView(host.client("weights"), "m").verify()


def test_a_stopped_owner_is_released_and_holds_nothing(host: Owners) -> None:
    host.up("weights")
    publish(host)
    holder = host.holder_pid("weights")
    host.owners["weights"].terminate()
    assert host.owners["weights"].wait(300) == 0
    assert procs.lives(holder), "a restart would find everything"
    assert host.daemon("gpuowner", "--kind", "weights", "--release").wait(300) == 0
    eventually(lambda: not procs.lives(holder), what="the holder has ended")
    host.up("weights")
    assert (host.the_model().state, host.the_model().version) == ("sealed", 1), "a fresh start, asked for"
