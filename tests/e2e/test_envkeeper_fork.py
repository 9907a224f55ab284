"""Fork, rewind, fall back, again and again (promises E3, E4, E6): real Docker, real CRIU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from belayer.errors import BelayerError, CheckpointIncomplete, ClaimTaken, Refused, RestoreFailed, SandboxUnknown
from belayer.messages.sandbox import Birth, CheckpointInfo, CheckpointList, Lineages, ListCheckpoints, ListLineage
from belayer.rpc import call_sync
from belayer.sandbox import Sandbox
from belayer.story import Incidents
from belayer.trajectory import context_digest
from envkeeper.host import owner_of
from tests.support.envhost import TREE, EnvHost
from tests.support.ran import ran
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

COUNTER = "X=41; (i=0; while :; do i=$((i+1)); echo $i >> /log; sleep 0.01; done) & echo $! > /pid"
NO_GAP = (
    "kill -0 $(cat /pid) && n=$(wc -l < /log); while [ $(wc -l < /log) -le $n ]; do sleep 0.01; done; "
    "awk '$1 != NR { print \"gap at\", NR; exit 1 }' /log && echo no gap"
)


@pytest.fixture(scope="module")
def host() -> Iterator[EnvHost]:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        found = EnvHost.start(Path(folder))
        yield found
        found.stop()


@pytest.fixture
def box(host: EnvHost) -> Iterator[Sandbox]:
    made = host.create()
    yield made
    end(made)


def end(box: Sandbox) -> None:
    try:
        box.destroy()
    except BelayerError:
        box.close()


def kill(host: EnvHost, box: Sandbox) -> None:
    assert "dead" in box.kill().seen
    eventually(lambda: host.info(box.sandbox_id).state == "lost", what="the death is seen")


def spoil(host: EnvHost, box: Sandbox, made: CheckpointInfo, name: str = "criu/pstree.img") -> None:
    path = host.paths.checkpoints / box.sandbox_id / "ck" / made.checkpoint_id / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def stores(host: EnvHost) -> list[str]:
    return [path.name for path in host.paths.checkpoints.iterdir() if path.name != ".restores"]


def births(host: EnvHost, name: str) -> tuple[Birth, ...]:
    return call_sync(host.paths.envkeeper_sock, ListLineage(sandbox_id=name), Lineages).births[name]


def test_forks_share_one_checkpoint_and_go_their_own_ways(host: EnvHost, box: Sandbox) -> None:
    box.exec(COUNTER)
    box.exec("head -c 3000000 /dev/urandom > /big; sha256sum /big > /sum")
    made = box.checkpoint([{"role": "user", "content": "L2"}])
    box.exec("X=after; rm /big")
    forks = box.fork(4, note="the first attempt removed /big")
    try:
        ids = {box.sandbox_id, *(fork.sandbox_id for fork in forks)}
        assert len(ids) == 5
        for number, fork in enumerate(forks):
            assert (fork.boundary, fork.info.context_digest) == (2, made.context_digest)
            seen = fork.exec(
                f"echo $X; sha256sum -c /sum; cd /run/belayer; cat incarnation notes/0001; X={number}; {NO_GAP}"
            )
            told = f"{fork.sandbox_id}.1".ljust(63)
            assert seen.stdout == f"41\n/big: OK\n{told}\nthe first attempt removed /big" + "no gap\n"
        assert box.exec("echo $X").stdout == "after\n", "the source goes on as it was"
        assert [fork.exec("echo $X").stdout for fork in forks] == ["0\n", "1\n", "2\n", "3\n"]
        pages = [host.paths.checkpoints / name / "ck" / made.checkpoint_id / "upper.pack" for name in sorted(ids)]
        assert len({path.stat().st_ino for path in pages}) == 1, "one copy on disk"
        box.destroy()
        kill(host, forks[0])
        assert forks[0].restore() == (2, made.context_digest)
        assert forks[0].exec("echo $X").stdout == "41\n"
        kinds = [(birth.sandbox_id, birth.kind, birth.boundary) for birth in births(host, forks[0].sandbox_id)]
        mine = forks[0].sandbox_id
        assert kinds == [(box.sandbox_id, "created", 0), (mine, "forked", 2), (mine, "restored", 2)]
    finally:
        for fork in forks:
            end(fork)


def test_what_a_fork_is_refused_for(host: EnvHost, box: Sandbox) -> None:
    with pytest.raises(RestoreFailed, match="no READY"):
        box.fork()
    box.checkpoint()
    with pytest.raises(Refused, match="already"):
        box.fork(names=["fresh-1", box.sandbox_id])
    with pytest.raises(Refused, match="its own name"):
        box.fork(names=["twice", "twice"])
    with pytest.raises(RestoreFailed, match="cannot be read"):
        box.fork(checkpoint_id="k9-000000000000")
    spoil(host, box, box.checkpoint())
    with pytest.raises(BelayerError, match=r"criu/pstree.img"):
        box.fork(3)
    assert [name for name in host.listed() if name != box.sandbox_id] == [], "all of them or none"
    eventually(lambda: len(host.containers()) == 1, what="half-made forks are removed")
    eventually(lambda: sorted(stores(host)) == [box.sandbox_id], what="their stores, too")


def test_a_rewind_carries_its_note_and_moves_ready(host: EnvHost, box: Sandbox) -> None:
    box.exec("echo a > /x")
    first = box.checkpoint([{"k": 1}])
    box.exec("echo b > /x")
    second = box.checkpoint([{"k": 2}])
    note = "b was wrong: the test wants a"
    back = box.restore_info(first.checkpoint_id, note=note)
    assert (back.boundary, back.context_digest, back.notes) == (
        1,
        first.context_digest,
        (note,),
    )
    assert box.exec("cat /x /run/belayer/notes/*").stdout == "a\nb was wrong: the test wants a"
    kill(host, box)
    # What the rewind gave up is newer on disk, and must not come back.
    back = box.restore_info()
    assert back.checkpoint_id == first.checkpoint_id
    assert back.notes == (note,), "a later life is still told"
    third = box.checkpoint([{"k": 1}])
    spoil(host, box, third)
    kill(host, box)
    back = box.restore_info(note="and again")
    assert [step.split(":")[0] for step in back.path] == [third.checkpoint_id, first.checkpoint_id]
    assert second.checkpoint_id not in str(back.path), "another branch is no ancestor"
    assert box.exec("ls /run/belayer/notes").stdout == "0001\n0002\n"
    assert [birth.kind for birth in births(host, box.sandbox_id)] == ["created", "rewound", "restored", "restored"]
    env = {"BELAYER_ROOT": str(host.root), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    shown = ran(sys.executable, "-m", "belayerctl", "sandboxes", "--lineage", cwd=TREE, env=env)
    assert f"{box.sandbox_id}.2 rewound" in shown
    assert note in shown
    inside = box.exec("echo x > /run/belayer/incarnation; rm /run/belayer/notes/0001; touch /run/belayer/y; echo $?")
    assert inside.stdout == "1\n"
    assert inside.stderr.count("Read-only file system") == 3


def test_down_to_the_image_only_when_it_is_allowed(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=1; echo 1 > /x")
    first = box.checkpoint()
    box.exec("X=2")
    second = box.checkpoint()
    spoil(host, box, first)
    spoil(host, box, second, "upper.index")
    with pytest.raises(RestoreFailed, match="lives on"):
        box.restore()  # alive: hashes are compared before anything is touched
    assert box.exec("echo $X").stdout == "2\n"
    kill(host, box)
    with pytest.raises(RestoreFailed) as caught:
        box.restore()
    assert first.checkpoint_id in str(caught.value)
    assert second.checkpoint_id in str(caught.value)
    assert host.info(box.sandbox_id).state == "lost"
    back = box.restore_info(allow_base=True)
    assert (back.boundary, back.context_digest, back.checkpoint_id) == (0, "", "")
    assert len(back.path) == 3
    assert "image" in back.path[-1]
    assert box.exec('echo "$X"; ls /x').stdout == "\n"
    kill(host, box)
    with pytest.raises(RestoreFailed, match="no READY"):
        box.restore()  # the damaged ones are no state of this attempt


def test_ten_generations(host: EnvHost, box: Sandbox) -> None:
    box.exec(COUNTER)
    for generation in range(1, 11):
        box.exec(f"Y=${{Y}}{generation % 10}; echo {generation} >> /gen")
        context = [{"generation": generation}]
        box.checkpoint(context)
        boundary = box.boundary
        box.exec("echo lost >> /gen; Y=lost")
        kill(host, box)
        assert box.restore() == (boundary, context_digest(context))
    seen = box.exec(f"echo $X $Y $(cat /gen); {NO_GAP}; cat /run/belayer/incarnation")
    assert seen.stdout.split("\n")[:2] == ["41 1234567890 1 2 3 4 5 6 7 8 9 10", "no gap"]
    assert seen.stdout.strip().endswith(f"{box.sandbox_id}.11")
    eventually(lambda: len(host.containers()) == 1, what="one container is left")
    assert len(box.checkpoints().checkpoints) == 4
    eventually(lambda: len(list((host.root / "run" / "lives").iterdir())) == 1, what="one life is left")


def test_a_container_has_one_life(host: EnvHost, box: Sandbox) -> None:
    """A second `docker start` would run the image's command over the files of a life that has ended."""
    box.exec("X=3")
    box.checkpoint()
    for _ in range(2):
        container = host.info(box.sandbox_id).container_id
        kill(host, box)
        eventually(lambda container=container: not runs(container), what="Docker has seen it end, too")
        done = subprocess.run(["docker", "start", container], capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "started before" in done.stderr
        assert not runs(container)
        box.restore()
        assert box.exec("echo $X").stdout == "3\n"


def runs(container: str) -> bool:
    client = docker.APIClient(timeout=300)
    try:
        return bool(client.inspect_container(container)["State"]["Running"])
    finally:
        client.close()


def test_nothing_in_an_image_can_select_a_checkpoint(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=stolen")
    made = box.checkpoint()
    images = host.paths.checkpoints / box.sandbox_id / "ck" / made.checkpoint_id / "criu"
    changes = [
        f"ENV images={images} BELAYER_CLAIM={images} org.criu.config={images}",
        f"LABEL images={images} belayer.claim={images}",
    ]
    flags = [word for change in changes for word in ("--change", change)]
    container = host.info(box.sandbox_id).container_id
    ran("docker", "commit", *flags, container, "belayer-test-hostile")
    try:
        other = Sandbox.create("belayer-test-hostile", paths=host.paths)
        try:
            assert other.exec('echo "[$X]"').stdout == "[]\n"
        finally:
            end(other)
    finally:
        ran("docker", "image", "rm", "-f", "belayer-test-hostile")


RACER = """
import sys
from pathlib import Path
from belayer.errors import ClaimTaken
from belayer.paths import Paths
from belayer.sandbox import Sandbox
box = Sandbox.attach(sys.argv[2], paths=Paths(sys.argv[1]))
print("there", flush=True)
sys.stdin.readline()
try:
    print(box.restore_info().incarnation)
except ClaimTaken:
    print("taken")
"""


def test_racing_processes_get_one_winner(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=7")
    box.checkpoint()
    kill(host, box)
    command = [sys.executable, "-c", RACER, str(host.root), box.sandbox_id]
    racers = [
        subprocess.Popen(command, cwd=TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "there\n"
    said = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    for racer in racers:
        said.append(racer.communicate(timeout=300)[0].strip())
    assert sorted(said) == [f"{box.sandbox_id}.2", "taken", "taken", "taken"]
    with pytest.raises(ClaimTaken):
        box.restore()


def test_checkpoints_outlive_their_sandbox_when_they_are_kept(host: EnvHost) -> None:
    box = host.create(name="kept")
    box.exec("X=12")
    made = box.checkpoint()
    box.destroy(keep_checkpoints=True)
    with pytest.raises(Refused, match="are kept"):
        host.create(name="kept")
    listed = call_sync(host.paths.envkeeper_sock, ListCheckpoints(sandbox_id="kept"), CheckpointList)
    assert listed.ready == made.checkpoint_id
    other = host.create(name="other")
    try:
        (fork,) = Sandbox.fork_of("kept", names=["again"], paths=host.paths)
        assert fork.exec("echo $X").stdout == "12\n"
        end(fork)
        host.destroy("kept")
        with pytest.raises(SandboxUnknown):
            Sandbox.fork_of("kept", paths=host.paths)
        end(host.create(name="kept"))
    finally:
        end(other)


def test_deaths_are_incidents_also_when_the_daemons_are_down(host: EnvHost, box: Sandbox) -> None:
    box.exec("true")
    box.checkpoint()
    kill(host, box)
    box.restore()
    lost = host.create()
    name = lost.sandbox_id
    kill(host, lost)
    host.kill()
    env = {"BELAYER_ROOT": str(host.root), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    shown = ran(sys.executable, "-m", "belayerctl", "incidents", "--steps", cwd=TREE, env=env)
    assert box.sandbox_id in shown
    assert "proof" in shown
    host.restart()
    store = Incidents(host.paths.incidents)
    rows = {row.slot: row for row in store.latest()}
    store.close()
    assert rows[box.sandbox_id].outcome == "restored at boundary 1"
    assert (rows[box.sandbox_id].injected, rows[box.sandbox_id].cause) == (True, "sandbox_lost")
    assert {"fence", "start", "proof", "tried"} <= {step.step for step in rows[box.sandbox_id].steps}
    assert rows[name].outcome == "open"
    host.destroy(name)
    store = Incidents(host.paths.incidents)
    assert {row.slot: row.outcome for row in store.latest()}[name] == "destroyed"
    store.close()
    lost.close()


def test_a_budget_that_cannot_be_met_refuses_by_name_and_secrets_are_sealed() -> None:
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        root = Path(folder)
        key = root / "key"
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
        host = EnvHost.start(root, f'disk_budget_mb = 60\nkeep_checkpoints = 9\nencrypt_key_file = "{key}"\n')
        try:
            box = host.create(name="one")
            box.exec("head -c 16777216 /dev/urandom > /big; SECRET=hunter2-in-memory")
            ids = [box.checkpoint().checkpoint_id for _ in range(3)]
            grep = subprocess.run(["grep", "-rqF", "hunter2-in-memory", host.paths.checkpoints], check=False)
            assert grep.returncode == 1, "no plain memory in the store"
            fourth = box.checkpoint().checkpoint_id
            left = [row.checkpoint_id for row in box.checkpoints().checkpoints]
            assert fourth in left
            assert ids[0] not in left, "the oldest made room"
            box.exec("head -c 60000000 /dev/urandom > /bigger")
            with pytest.raises(CheckpointIncomplete, match="disk budget of 60 MiB"):
                box.checkpoint()
            assert host.info("one").ready_checkpoint == fourth
            half = host.paths.checkpoints / "one" / "tmp"
            eventually(lambda: not list(half.iterdir()), what="nothing is half written")
            assert box.exec("echo $SECRET").stdout == "hunter2-in-memory\n"
            kill(host, box)
            assert box.restore_info().checkpoint_id == fourth
            assert box.exec("echo $SECRET; ls /bigger 2>&1 | wc -l").stdout == "hunter2-in-memory\n1\n"
            shm, plain = Path("/dev/shm"), f"belayer-{owner_of(host.paths)}/one/**/*"
            eventually(lambda: not [path for path in shm.glob(plain) if path.is_file()], what="nothing plain is left")
            forks = box.fork(2)
            assert [fork.exec("echo $SECRET").stdout for fork in forks] == ["hunter2-in-memory\n"] * 2
            for name in host.listed():
                host.destroy(name)
            scratch_of = Path("/dev/shm") / f"belayer-{owner_of(host.paths)}"
            assert scratch_of.is_dir()
        finally:
            host.stop()
        assert not scratch_of.exists()
