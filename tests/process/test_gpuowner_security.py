"""A bad peer costs nobody but itself: bytes, roles, users, descriptors, and a thousand clients that say nothing."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belayer import wire
from belayer.errors import BelayerError, Refused, SlotUnknown
from belayer.messages import owner as o
from belayer.messages.common import Ping, Pong
from belayer.seqpacket import SeqClient
from gpuowner.arenas import MAX_RANKS
from gpuowner.attach import ArenaView, OwnerClient, WeightsView
from gpuowner.handlers import RIGHTS
from gpuowner.service import MAX_REQUEST
from tests.support.owners import SIZE, Owners, tiny_model
from tests.support.wait import eventually

STUCK = 1000
NOBODY = 65534

# One well-formed request of every kind.
REQUESTS: tuple[Any, ...] = (
    o.AttachWeights(model="m"),
    o.RejoinWeights(model="m", version=1, digest="", owner_generation=1),
    o.BeginUpdate(model="m", from_version=1, owner_generation=1),
    o.UpdatePart(model="m", version=2, owner_generation=1, rank=0),
    o.CommitUpdate(model="m", version=2, owner_generation=1, chunk_digests=(b"x" * 32,), digest=""),
    o.AbortUpdate(model="m", version=2, owner_generation=1),
    o.RepublishWeights(model="m", version=1, owner_generation=1),
    o.OpenArena(slot="slot0", nbytes=SIZE),
    o.AcquireLease(slot="slot0", epoch=0, owner_generation=1),
    o.ReclaimLease(slot="slot0", epoch=0, owner_generation=1),
    o.BeginFence(slot="slot0", epoch=0, owner_generation=1),
    o.EndFence(slot="slot0", epoch=0, owner_generation=1),
    o.QuarantineArena(slot="slot0", epoch=0, owner_generation=1, reason="r"),
    o.RestoreArena(slot="slot0", epoch=0, owner_generation=1),
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    made = Owners({"m": tiny_model(tmp_path_factory.mktemp("models") / "m", 1)})
    made.up("kv")
    made.up("weights")
    yield made
    made.stop()


def raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))  # without a deadline: with one, a full queue is an error at once
    sock.settimeout(300.0)
    return sock


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def served(host: Owners) -> None:
    """A worker gets what it asks for, from both owners."""
    client = host.client("weights")
    WeightsView(client, "m").verify()
    ArenaView(host.client("kv"), "slot0", SIZE)


def test_every_request_has_its_rights() -> None:
    assert {type(request) for request in REQUESTS} == set(RIGHTS)


@pytest.mark.parametrize("kind", ["weights", "kv"])
def test_a_role_or_an_owner_that_is_not_the_right_one_is_refused(host: Owners, kind: str) -> None:
    """The whole matrix of request, role and owner: what is not allowed changes nothing."""
    before = host.status(kind)
    for request in REQUESTS:
        right_kind, roles = RIGHTS[type(request)]
        stranger = SeqClient(host.paths.owner_sock(kind))
        with pytest.raises(Refused, match="before Hello"):
            stranger.call(request, Pong)
        stranger.close()
        for role in o.Role:
            asker = OwnerClient(host.paths.owner_sock(kind), role, "test")
            if role not in roles:
                with pytest.raises(Refused, match="needs role"):
                    asker.call(request, Pong)
            elif kind != right_kind:
                with pytest.raises(Refused, match="ask the owner of"):
                    asker.call(request, Pong)
            asker.close()
    after = host.status(kind)
    assert (after.weights, after.arenas) == (before.weights, before.arenas)


@pytest.mark.parametrize("kind", ["weights", "kv"])
def test_every_half_of_every_message_and_every_oversize_packet(host: Owners, kind: str) -> None:
    """Each is answered by an error and ends its own connection; the rest goes on."""
    path = host.paths.owner_sock(kind)
    whole = [wire.encode(request) for request in (*REQUESTS, o.Hello(role=o.Role.ADMIN, who="x"), Ping())]
    halves = [data[:end] for data in whole for end in range(1, len(data), 3)]
    for packet in (*halves, b"\xc1", os.urandom(4096), b"\x81" * MAX_REQUEST, b"x" * (MAX_REQUEST + 1)):
        sock = raw(path)
        sock.send(packet)
        assert b"bad_message" in sock.recv(4096)
        assert sock.recv(4096) == b"", "the connection is closed"
        sock.close()
    assert len(halves) > 200
    served(host)


def test_a_thousand_stuck_clients_hold_nobody_up(host: Owners) -> None:
    """They connect, and neither write nor read while others are served; then all of it is given back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * STUCK + 512
    assert hard == resource.RLIM_INFINITY or hard >= wanted, "this test needs descriptors of its own"
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    before = {kind: (descriptors(host.owners[kind].pid), host.status(kind).connections) for kind in ("weights", "kv")}
    stuck = [raw(host.paths.owner_sock(kind)) for _ in range(STUCK // 2) for kind in ("weights", "kv")]
    for kind in ("weights", "kv"):  # never reads its answers, and asks until nothing more goes in
        flooder = raw(host.paths.owner_sock(kind))
        flooder.setblocking(False)
        stuck.append(flooder)
        try:
            while True:
                flooder.send(wire.encode(o.OwnerStatus()))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass
    for kind in ("weights", "kv"):
        assert host.status(kind).connections >= STUCK // 2
    for _ in range(5):
        served(host)
    for sock in stuck:
        sock.close()
    host.close_clients()
    for kind, (fds, connections) in before.items():
        given_back(host, kind, fds, connections)


def given_back(host: Owners, kind: str, fds: int, connections: int) -> None:
    eventually(lambda: host.status(kind).connections <= connections, what="connections as before")
    eventually(lambda: descriptors(host.owners[kind].pid) <= fds, what="descriptors as before")


def test_names_from_clients_are_names_and_sizes_have_bounds(host: Owners) -> None:
    client = host.client("kv")
    for slot in ("../../etc", "a/b", "", "x" * 5000, "slot0\0"):
        with pytest.raises(Refused, match="no arena can be named"):
            client.call(o.OpenArena(slot=slot, nbytes=SIZE), o.ArenaGrant)
    for rank in (-1, MAX_RANKS, 1 << 40):
        with pytest.raises(Refused, match="no arena can be named"):
            client.call(o.OpenArena(slot="slot0", rank=rank, nbytes=SIZE), o.ArenaGrant)
    for nbytes in (0, -5, 1 << 50):
        with pytest.raises(Refused, match="bytes"):
            client.call(o.OpenArena(slot="slot0", rank=3, nbytes=nbytes), o.ArenaGrant)
    with pytest.raises(SlotUnknown, match="configured"):
        client.call(o.OpenArena(slot="slot7", nbytes=SIZE), o.ArenaGrant)
    with pytest.raises(BelayerError):
        client.call(o.AcquireLease(slot="slot0", epoch=1 << 63, owner_generation=1), o.LeaseGrant)
    loader = host.client("weights", o.Role.LOADER, "l" * 10_000)
    with pytest.raises(Refused, match="no update mode"):
        loader.call(o.BeginUpdate(model="m", from_version=1, owner_generation=1, mode="../x"), o.UpdateGrant)
    with pytest.raises(Refused, match="sealed against writing for ever"):
        loader.call(o.BeginUpdate(model="m", from_version=1, owner_generation=1, mode="in_place"), o.UpdateGrant)
    assert host.the_model().state == "sealed"


def test_sockets_are_closed_to_other_users_and_descriptors_to_children(host: Owners) -> None:
    assert os.stat(host.paths.run).st_mode & 0o777 == 0o700
    for kind in ("weights", "kv"):
        for path in (host.paths.owner_sock(kind), host.paths.owner_holder_sock(kind)):
            assert os.stat(path).st_mode & 0o777 == 0o600
        assert os.stat(host.paths.owner_ledger(kind)).st_mode & 0o777 == 0o600
    ArenaView(host.client("kv"), "slot0", SIZE)
    for kind in ("weights", "kv"):
        for pid in (host.owners[kind].pid, host.holder_pid(kind)):
            assert inherited(pid) == []


def inherited(pid: int) -> list[str]:
    """What a child of the process would get beside its three standard descriptors."""
    found = []
    for fd in filter(lambda name: int(name) > 2, os.listdir(f"/proc/{pid}/fd")):
        try:
            info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
            what = os.readlink(f"/proc/{pid}/fd/{fd}")
        except FileNotFoundError:
            continue  # closed meanwhile
        flags = int(next(row.split()[1] for row in info.splitlines() if row.startswith("flags:")), 8)
        found += [] if flags & os.O_CLOEXEC else [what]
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("which", ["owner", "holder"])
def test_another_user_is_sent_away_even_where_the_file_modes_let_it_in(host: Owners, which: str) -> None:
    path = host.paths.owner_sock("kv") if which == "owner" else host.paths.owner_holder_sock("kv")
    opened = {host.root: 0o755, host.paths.run: 0o755, path: 0o666}
    modes = {place: os.stat(place).st_mode & 0o777 for place in opened}
    try:
        for place, mode in opened.items():
            os.chmod(place, mode)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                sock = raw(path)  # the modes let it in
                code = 0 if sock.recv(64) == b"" else 2  # the owner does not
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        for place, mode in modes.items():
            os.chmod(place, mode)
    served(host)
