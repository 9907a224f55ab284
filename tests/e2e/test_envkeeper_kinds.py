"""Kinds of programs that other checkpointers lose or get wrong: restored exactly, or refused by name (promise E4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from belayer.errors import BelayerError, CheckpointRefused
from belayer.sandbox import Sandbox
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker


@dataclass(frozen=True)
class Kind:
    """``service`` runs in the background and makes /up when it is ready; ``ask`` must answer ``answer`` afterwards."""

    name: str
    service: str
    ask: str
    answer: str


def python(body: str) -> str:
    """A python service; ``up()`` says that it is ready."""
    head = "import ctypes, fcntl, mmap, os, signal, socket, sqlite3, threading, time\n"
    head += "up = lambda: os.close(os.open('/up', os.O_CREAT))\n"
    return f"python3 - <<'E' </dev/null >/dev/null 2>/err &\n{head}{body}\nE\n".replace("<<'E' </dev/null", "<<'E'")


EXACT = [
    Kind(
        "established loopback TCP with an unread byte, and a listener",
        python("""
s = socket.create_server(("127.0.0.1", 9)); c = socket.create_connection(("127.0.0.1", 9)); a, _ = s.accept()
c.send(b"q"); up()
while not os.path.exists("/go"): time.sleep(0.01)
got = a.recv(1); a.send(b"r"); back = c.recv(1)
open("/out.tmp", "wb").write(got + back); os.rename("/out.tmp", "/out")
b = s.accept()[0]; b.send(b"hello"); b.close(); signal.pause()
"""),
        "touch /go; until [ -e /out ]; do sleep 0.01; done; cat /out; cat < /dev/tcp/127.0.0.1/9",
        "qrhello",
    ),
    Kind(
        "flock held",
        python("f = open('/k', 'w'); fcntl.flock(f, 2); up(); signal.pause()"),
        "python3 -c \"import fcntl; fcntl.flock(open('/k', 'w'), 6)\" 2>/dev/null || echo locked",
        "locked\n",
    ),
    Kind(
        "sqlite in the middle of a WAL transaction",
        python("""
c = sqlite3.connect("/d.db", isolation_level=None); c.execute("pragma journal_mode=wal"); c.execute("create table t(x)")
c.execute("begin immediate"); c.execute("insert into t values(1)"); up()
while not os.path.exists("/go"): time.sleep(0.01)
c.execute("commit"); os.close(os.open("/done", os.O_CREAT)); signal.pause()
"""),
        "q() { python3 -c \"import sqlite3; print(sqlite3.connect('/d.db').execute('$1').fetchone()[0])\"; }; "
        "q 'select count(*) from t'; touch /go; until [ -e /done ]; do sleep 0.01; done; "
        "q 'select count(*) from t'; q 'pragma integrity_check'",
        "0\n1\nok\n",
    ),
    Kind(
        "deleted but open file above a megabyte, its name used again",
        python("""
f = open("/g", "w+b"); f.write(b"x" * 5000000); f.flush(); os.unlink("/g"); open("/g", "w").write("new"); up()
while not os.path.exists("/go"): time.sleep(0.01)
f.seek(0); open("/out.tmp", "w").write(str(len(f.read()))); os.rename("/out.tmp", "/out"); signal.pause()
"""),
        "touch /go; until [ -e /out ]; do sleep 0.01; done; cat /out /g",
        "5000000new",
    ),
    Kind(
        "shared memory file with a mapping",
        python("""
