"""PID 1 of a sandbox, driven through envkeeper: sessions, programs, users, limits, and images with nothing in them."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from belayer.errors import BelayerError, CheckpointRefused, Refused, SandboxLost
from belayer.sandbox import Sandbox
from envkeeper.usage import disk_bytes, groups
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

EMPTY = "belayer-test:empty"
PROBE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char where[256], in[64] = "";
    if (argc > 1 && strcmp(argv[1], "serve") == 0) {
        if (fork()) return 0;
        setsid();
        for (int i = 0; ; i++, usleep(2000)) { FILE *f = fopen("/n", "w"); fprintf(f, "%d\n", i); fclose(f); }
    }
    read(0, in, sizeof in - 1);
    fprintf(stderr, "err\n");
    printf("%d %s %s %s\n", getuid(), getcwd(where, sizeof where), getenv("K") ? getenv("K") : "-", in);
    return 3;
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("agent"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def shared(host: EnvHost) -> Iterator[Sandbox]:
    """One sandbox for what leaves nothing behind; each test takes sessions of its own."""
    made = host.create()
    yield made
    end(made)


@pytest.fixture
def box(host: EnvHost) -> Iterator[Sandbox]:
    made = host.create(pids=64)
    yield made
    end(made)


def end(box: Sandbox) -> None:
    try:
        box.destroy()
    except BelayerError:
        box.close()


def again(box: Sandbox) -> None:
    box.checkpoint()
    box.kill()
    box.restore()


# ---- sessions ----


def test_each_session_keeps_its_own_shell(shared: Sandbox) -> None:
    shared.exec("X=1; cd /var", session="one")
    shared.exec("X=2", session="two", cwd="/usr", env={"K": "it's $5"})
    assert shared.exec('echo "$X $PWD $K"', session="one").stdout == "1 /var \n"
    assert shared.exec('echo "$X $PWD $K"', session="two").stdout == "2 /usr it's $5\n"
    assert shared.exec('echo "[$X]"', session="three").stdout == "[]\n"


def test_a_directory_that_is_not_there_fails_the_action(shared: Sandbox) -> None:
    seen = shared.exec("touch /must-not-be", session="dir", cwd="/no/where")
    assert (seen.exit_code, shared.exec("ls /must-not-be").exit_code) == (1, 2)
    assert "/no/where" in seen.stderr
    assert shared.exec(["true"], cwd="/no/where").exit_code == 126


def test_a_session_keeps_its_user_while_its_shell_lives(shared: Sandbox) -> None:
    assert shared.exec("id -un; cd /tmp; X=7", session="u", user="nobody").stdout == "nobody\n"
    with pytest.raises(Refused, match="another user"):
        shared.exec("id", session="u", user="root")
    assert shared.exec('id -un; echo "$X $PWD"', session="u", user="nobody").stdout == "nobody\n7 /tmp\n"
    shared.exec("exit 0", session="u", user="nobody")
    assert shared.exec("id -un", session="u", user="root").stdout == "root\n"


def test_a_shell_that_cannot_be_marked_is_refused_and_not_let_loose(shared: Sandbox) -> None:
    """What it starts could not be told from what others have left behind, so no timeout would find it."""
    shared.exec("ulimit -x 5", session="odd")
    with pytest.raises(Refused, match="cannot be told apart"):
        shared.exec("sleep 70", session="odd", timeout_s=0.2)


def test_sessions_are_bounded_and_one_that_ended_makes_room(shared: Sandbox) -> None:
    opened, said = list[str](), ""
    while not said:
        assert len(opened) < 20
        try:
            shared.exec("true", session=f"s{len(opened)}")
            opened.append(f"s{len(opened)}")
        except Refused as why:
            said = str(why)
    assert "too many sessions" in said
    assert shared.exec("exit 3", session=opened[0]).session_ended
    assert shared.exec("echo in", session="one more").stdout == "in\n"
    for name in [*opened[1:], "one more"]:
        shared.exec("exit 0", session=name)


def test_without_bash_a_session_is_a_plain_sh(box: Sandbox) -> None:
    box.exec(["rm", "/bin/bash"])
    assert box.exec("X=5; echo $0; sleep 100 & echo more").stdout == "sh\nmore\n"
    assert box.exec("sleep 60; touch /never", timeout_s=0.3).exit_code == 124
    assert box.exec('echo "[$X]"; ls /never').stdout == "[]\n"


# ---- programs, users, input ----


@pytest.mark.parametrize("direct", [True, False])
def test_user_directory_environment_and_input(shared: Sandbox, direct: bool) -> None:
    code = "import os,sys; print(os.getuid(), os.getgid(), os.getcwd(), os.environ['K'], sys.stdin.buffer.read())"
    words = ["python3", "-c", code]
    command: str | list[str] = words if direct else f'python3 -c "{code}"'
    session = "" if direct else "io"
    seen = shared.exec(command, session=session, user="nobody:daemon", cwd="/tmp", env={"K": "a b"}, stdin=b"\0\xff")
    assert (seen.stdout, seen.stderr, seen.exit_code) == ("65534 1 /tmp a b b'\\x00\\xff'\n", "", 0)
    numeric = shared.exec(["id", "-u"] if direct else "id -u", session=f"{session}n" if session else "", user="4711")
    assert numeric.stdout == "4711\n"


def test_large_input_arrives_whole(shared: Sandbox) -> None:
    data = os.urandom(5 << 20)
    assert shared.exec(["sha256sum"], stdin=data).stdout.split()[0] == hashlib.sha256(data).hexdigest()


def test_programs_tell_code_and_signal(shared: Sandbox) -> None:
    seen = [shared.exec(argv) for argv in (["false"], ["sh", "-c", "kill -9 $$"], ["no-such-program"], ["/etc"])]
    assert [(row.exit_code, row.signal) for row in seen] == [(1, 0), (137, 9), (127, 0), (126, 0)]
    assert "no-such-program" in seen[2].stderr


def test_what_cannot_begin_is_refused_and_the_boundary_stays(shared: Sandbox) -> None:
    before = shared.boundary
    for asked, word in (
        ({"user": "nobody-knows"}, "no such user"),
        ({"user": "root:no-group"}, "no such group"),
        ({"session": "x" * 40}, "too long"),
        ({"env": {"A B": ""}}, "no name of a variable"),
        ({"stdin": bytes(9 << 20)}, "over the cap"),
    ):
        with pytest.raises(Refused, match=word):
            shared.exec("true", **asked)  # type: ignore[arg-type]
    assert shared.exec("echo on").boundary == before + 1


def test_an_action_tells_what_it_used(shared: Sandbox) -> None:
    code = "x = bytearray(100 << 20)\nfor _ in range(3): x = bytes(x)\nsum(range(3_000_000))"
    direct = shared.exec(["python3", "-c", code])
    assert direct.usage.max_rss_kb > 100 << 10
    session = shared.exec(f"python3 -c '{code}'")
    for seen in (direct, session):
        spent = seen.usage.user_s + seen.usage.system_s
        assert 0.05 < spent < 60
        assert seen.usage.sandbox_cpu_s > 0.5 * spent
    assert shared.exec("true").usage.user_s < 0.05
    if direct.usage.sandbox_peak_bytes:  # cgroup v2 before Linux 6.12 does not tell
        assert direct.usage.sandbox_peak_bytes > 100 << 20


def test_an_action_of_another_user_leaves_no_process(shared: Sandbox) -> None:
    shared.exec("true", session="left", user="games")
    shared.exec("true", session="left", user="games")
    assert shared.exec(["pgrep", "-c", "-u", "games"]).stdout == "1\n"  # its shell
    shared.exec("exit 0", session="left", user="games")
    gone = "until [ $(pgrep -c -u games) = 0 ]; do :; done"
    assert shared.exec(gone, session="look", timeout_s=60).exit_code == 0
    shared.exec("exit 0", session="look")


# ---- the end of an action ----

ESCAPES = {
    "child": "sleep 71 & sleep 70",
    "setsid": "setsid sleep 71 & sleep 70",
    "double fork": "(setsid sh -c '(sleep 71 >/dev/null 2>&1 </dev/null &)' &) ; sleep 70",
    "daemon": 'python3 -c "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); '
    "os.closerange(0, 99); os.execvp('sleep', ['sleep', '71'])\"; sleep 70",
    "deaf": "sh -c 'trap \"\" TERM INT HUP; sleep 71; sleep 71' & sleep 70",
    "stopped": "sleep 71 & kill -STOP $!; sleep 70",
    "busy shell": "sleep 71 & while :; do :; done",
}


@pytest.mark.parametrize("how", ESCAPES)
@pytest.mark.parametrize("user", ["", "nobody"])
def test_a_timeout_takes_everything_that_it_started(box: Sandbox, how: str, user: str) -> None:
    # A service of a finished action that starts new children all the time, also inside the action that is killed.
    box.exec("nohup sh -c 'while :; do sleep 0.01; echo > /tmp/beat; done' >/dev/null 2>&1 & echo $! > /service")
    seen = box.exec(ESCAPES[how], session="k", user=user, timeout_s=0.5)
    assert (seen.timed_out, seen.exit_code, seen.session_ended) == (True, 124, True)
    assert box.exec("pgrep -a 'sleep|python3' | grep ' 7'").stdout == ""
    check = "rm -f /tmp/beat; kill -0 $(cat /service) && until [ -e /tmp/beat ]; do sleep 0.01; done; echo serves"
    assert box.exec(check, timeout_s=60).stdout == "serves\n"
    assert box.exec("id -u", session="k", user=user).exit_code == 0


def test_a_fork_bomb_ends_with_its_action(box: Sandbox) -> None:
    seen = box.exec("f() { f | f; }; f; sleep 60", timeout_s=2)
    assert seen.timed_out
    few = "until [ $(pgrep -c .) -le 3 ]; do :; done"  # agent, shell: once the last orphan is reaped
    assert box.exec(few, timeout_s=60).exit_code == 0
    assert box.exec("echo usable").stdout == "usable\n"


def test_memory_that_runs_out_costs_the_action_and_not_the_sandbox(host: EnvHost) -> None:
    box = host.create(memory_mb=64)
    try:
        assert box.exec("true").limit == ""
        seen = box.exec("python3 -c 'x = bytearray(200 << 20)'")
        assert (seen.exit_code, seen.limit) == (137, "memory: 1 killed at 64 MiB")
        seen = box.exec("head -c 200M /dev/zero | tail | wc -c")  # it ends well, and its answer is wrong
        assert (seen.exit_code, seen.stdout, seen.limit[:8]) == (0, "0\n", "memory: ")
        many = "import os\nfor _ in range(4): os.fork()\nx = bytearray(8 << 20)\nx[::4096] = b'x' * 2048\nos.wait()"
        seen = box.exec(f'python3 -c "{many}"', timeout_s=60)
        assert seen.usage.sandbox_peak_bytes in (0, 64 << 20)  # the limit was reached, where the kernel tells
        assert box.exec("echo on").stdout == "on\n"  # what the last one left may be killed beside it
    finally:
        end(box)


def test_a_direct_program_that_hangs_is_killed_with_its_children(box: Sandbox) -> None:
    seen = box.exec(["sh", "-c", "setsid sleep 71 & sleep 70"], timeout_s=0.5)
    assert (seen.exit_code, seen.timed_out, seen.session_ended) == (124, True, False)
    assert box.exec("until [ $(pgrep -c sleep) = 0 ]; do :; done", timeout_s=60).exit_code == 0


def test_growth_beyond_the_disk_limit_ends_the_action_by_name(host: EnvHost) -> None:
    box = host.create(disk_mb=20)
    try:
        seen = box.exec("head -c 60000000 /dev/zero > /big; sleep 60; echo never", timeout_s=50)
        assert (seen.exit_code, seen.timed_out, seen.stdout) == (124, False, "")
        assert seen.limit.startswith("disk: ")
        seen = box.exec("rm /big; sleep 1.5; echo room again")
        assert (seen.stdout, seen.limit) == ("room again\n", "")
        box.checkpoint()
        # What grows between its actions is told at the end of the next one.
        box.exec("(sleep 0.5; head -c 60000000 /dev/zero > /big) >/dev/null 2>&1 &")
        upper = upper_of(host, box)
        eventually(lambda: disk_bytes(upper) >= 60_000_000, what="the writer has written")
        seen = box.exec("echo told")
        assert (seen.stdout, seen.exit_code, seen.limit[:6]) == ("told\n", 0, "disk: ")
        box.checkpoint()  # what was done until here is worth more than its disk
    finally:
        end(box)


def test_what_runs_inside_cannot_end_pid_1_and_who_stops_from_outside_can(box: Sandbox, host: EnvHost) -> None:
    forged = """import ctypes, os
