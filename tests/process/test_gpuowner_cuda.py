"""The real kv owner with ``memory = "cuda_vmm"``, its holder and two workers, over a stand-in for libcuda below the
real bindings: made, leased, promoted in place, kept across the owner's death, fenced, zeroed on the next grant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.errors import DaemonUnreachable, Refused
from belayer.messages import owner as m
from belayer.paths import Paths
from gpuowner.attach import OwnerClient
from gpuowner.store import end_holder
from tests.contract.test_memory_backend import no_gpu
from tests.process.test_gpu_refusals import write
from tests.support.standin import build
from tests.support.wait import eventually, remove_tree

TREE = Path(__file__).resolve().parents[2]
SIZE = 4 << 20

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler: the stand-in for libcuda cannot be built"),
    pytest.mark.skipif(not no_gpu(), reason="a real driver is here: it would be used in place of the stand-in"),
]


class Host:
    def __init__(self, root: Path) -> None:
        self.root, self.paths = root, Paths(root).make()
        self.config = write(root, f'device = "gpu"\nkv_bytes = {SIZE}', "cuda_vmm")
        build(root)
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(root), "BELAYER_ROOT": str(root), "PYTHONPATH": str(TREE)}
        self.processes: list[subprocess.Popen[str]] = []
        self.owner = self.weights = self.start_owner()  # the weights owner is another one where a test starts it

    def run(self, *command: str, keep: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        return self._start("-m", *command, keep=keep)

    def script(self, text: str, *args: str) -> subprocess.Popen[str]:
        return self._start("-c", text, *args)

    def _start(self, *command: str, keep: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        with (self.root / "log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, *command], env=self.env, text=True, cwd=self.root,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, pass_fds=keep,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_owner(self) -> subprocess.Popen[str]:
        return self.run("gpuowner", "--kind", "kv", "--config", str(self.config))

    def worker(self, who: str) -> subprocess.Popen[str]:
        sock = str(self.paths.owner_sock("kv"))
        process = self.run("tests.support.gpu_worker", sock, "cuda", "slot0", str(SIZE), who)
        assert process.stdout is not None
        assert process.stdout.readline() == "standby\n", (self.root / "log").read_text()[-2000:]
        return process

    def client(self, kind: str = "kv") -> OwnerClient:
        def reach() -> OwnerClient | None:
            owner = self.owner if kind == "kv" else self.weights
            assert owner.poll() is None, (self.root / "log").read_text()[-2000:]
            try:
                return OwnerClient(sock, m.Role.ADMIN, "belayerd")
            except DaemonUnreachable:
                return None

        sock = self.paths.owner_sock(kind)
        return eventually(reach, what="the owner answers")

    def arena(self) -> m.ArenaInfo:
        client = self.client()
        status, _ = client.call(m.OwnerStatus(), m.OwnerStatusReply)
        client.close()
        assert status.backend == "cuda_vmm"
        return status.arenas[0]

    def fence(self) -> m.ArenaInfo:
        client, arena = self.client(), self.arena()
        stamp = {"slot": "slot0", "epoch": arena.epoch, "owner_generation": arena.owner_generation}
        if arena.state == "leased":
            client.call(m.BeginFence(**stamp), m.ArenaInfo)
        info, _ = client.call(m.EndFence(**stamp), m.ArenaInfo)
        client.close()
        return info

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        end_holder(self.paths.owner_holder_sock("kv"))
        remove_tree(self.root)


def tell(worker: subprocess.Popen[str], words: str) -> str:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(words + "\n")
    worker.stdin.flush()
    return worker.stdout.readline().strip()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(Path(tempfile.mkdtemp(prefix="blc-", dir="/tmp")))
    yield made
    made.close()


def test_an_arena_on_a_gpu_outlives_its_main_and_its_owner(host: Host) -> None:
    host.client().close()
    main, shadow = host.worker("main"), host.worker("shadow")
    assert "libcuda" not in Path(f"/proc/{host.owner.pid}/maps").read_text(), "the owner loads no driver"
    assert "libcuda" in Path(f"/proc/{main.pid}/maps").read_text(), "a worker does"
    first = host.arena()
    assert (first.state, first.nbytes, first.resident) == ("free", SIZE, SIZE)
    assert tell(main, f"promote {first.epoch}") == "promoted", "the arena came to the addresses of the scratch"
    assert tell(main, "write main wrote") == "written"
    assert tell(shadow, "write scratch") == "written"
    assert tell(main, "read") == "main wrote", "a standby's writes stay in its scratch"

    host.owner.kill()
    host.owner.communicate()
    assert tell(main, "read") == "main wrote", "a main does not notice"
    host.owner = host.start_owner()
    after = eventually(lambda: info if (info := host.arena()).connected else None, what="reclaimed")
    assert (after.state, after.holder) == ("leased", "main")
    assert after.owner_generation == first.owner_generation + 1
    with pytest.raises(Refused):
        host.fence()

    main.kill()
    main.communicate()
    eventually(lambda: host.arena().state == "fencing", what="the death is seen")
    freed = host.fence()
    assert (freed.state, freed.epoch) == ("free", after.epoch + 1)
    kept = OwnerClient(host.paths.owner_sock("kv"), m.Role.WORKER, "reader")
    _, fds = kept.call(m.OpenArena(slot="slot0", nbytes=SIZE), m.ArenaGrant)
    looker = host.run("tests.support.memory", "cuda", "expect-read", str(fds[0]), str(SIZE), keep=(fds[0],))
    looker.communicate(timeout=300)
    assert looker.returncode == 0, "the bytes have outlived the main and the owner that made them"
    os.close(fds[0])
    kept.close()
    # The shadow's connection was to the old life of the owner; it has been mended by itself.
    assert tell(shadow, f"promote {freed.epoch}") == "promoted"
    assert tell(shadow, "read") == "", "zeroed on the grant, the scratch is gone"