f = open("/dev/shm/a", "w+b"); f.truncate(1 << 20); m = mmap.mmap(f.fileno(), 1 << 20); m[:3] = b"hey"; up()
while not os.path.exists("/go"): time.sleep(0.01)
m[3:6] = b"you"; os.close(os.open("/done", os.O_CREAT)); signal.pause()
"""),
        "touch /go; until [ -e /done ]; do sleep 0.01; done; head -c 6 /dev/shm/a",
        "heyyou",
    ),
    Kind(
        "many threads",
        python("[threading.Thread(target=time.sleep, args=(9000,)).start() for _ in range(8)]; up()"),
        "grep Threads /proc/$(pgrep -o python3)/status",
        "Threads:\t9\n",
    ),
    Kind(
        "a log that grows while it is captured",
        "(while :; do echo xxxxxxxx; sleep 0.002; done) >> /log & until [ -s /log ]; do :; done; touch /up",
        "n=$(wc -l < /log); until [ $(wc -l < /log) -gt $n ]; do :; done; grep -cv '^xxxxxxxx$' /log",
        "0\n",
    ),
    Kind(
        "an orphan of a finished action, and a service that writes to its action's output",
        "(sleep 1000 &) ; (while :; do echo noise; sleep 0.01; done) & echo $! > /noisy; touch /up",
        "pgrep -c sleep | awk '{ print ($1 >= 1) }'; kill -0 $(cat /noisy) && echo alive",
        "1\nalive\n",
    ),
    Kind(
        "image files changed, removed and hidden behind a new folder",
        "echo '#x' >> /usr/lib/os-release; rm -f /etc/issue.net; chmod 700 /usr/share; "
        "rm -rf /etc/apt; mkdir /etc/apt; : > /etc/apt/only; touch /up",
        "tail -1 /usr/lib/os-release; ls /etc/issue.net 2>/dev/null; stat -c %a /usr/share; ls /etc/apt",
        "#x\n700\nonly\n",
    ),
    Kind(
        "a unix socket and a pipe that work on",
        python("""
os.mkfifo("/f"); s = socket.socket(1); s.bind("/s"); s.listen(); up()
a, _ = s.accept(); a.send(b"hi"); a.close(); signal.pause()
"""),
        "python3 -c \"import socket; s = socket.socket(1); s.connect('/s'); print(s.recv(9).decode())\"; "
        "echo through > /f & cat /f",
        "hi\nthrough\n",
    ),
]

REFUSED = [
    (
        "stopped",
        "sleep 1000 & P=$!; kill -STOP $P; until grep -q 'T (stopped)' /proc/$P/status; do :; done",
        "is stopped",
    ),
    (
        "traced",
        python("""
p = os.fork()
if p == 0: time.sleep(9000)
ctypes.CDLL(None).ptrace(16, p, 0, 0); up(); time.sleep(9000)
""")
        + "until [ -e /up ]; do sleep 0.01; done",
        "is traced by pid",
    ),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("kinds"))
    yield found
    found.stop()


@pytest.fixture
def box(host: EnvHost) -> Iterator[Sandbox]:
    made = host.create()
    yield made
    try:
        made.destroy()
    except BelayerError:
        made.close()


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name.replace(" ", "-"))
def test_restored_exactly(host: EnvHost, box: Sandbox, kind: Kind) -> None:
    box.exec(kind.service)
    seen = box.exec("for i in $(seq 500); do [ -e /up ] && break; sleep 0.01; done; ls /up; cat /err 2>/dev/null")
    assert seen.stdout == "/up\n", seen
    box.checkpoint()
    proof = box.kill()
    assert "dead" in proof.seen
    box.restore()
    assert box.exec(kind.ask, timeout_s=20).stdout == kind.answer


@pytest.mark.parametrize(("name", "service", "why"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_by_name_and_the_sandbox_runs_on(box: Sandbox, name: str, service: str, why: str) -> None:
    box.exec("X=1")
    box.checkpoint()
    assert box.exec(service, timeout_s=20).exit_code == 0
    with pytest.raises(CheckpointRefused, match=why):
        box.checkpoint()
    assert box.exec("echo $X").stdout == "1\n"
    assert box.checkpoints().checkpoints[-1].boundary == 1
    assert box.restore()[0] == 1


def test_a_process_of_docker_exec_is_refused(host: EnvHost, box: Sandbox) -> None:
    import docker

    client = docker.APIClient()
    try:
        started = client.exec_create(host.info(box.sandbox_id).container_id, ["sleep", "1000"])
        client.exec_start(started["Id"], detach=True)
        eventually(lambda: client.exec_inspect(started["Id"])["Running"], what="the exec runs")
        with pytest.raises(CheckpointRefused, match="docker exec"):
            box.checkpoint()
        box.exec("kill -9 $(pgrep -x sleep)")
        eventually(lambda: not client.exec_inspect(started["Id"])["Running"], what="the exec ended")
    finally:
        client.close()
    box.checkpoint()
