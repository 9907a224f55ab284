"""Fifty kill -9 over every party that an owner has; afterwards there is no descriptor, byte, file or process more than
before them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from belayer import procs
from belayer.messages import owner as o
from gpuowner.attach import ArenaView, OwnerClient, WeightsView
from gpuowner.vmem import MAP_SHARED, PROT_READ, PROT_WRITE, Mapping
from tests.support.owners import SIZE, Owners, kill_pid, tiny_model
from tests.support.wait import eventually

ROUNDS = {"swap": 3, "in_place": 1}  # of eighteen kills each
KINDS = ("weights", "kv")


@pytest.fixture
def host(mode: str, tmp_path: Path) -> Iterator[Owners]:
    made = Owners({"m": tiny_model(tmp_path / "m", 1)}, extra=f'update = "{mode}"\n')
    yield made
    made.stop()


class Party:
    """A forked process that has done its part and is then killed."""

    def __init__(self, part: Callable[[], object]) -> None:
        ready, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                kept = part()
                os.write(tell, b"1")
                signal.pause()
                del kept
            finally:
                os._exit(1)
        os.close(tell)
        assert os.read(ready, 1) == b"1", "the party did its part"
        os.close(ready)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]) == -signal.SIGKILL


def reader(host: Owners) -> Party:
    def part() -> object:
        view = WeightsView(OwnerClient(host.paths.owner_sock("weights"), o.Role.WORKER, "reader"), "m")
        view.verify()
        return view

    return Party(part)


def main(host: Owners) -> Party:
    def part() -> object:
        view = ArenaView(OwnerClient(host.paths.owner_sock("kv"), o.Role.WORKER, "main"), "slot0", SIZE)
        view.promote(view.grant.epoch)
        view.mapping.buffer()[0] = 1
        return view

    return Party(part)


def trainer(host: Owners) -> Party:
    """Dies with half of a version written."""
    now = host.the_model()

    def part() -> object:
        client = OwnerClient(host.paths.owner_sock("weights"), o.Role.LOADER, "trainer")
        asked = o.BeginUpdate(model="m", from_version=now.version, owner_generation=now.owner_generation, whole=True)
        grant, fds = client.call(asked, o.UpdateGrant)
        mapping = Mapping(fds[0], grant.nbytes, PROT_READ | PROT_WRITE, MAP_SHARED)
        mapping.buffer()[: SIZE // 8] = b"\7" * (SIZE // 8)
        return client, fds, mapping

    return Party(part)


def settle(host: Owners) -> None:
    """After a death: fences ended, torn weights published again, copies with a holder."""
    eventually(lambda: not host.the_model().writer, what="the writer's death is seen")
    now = host.the_model()
    if now.state == "torn":
        client = OwnerClient(host.paths.owner_sock("weights"), o.Role.ADMIN, "belayerd")
        again = o.RepublishWeights(model="m", version=now.version, owner_generation=now.owner_generation)
        client.call(again, o.WeightsInfo)
        client.close()
    assert host.the_model().state == "sealed"


def free_again(host: Owners) -> None:
    assert host.fence(host.arena_in("fencing")).state == "free"


def one_round(host: Owners) -> int:
    """Every party more than once; the number of kills."""
    holders = {kind: host.holder_pid(kind) for kind in KINDS}
    one_main, readers = main(host), [reader(host) for _ in range(3)]
    for kind in KINDS:
        host.reborn(kind)  # two owners, with a main and readers
    one_main.kill()
    free_again(host)
    for one_reader in readers:
        one_reader.kill()
    one_trainer = trainer(host)
    host.reborn("weights")  # inside an update
    one_trainer.kill()
    settle(host)
    for _ in range(3):
        trainer(host).kill()
        settle(host)
        main(host).kill()
        free_again(host)
    last = main(host)
    host.kill("kv")
    last.kill()  # while its owner is away
    host.up("kv")
    free_again(host)
    for kind in KINDS:
        kill_pid(holders[kind])
        renewed(host, kind, holders[kind])
    return 18


def renewed(host: Owners, kind: str, old: int) -> None:
    eventually(lambda: host.status(kind).store not in ("", f"holder pid {old}"), what="another holder has the copies")


def census(host: Owners) -> dict[str, int]:
    """What the processes below this root hold: descriptors of each, memory by inode, files, and the processes."""
    needle = f"BELAYER_ROOT={host.root}\0".encode()
    pids = [pid for pid in _pids() if needle in _environment(pid)]
    memory: dict[int, int] = {}
    descriptors = 0
    for pid in pids:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile: the connection of a question, for example
                if "/memfd:belayer-" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    stat = os.stat(f"/proc/{pid}/fd/{fd}")
                    memory[stat.st_ino] = stat.st_blocks * 512
                descriptors += 1
    return {
        "processes": len(pids),
        "descriptors": descriptors,
        "allocations": len(memory),
        "bytes": sum(memory.values()),
        "files": sum(1 for _ in host.root.rglob("*")),
        "mappings": sum(_belayer_maps(pid) for pid in pids),
    }


def at_rest(host: Owners) -> dict[str, int]:
    """The least that was found of each in fifty looks, once nobody but the owners and their holders is there: what
    questions and deaths that are being dealt with hold comes and goes."""

    def quiet() -> bool:
        now = census(host)
        return now["processes"] == 4 and now["mappings"] == 0

    eventually(quiet, what="two owners and their holders are alone")
    for kind in KINDS:
        eventually(lambda kind=kind: host.status(kind).connections == 1, what="nobody but this question is connected")
    looks = [found for found in (census(host) for _ in range(50)) if found["processes"] == 4]
    return {name: min(found[name] for found in looks) for name in looks[0]}


def _belayer_maps(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:belayer-")


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and procs.lives(int(name))]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended meanwhile
        return b""


@pytest.mark.parametrize("mode", list(ROUNDS))
def test_nothing_is_left_of_fifty_kills(host: Owners, mode: str) -> None:
    for kind in KINDS:
        host.up(kind)
    one_round(host)
    before = at_rest(host)
    kills = sum(one_round(host) for _ in range(ROUNDS[mode]))
    assert kills >= (50 if mode == "swap" else 10)
    after = at_rest(host)
    assert all(after[name] <= count for name, count in before.items()), f"{before} became {after}"
