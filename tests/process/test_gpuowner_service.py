"""The owner as a real process: leases die with their holder, and a bad peer costs nobody but itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer import procs, wire
from belayer.errors import DaemonUnreachable, Fenced, LeaseRefused, OwnerGone, Refused, SlotUnknown
from belayer.messages import owner as o
from belayer.messages.common import Ping, Pong
from belayer.paths import Paths
from belayer.seqpacket import SeqClient
from gpuowner.attach import ArenaView, OwnerClient
from gpuowner.service import MAX_REQUEST
from tests.support.owner_stack import REPO, Stack
from tests.support.owners import kill_pid
from tests.support.wait import eventually

SIZE = 1 << 20

HOLDER = """
import sys
from pathlib import Path
from belayer.messages.owner import Role
from gpuowner.attach import ArenaView, OwnerClient
view = ArenaView(OwnerClient(Path(sys.argv[1]), Role.WORKER, "holder"), "slot0", int(sys.argv[2]))
view.promote(int(sys.argv[3]))
view.mapping.buffer()[11] = 111
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def stack() -> Iterator[Stack]:
    made = Stack()
    yield made
    made.stop()


@pytest.fixture
def kv(stack: Stack) -> Path:
    path = stack.paths.owner_sock("kv")
    stack.wait_socket(stack.daemon("gpuowner", "--kind", "kv"), path)
    return path


def worker(path: Path, who: str = "w") -> OwnerClient:
    return OwnerClient(path, o.Role.WORKER, who)


def hold(path: Path, epoch: int) -> subprocess.Popen[str]:
    """A process that holds the lease, with proof that it does."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(SIZE), str(epoch)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))  # without a deadline: with one, a full queue is an error at once
    sock.settimeout(300.0)
    return sock


def test_a_killed_holder_is_fenced_at_once_and_the_next_epoch_serves(stack: Stack, kv: Path) -> None:
    shadow = ArenaView(worker(kv, "shadow"), "slot0", SIZE)
    holder = hold(kv, 0)
    assert stack.arena().state == "leased"
    with pytest.raises(LeaseRefused, match="has a holder"):
        shadow.promote(0)
    holder.kill()
    info = eventually(lambda: (now := stack.arena()).state == "fencing" and now, what="FENCING")
    holder.wait()
    assert info.holder == "holder"
    with pytest.raises(LeaseRefused, match="not been seen dead"):
        shadow.promote(0)
    assert stack.end_fence().epoch == 1
    with pytest.raises(Fenced):
        shadow.promote(0)
    shadow.mapping.buffer()[12] = 1  # private
    shadow.promote(1)
    assert (shadow.mapping.buffer()[11], shadow.mapping.buffer()[12]) == (111, 0)
    assert stack.arena().state == "leased"


def test_the_fence_does_not_end_while_the_holder_lives(stack: Stack, kv: Path) -> None:
    holder = hold_and_close = hold(kv, 0)
    holder.send_signal(signal.SIGSTOP)
    eventually(lambda: procs.state(holder.pid) == "T", what="the holder stopped")
    admin = stack.admin()
    begun, _ = admin.call(o.BeginFence(slot="slot0", epoch=0, owner_generation=1), o.ArenaInfo)
    assert (begun.state, begun.holder_alive) == ("fencing", True)
    with pytest.raises(Refused, match="still alive"):
        admin.call(o.EndFence(slot="slot0", epoch=0, owner_generation=1), o.ArenaInfo)
    bad, _ = admin.call(
        o.QuarantineArena(slot="slot0", epoch=0, owner_generation=1, reason="not dead in time"), o.ArenaInfo
    )
    assert bad.state == "quarantined"
    with pytest.raises(Refused, match="still alive"):
        admin.call(o.RestoreArena(slot="slot0", epoch=0, owner_generation=1), o.ArenaInfo)
    hold_and_close.kill()
    hold_and_close.wait()
    free, _ = admin.call(o.RestoreArena(slot="slot0", epoch=0, owner_generation=1), o.ArenaInfo)
    assert (free.state, free.epoch) == ("free", 1)
    admin.close()


def test_roles_kinds_and_names_are_checked(stack: Stack, kv: Path) -> None:
    stranger = SeqClient(kv)
    with pytest.raises(Refused, match="before Hello"):
        stranger.call(o.OpenArena(slot="slot0", nbytes=SIZE), o.ArenaGrant)
    client = worker(kv)
    with pytest.raises(Refused, match="needs role admin"):
        client.call(o.BeginFence(slot="slot0", epoch=0, owner_generation=1), o.ArenaInfo)
    with pytest.raises(Refused, match="ask the owner of weights"):
        client.call(o.AttachWeights(model="smollm2"), o.WeightsGrant)
    with pytest.raises(SlotUnknown):
        client.call(o.AcquireLease(slot="nowhere", epoch=0, owner_generation=1), o.LeaseGrant)
    with pytest.raises(Refused, match="bytes"):
        client.call(o.OpenArena(slot="slot0", nbytes=1 << 50), o.ArenaGrant)
    ArenaView(client, "slot0", SIZE)
    with pytest.raises(Refused, match="were asked for"):
        client.call(o.OpenArena(slot="slot0", nbytes=SIZE * 2), o.ArenaGrant)
    with pytest.raises(Refused, match="Hello before"):
        client.call(o.Hello(role=o.Role.ADMIN, who="w"), o.Welcome)


def test_garbage_costs_its_sender_only(stack: Stack, kv: Path) -> None:
    view = ArenaView(worker(kv, "good"), "slot0", SIZE)
    view.promote(0)
    for packet in (
        b"\xc1",
        b"\x00" * 100,
        os.urandom(999),
        b"x" * (MAX_REQUEST + 1),
        wire.encode(o.Welcome(kind="x", owner_generation=1, pid=1)),
    ):
        sock = raw(kv)
        sock.send(packet)
        answer = sock.recv(4096)
        assert b"bad_message" in answer
        assert sock.recv(4096) == b"", "the connection is closed"
        sock.close()
    pong, _ = SeqClient(kv).call(Ping(), Pong)
    assert pong.daemon == "gpuowner-kv"
    assert stack.arena().holder == "good"


def test_a_descriptor_sent_along_is_closed(stack: Stack, kv: Path) -> None:
    reader, writer = os.pipe()
    sock = raw(kv)
    socket.send_fds(sock, [wire.encode(Ping())], [writer])
    assert b"Pong" in sock.recv(4096)
    os.close(writer)
    assert os.read(reader, 1) == b"", "the owner kept no copy of the pipe's end"
    os.close(reader)
    sock.close()


def test_stuck_clients_hold_nobody_up(stack: Stack, kv: Path) -> None:
    silent = [raw(kv) for _ in range(200)]
    flooders = [raw(kv) for _ in range(3)]
    for sock in flooders:
        sock.setblocking(False)
        try:
            while True:  # never reads its answers
                sock.send(wire.encode(o.OwnerStatus()))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass
    view = ArenaView(worker(kv, "good"), "slot0", SIZE)
    view.promote(0)
    assert stack.arena().holder == "good"
    for sock in silent + flooders:
        sock.close()

    def alone() -> bool:
        client = SeqClient(kv)
        status, _ = client.call(o.OwnerStatus(), o.OwnerStatusReply)
        client.close()
        return status.connections == 2

    eventually(alone, what="only the holder and this question are left")


def test_nothing_leaks_when_holders_are_killed(stack: Stack, kv: Path) -> None:
    client = SeqClient(kv)
    pid = client.call(Ping(), Pong)[0].pid
    client.close()

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def cycle(epoch: int) -> None:
        holder = hold(kv, epoch)
        holder.kill()
        holder.wait()
        eventually(lambda: stack.arena().state == "fencing", what="FENCING")
        stack.end_fence()

    cycle(0)
    before = descriptors()
    for epoch in range(1, 6):
        cycle(epoch)
    eventually(lambda: descriptors() <= before, what="descriptors as before")


def drain(sock: socket.socket) -> None:
    sock.settimeout(0.0)
    try:
        while True:
            sock.recv(64)
    except BlockingIOError:
        return


def test_the_watchdog_is_fed_by_the_loop_that_serves(stack: Stack, kv: Path) -> None:
    """Against a notify socket like systemd's: beats come while the loop runs, and none while it stands still."""
    owner = worker(kv)
    kill_pid(owner.welcome.pid)  # and seen dead: its lock is free
    owner.close()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(stack.root / "notify"))
        manager.settimeout(300.0)
        os.environ.update(NOTIFY_SOCKET=str(stack.root / "notify"), WATCHDOG_USEC="300000")
        try:
            daemon = stack.daemon("gpuowner", "--kind", "kv")
        finally:
            del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]
        assert manager.recv(64).startswith(b"READY=1")
        assert [manager.recv(64) for _ in range(3)] == [b"WATCHDOG=1"] * 3
        daemon.send_signal(signal.SIGSTOP)
        eventually(lambda: procs.state(daemon.pid) == "T", what="the owner is stopped")
        drain(manager)  # what was sent before the stop
        manager.settimeout(1.0)
        with pytest.raises(TimeoutError):
            manager.recv(64)
        manager.settimeout(300.0)
        daemon.send_signal(signal.SIGCONT)
        assert manager.recv(64) == b"WATCHDOG=1"


