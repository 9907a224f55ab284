"""Restore, act, checkpoint, die, ten times in a row: nothing adds up, nothing wears off (promises E3, E4)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from belayer.trajectory import context_digest
from tests.e2e.test_envkeeper import kill
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

# Counts in memory and in a file, and holds what CRIU has to bring back each time: a lock, a connection, a timer.
SERVICE = """
import fcntl, os, select, socket, sys, time
lock = open('/lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)
server = socket.create_server(('127.0.0.1', 7000))
one = socket.create_connection(('127.0.0.1', 7000)); two = server.accept()[0]
log = os.open('/log', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
n = 0
while True:
    n += 1
    one.send(b'%d' % n)
    assert two.recv(99) == b'%d' % n
    os.write(log, b'%d\\n' % n)
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("gen"), "keep_checkpoints = 3\n")
    yield found
    found.stop()


def test_ten_generations(host: EnvHost) -> None:
    box = host.create()
    box.exec(f"cat >/service.py <<'E'\n{SERVICE}\nE\n")
    box.exec("python3 /service.py >/service.out 2>&1 & echo $! >/pid; G=0; until [ -s /log ]; do sleep 0.02; done")
    images = []
    for generation in range(1, 11):
        # What every generation starts is in the next one's checkpoint, with what the ones before it have started.
        box.exec(f"G=$((G+1)); sleep 1000 & echo $! >/sleeper-{generation}; mkdir /g{generation}; cd /g{generation}")
        context = [{"role": "user", "content": str(generation)}]
        made = box.checkpoint(context)
        images.append(made.nbytes)
        box.exec("G=lost; rm -rf /g1; kill $(cat /pid)")
        kill(host, box)
        assert box.restore() == (made.boundary, context_digest(context))
        seen = box.exec(
            'echo "$G $PWD $(ls -d /g* | wc -l) $(cat /sleeper-* | xargs -n 1 kill -0 && echo alive)"; '
            "n=$(wc -l </log); until [ $(wc -l </log) -gt $n ]; do sleep 0.01; done; "
            "awk '$1 != NR { print \"gap at\", NR; exit 1 }' /log && flock -n /lock true || echo locked"
        )
        assert seen.stdout == f"{generation} /g{generation} {generation} alive\nlocked\n", (generation, seen)
        assert host.info(box.sandbox_id).incarnation == f"{box.sandbox_id}.{generation + 1}"
    # Ten sleepers more and a little log: the images of a generation do not contain those before it.
    assert images[-1] < 2 * images[0]
    assert len(box.checkpoints().checkpoints) == 3
    eventually(lambda: len(host.containers()) == 1, what="the containers of the old lives are removed")
    restores = host.paths.checkpoints / ".restores"
    eventually(lambda: not [path for path in restores.iterdir() if path.is_dir()], what="no restore has left a thing")
    (manifest, *_) = (host.paths.checkpoints / box.sandbox_id / "ck").glob("*/manifest.json")
    versions = json.loads(manifest.read_text())["versions"]
    tools = "docker containerd runc criu kernel agent_sha256 runtime_sha256 criu_settings_sha256 seccomp engine_path"
    assert [name for name in tools.split() if not versions.get(name)] == []
    box.destroy()
    eventually(lambda: host.containers() == [], what="no container is left")
