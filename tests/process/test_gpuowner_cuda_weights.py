"""From a configuration with ``device = "gpu"`` and ``memory = "cuda_vmm"`` to a worker that has its parameters: the
real daemons of both owners, their holders and a publisher, over a stand-in for libcuda below the real bindings."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from belayer.messages import owner as m
from gpuowner.store import end_holder
from tests.contract.test_memory_backend import no_gpu
from tests.process.test_gpuowner_cuda import SIZE, Host
from tests.support import versions as v
from tests.support.wait import eventually

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler: the stand-in for libcuda cannot be built"),
    pytest.mark.skipif(not no_gpu(), reason="a real driver is here: it would be used in place of the stand-in"),
]

SHAPES = {"embed.weight": (32, 16), "norm.weight": (16,)}
PUBLISH = """
import sys
from pathlib import Path
from belayer.messages.owner import Role
from gpuowner.attach import OwnerClient
from gpuowner.update import begin_update
update = begin_update(OwnerClient(Path(sys.argv[1]), Role.LOADER, "trainer", 60.0), "m", whole=True)
update.write_folder(Path(sys.argv[2]))
print(update.commit().version, flush=True)
"""


def make_model(folder: Path, value: float) -> Path:
    """bf16; every item of a tensor is ``value``, or one more. The head is tied and in no file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"tie_word_embeddings": true}')
    content = {
        name: (np.full(shape, value + at, dtype="<f4").view("<u4") >> 16).astype("<u2")
        for at, (name, shape) in enumerate(SHAPES.items())
    }
    v.save(folder / "model.safetensors", content, "BF16")
    return folder


class Both(Host):
    """Both owners; the one of weights starts when there is a model to load."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        make_model(root / "model", 1.0)
        text = self.config.read_text().replace('name = "m"', 'name = "m"\ndtype = "bfloat16"', 1)
        self.paths.config.write_text(text)
        self.weights = self.start_weights()

    def start_weights(self) -> subprocess.Popen[str]:
        return self.run("gpuowner", "--kind", "weights", "--config", str(self.paths.config))

    def model(self) -> m.WeightsInfo:
        client = self.client("weights")
        status, _ = client.call(m.OwnerStatus(), m.OwnerStatusReply)
        client.close()
        assert status.backend == "cuda_vmm"
        return status.weights[0]

    def close(self) -> None:
        super().close()
        end_holder(self.paths.owner_holder_sock("weights"))


@pytest.fixture
def host() -> Iterator[Both]:
    made = Both(Path(tempfile.mkdtemp(prefix="blc-", dir="/tmp")))
    yield made
    made.close()


def ask(worker: subprocess.Popen[str], word: str) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    if word:
        worker.stdin.write(word + "\n")
        worker.stdin.flush()
    said: dict[str, Any] = json.loads(worker.stdout.readline())
    return said


def values(value: float) -> dict[str, list[float]]:
    return {name: [value + at] for at, name in enumerate(SHAPES)}


def test_a_worker_of_a_gpu_slot_has_its_parameters_and_follows_its_owner(host: Both) -> None:
    assert (host.model().state, host.model().version) == ("sealed", 1)
    host.client("kv").close()
    for owner in (host.owner, host.weights):
        assert "libcuda" not in Path(f"/proc/{owner.pid}/maps").read_text(), "an owner loads no driver"
    worker = host.run("tests.support.gpu_model_worker", str(host.root), "main")
    assert ask(worker, "") == {"standby": True}
    first = ask(worker, "look")
    assert (first["version"], first["views"], first["values"]) == (1, 2, values(1.0))
    assert [(row.who, row.pid) for row in host.model().readers] == [("main", worker.pid)]
    assert ask(worker, "promote") == {"epoch": host.arena().epoch}
    assert (host.arena().state, host.arena().nbytes) == ("leased", SIZE)

    newer = make_model(host.root / "newer", 5.0)
    publisher = host.script(PUBLISH, str(host.paths.owner_sock("weights")), str(newer))
    assert publisher.communicate(timeout=300)[0] == "2\n", (host.root / "log").read_text()[-2000:]
    assert ask(worker, "look")["values"] == values(1.0), "its version, until it is told to follow"
    assert ask(worker, "follow") == {"was": 1, "now": 2, "remapped": True}
    second = ask(worker, "look")
    assert second["values"] == values(5.0)
    assert (second["va"], second["addresses"]) == (first["va"], first["addresses"]), "no parameter moved"

    digest = host.model().digest
    host.weights.kill()
    host.weights.communicate()
    assert ask(worker, "look")["values"] == values(5.0), "without an owner"
    host.weights = host.start_weights()
    info = host.model()
    assert (info.state, info.version, info.digest) == ("sealed", 2, digest), "adopted, and read again by a child"
    eventually(lambda: [row.who for row in host.model().readers] == ["main"], what="the worker rejoins")
    assert ask(worker, "follow") == {"was": 2, "now": 2, "remapped": False}