def test_an_owner_that_ends_is_noticed_before_a_lease(stack: Stack, kv: Path) -> None:
    view = ArenaView(worker(kv), "slot0", SIZE)
    kill_pid(SeqClient(kv).call(Ping(), Pong)[0].pid)
    with pytest.raises((OwnerGone, DaemonUnreachable)):
        view.promote(0)
    assert view.epoch == -1
    view.mapping.buffer()[0] = 1  # the private view is whole


def test_generations_count_the_lives_and_two_owners_cannot_run(stack: Stack, kv: Path) -> None:
    first = worker(kv).welcome
    again = stack.daemon("gpuowner", "--kind", "kv")
    assert again.wait(300) == 2
    assert b"already runs" in (stack.root / "gpuowner--kindkv.log").read_bytes()
    kill_pid(first.pid)
    stack.wait_socket(stack.daemon("gpuowner", "--kind", "kv"), kv)
    second = eventually(lambda: welcome_of_other(kv, first.pid), what="the next life")
    assert second.owner_generation == first.owner_generation + 1
    view = ArenaView(worker(kv), "slot0", SIZE)
    with pytest.raises(Fenced):
        view.promote(0)  # an epoch of the earlier life
    view.promote(view.grant.epoch)


def welcome_of_other(path: Path, pid: int) -> o.Welcome | None:
    try:
        welcome = worker(path).welcome
    except DaemonUnreachable:
        return None
    return welcome if welcome.pid != pid else None


def test_a_broken_model_is_one_sentence_and_exit_2(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    stack.paths.config.write_text(f'[[model]]\nname = "m"\npath = "{tmp_path}"\n')
    assert stack.daemon("gpuowner", "--kind", "weights").wait(300) == 2
    said = (stack.root / "gpuowner--kindweights.log").read_text().strip()
    assert "model m: model file" in said
    assert "nothing was sealed" in said
    assert len(said.splitlines()) == 1
    assert not Paths(stack.root).owner_sock("weights").exists()
