"""Writers of weight versions beside a host with one slot of two tensor-parallel ranks, and streams that go on over
them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from belayer.localhost import LocalHost
from belayer.messages.owner import Role
from gpuowner.attach import OwnerClient
from gpuowner.update import Update, begin_update
from tests.support.rank_host import all_follow, laid_out, read, weights
from tests.support.streams import Stream, completion
from tests.support.wait import eventually

REPO = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
LONG = completion(200, ignore_eos=True)


def mapped(host: LocalHost) -> dict[tuple[int, int], int]:
    """By rank and pid, the version that a process maps now, of its part."""
    return read(weights(host))


def long_stream(host: LocalHost) -> Stream:
    made = Stream(host.status().router_url, "/v1/completions", LONG)
    made.start()
    eventually(lambda: len(made.seen.token_ids) >= 8, what="tokens")
    return made


def whole(made: Stream) -> None:
    """It came to its end, over the update."""
    seen = made.result(180)
    assert (seen.error, seen.errors, seen.finishes, seen.done) == (None, [], ["length"], 1)
    assert len(seen.token_ids) == LONG["max_tokens"]


@contextmanager
def writing(host: LocalHost, mode: str = "") -> Iterator[Update]:
    """A whole rewrite that is open inside the block, by this process."""
    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=120.0)
    try:
        with begin_update(client, MODEL, mode=mode, whole=True) as update:
            yield update
    finally:
        client.close()


def abandoned(host: LocalHost, folder: Path) -> None:
    """The writer is gone with the bytes of all parts written over and none of them sealed."""
    client = OwnerClient(host.paths.owner_sock("weights"), Role.LOADER, "test", timeout=120.0)
    begin_update(client, MODEL, mode="in_place", whole=True).write_folder(folder)
    client.close()


def updated(host: LocalHost, folder: Path, mode: str) -> None:
    """By the command; a stream goes on over it."""
    version = weights(host)[0].version
    running = long_stream(host)
    command = [sys.executable, "-m", "gpuowner.publish", MODEL, str(folder), "--mode", mode]
    done = subprocess.run(command, env=_own(host), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{MODEL} v{version + 1} is served" in done.stdout
    all_follow(host, version + 1)
    assert [row.digest for row in weights(host)] == laid_out(host, folder)
    whole(running)


def killed_before_its_commit(host: LocalHost, folder: Path) -> None:
    """A trainer in a process of its own that has written all of the next version beside the last one."""
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from belayer.paths import Paths\n"
        "from gpuowner.publish import publishing\n"
        f"with publishing(Paths(), {MODEL!r}, mode='swap', within_s=600.0) as update:\n"
        f"    update.write_folder(Path({str(folder)!r}))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", script], env=_own(host), timeout=180, check=False)
    assert died.returncode == -signal.SIGKILL


def _own(host: LocalHost) -> dict[str, str]:
    """Of a trainer's process on this host."""
    return {**os.environ, "BELAYER_ROOT": str(host.root), "PYTHONPATH": str(REPO)}