libc, info = ctypes.CDLL(None, use_errno=True), bytearray(128)
for code in (-1, 0):  # SI_QUEUE as nobody (taken, and no order to end); SI_USER as nobody: refused by the kernel
    info[0:4], info[8:12] = (15).to_bytes(4, "little"), code.to_bytes(4, "little", signed=True)
    print(libc.syscall(129, 1, 15, (ctypes.c_char * 128).from_buffer_copy(info)), ctypes.get_errno())
"""
    assert box.exec("kill -INT 1; kill -TERM 1; kill -HUP 1; echo sent").stdout == "sent\n"
    if os.uname().machine == "x86_64":  # the number of the call
        assert box.exec(["python3", "-c", forged]).stdout.split() == ["0", "0", "-1", "1"]
    assert box.exec("echo on").stdout == "on\n"
    container = host.info(box.sandbox_id).container_id
    client = docker.APIClient(timeout=300)
    try:
        client.kill(container, "TERM")
        eventually(lambda: host.info(box.sandbox_id).state == "lost", what="it has ended")
        eventually(lambda: not client.inspect_container(container)["State"]["Running"], what="Docker knows")
        assert client.inspect_container(container)["State"]["ExitCode"] == 0
    finally:
        client.close()


def test_what_an_action_takes_away_from_its_sandbox_is_named(box: Sandbox) -> None:
    box.exec("true", session="before")
    box.exec("chmod 000 $(readlink -f /bin/bash) $(readlink -f /bin/sh)", session="before")
    with pytest.raises(Refused, match=r"/bin/bash cannot be run \(Permission denied\)"):
        box.exec("true", session="after")
    box.exec("rm /run/belayer-agent.sock", session="before")
    with pytest.raises(SandboxLost, match=r"No such file or directory at /run/belayer-agent\.sock, .* its PID 1 lives"):
        box.exec("true", session="before")


# ---- over a restore ----


FULL = """
import mmap, os, time
if os.fork(): os._exit(0)
os.setsid()
while not os.path.exists("/go"): time.sleep(0.02)
try:
    while True:
        if not os.fork(): time.sleep(100000)
except OSError: pass
name = "/sys/fs/cgroup/memory/memory.%s_in_bytes"
used, most = (name % "usage", name % "limit") if os.path.exists(name % "usage") else (
    "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.max")
kept, page = [], os.urandom(4096)
while int(open(used).read()) < int(open(most).read()) - (2 << 20):
    kept.append(mmap.mmap(-1, 1 << 18, flags=mmap.MAP_PRIVATE))
    for at in range(0, 1 << 18, 4096): kept[-1][at:at + 4096] = page
print(file=open("/full", "w"))
time.sleep(100000)
"""


def test_a_sandbox_at_its_limits_comes_back_below_them(host: EnvHost) -> None:
    """A restore runs below the limits of the sandbox: of those, it needs more than the life that was captured."""
    box = host.create(pids=24, memory_mb=64, cpus=0.5)
    try:
        box.exec("true")  # its shell waits, without a process more
        before = limits_of(host, box)
        box.exec(["python3", "-c", FULL])
        box.exec(": > /go")  # now that who began it is gone
        eventually(lambda: (upper_of(host, box) / "full").exists(), what="its limits are met")
        assert int(limits_of(host, box)["pids.current"]) == 24
        wanted = box.checkpoint()
        box.kill()
        back = box.restore_info()
        assert back.path == (f"{wanted.checkpoint_id}: restored",)
        after = limits_of(host, box)
        assert int(after["pids.current"]) == 24
        assert (after["pids"], after["cpu"]) == (before["pids"], before["cpu"])
        more = int(after["memory"]) - int(before["memory"])  # forks share less when they come back
        assert more == 0 or (0 < more < 24 << 20 and "limit of memory" in back.proof)
        with pytest.raises(Refused, match="limit of processes"):
            box.exec("true", session="one more")
        assert box.exec("kill -KILL -1; echo room").exit_code in (0, 137)
        eventually(lambda: int(limits_of(host, box)["pids.current"]) < 5, what="they are gone")
        assert box.exec("echo on").stdout == "on\n"
    finally:
        end(box)


def limits_of(host: EnvHost, box: Sandbox) -> dict[str, str]:
    found = groups(host.info(box.sandbox_id).pid)
    names = {"pids": "pids.max", "pids.current": "pids.current", "cpu": "cpu.max", "memory": "memory.max"}
    if "memory" in found:
        names |= {"cpu": "cpu.cfs_quota_us", "memory": "memory.limit_in_bytes"}
    shelf = {key: found.get(key.split(".")[0], found.get("")) for key in names}
    return {key: (folder / names[key]).read_text().strip() for key, folder in shelf.items() if folder}


def upper_of(host: EnvHost, box: Sandbox) -> Path:
    client = docker.APIClient(timeout=300)
    try:
        seen = client.inspect_container(host.info(box.sandbox_id).container_id)
    finally:
        client.close()
    return Path(seen["GraphDriver"]["Data"]["UpperDir"])


def test_sessions_and_services_come_back(box: Sandbox) -> None:
    box.exec("X=1; cd /var; sleep 1000 & echo $! > /pid", session="a")
    box.exec("Y=2; cd /usr", session="b")
    for generation in range(2):
        again(box)
        assert box.exec('echo "$X $PWD"; kill -0 $(cat /pid) && echo lives', session="a").stdout == "1 /var\nlives\n"
        assert box.exec('echo "$Y $PWD"', session="b").stdout == "2 /usr\n", generation
    # Marks are as exact after a restore: what the restored service is, a timeout does not take.
    assert box.exec("setsid sleep 71 & sleep 70", session="a", timeout_s=0.4).timed_out
    assert box.exec("kill -0 $(cat /pid) && until [ $(pgrep -c sleep) = 1 ]; do :; done", timeout_s=60).exit_code == 0


def test_the_shell_of_another_user_comes_back_or_is_refused_by_name(box: Sandbox) -> None:
    box.exec("Y=2; cd /usr", session="b", user="nobody")
    if not may_dump_other_users():
        with pytest.raises(CheckpointRefused, match="other_user"):
            box.checkpoint()
        box.exec("exit 0", session="b", user="nobody")
        again(box)
        return
    again(box)
    assert box.exec('echo "$Y $PWD"; id -un', session="b", user="nobody").stdout == "2 /usr\nnobody\n"


def may_dump_other_users() -> bool:
    """CRIU reads limits of processes of other users, for which the kernel wants CAP_SYS_RESOURCE (bit 24)."""
    status = Path("/proc/self/status").read_text()
    held = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(held.split()[1], 16) >> 24 & 1)


# ---- an image with nothing in it ----


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(PROBE)
    subprocess.run(["musl-gcc", "-static", "-o", folder / "probe", folder / "probe.c"], check=True)
    return folder / "probe"


@pytest.fixture(scope="module")
def empty() -> Iterator[str]:
    client = docker.APIClient(timeout=300)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w"):
        pass
    client.import_image_from_data(data.getvalue(), repository=EMPTY.split(":")[0], tag=EMPTY.split(":")[1])
    yield EMPTY
    client.remove_image(EMPTY, force=True)
    client.close()


def test_an_empty_image_is_enough(host: EnvHost, empty: str, probe: Path) -> None:
    box = Sandbox.create(empty, paths=host.paths)
    try:
        with pytest.raises(Refused, match="no bash and no sh"):
            box.exec("echo hi")
        assert box.boundary == 0
        box.upload(probe, "/bin/probe")
        box.exec(["/bin/probe", "serve"])
        seen = box.exec(["/bin/probe"], user="7:8", env={"K": "v"}, stdin=b"in")
        assert (seen.stdout, seen.stderr, seen.exit_code) == ("7 / v in\n", "err\n", 3)
        again(box)
        assert box.exec(["/bin/probe"]).stdout == "0 / - \n"
        before = eventually(lambda: int(host_read(box, "/n") or 0), what="it counts", every=0.01)
        eventually(lambda: int(host_read(box, "/n") or 0) > before, what="the service goes on", every=0.01)
    finally:
        end(box)


def host_read(box: Sandbox, path: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        box.download(path, Path(folder) / "x")
        return (Path(folder) / "x").read_text()
