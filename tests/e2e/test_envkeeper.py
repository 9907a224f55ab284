"""A sandbox that survives its death: real Docker, real CRIU, real kills (promises E1-E6, O1)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from belayer.errors import BelayerError, ClaimTaken, Fenced, SandboxLost
from belayer.sandbox import Sandbox
from belayer.trajectory import context_digest
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

# Says of every file what a restore must bring back; files that live on while it runs are left out by the caller.
TREE_MANIFEST = r"""
import hashlib, os, stat, sys
for top in sys.argv[1:]:
    for folder, names, files in os.walk(top):
        for name in sorted(names + files) + [""]:
            path = os.path.join(folder, name) if name else folder
            s = os.lstat(path)
            kind = stat.S_IFMT(s.st_mode)
            body = hashlib.sha256(open(path, "rb").read()).hexdigest() if kind == stat.S_IFREG else ""
            link = os.readlink(path) if kind == stat.S_IFLNK else ""
            names_of = sorted(os.listxattr(path, follow_symlinks=False))
            attrs = [(n, os.getxattr(path, n, follow_symlinks=False)) for n in names_of]
            links = s.st_nlink if kind == stat.S_IFREG else 0
            owner = (oct(s.st_mode), s.st_uid, s.st_gid)
            print(path, *owner, s.st_size, s.st_mtime_ns, s.st_rdev, links, body, link, attrs)
"""

MAKE_TREE = r"""
mkdir -p /w/a/b && cd /w && echo one > one && ln one a/hard && ln -s ../one a/soft && mkfifo a/pipe
truncate -s 100M sparse && printf x | dd of=sparse bs=1 seek=50000000 conv=notrunc 2>/dev/null
chmod 4755 one; chmod 1777 a/b; chown 12:34 a
head -c 3000000 /dev/urandom > big; head -c 200 /dev/urandom > small; : > empty
rm -f /etc/issue; echo '#x' >> /etc/os-release; rm -rf /etc/cron.d; mkdir -p /etc/cron.d; echo only > /etc/cron.d/only
touch -d '2001-02-03 04:05:06.789012345' small
python3 -c "import os,socket; os.setxattr('/w/one', 'user.k', b'v'); s=socket.socket(1); s.bind('/w/sock')"
printf 'odd' > "$(printf '/w/od\td \n name')"
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("env"))
    yield found
    found.stop()


def manifest(box: Sandbox) -> list[str]:
    seen = box.exec(f"python3 - /w /etc /usr/bin <<'E'\n{TREE_MANIFEST}\nE\n")
    assert seen.exit_code == 0, seen.stderr
    assert not seen.truncated
    # Docker makes these anew for each container: declared differences.
    return [
        row for row in seen.stdout.splitlines() if not row.startswith(("/etc/host", "/etc/resolv.conf", "/etc/mtab"))
    ]


def kill(host: EnvHost, box: Sandbox) -> None:
    proof = box.kill()
    assert "dead" in proof.seen
    # Dead is not reaped: on a busy host its shim takes a moment.
    eventually(lambda: not Path(f"/proc/{proof.pid}").exists(), what="its shim has reaped it")
    eventually(lambda: host.info(box.sandbox_id).state == "lost", what="the death is seen")


def test_actions_share_one_shell_with_streams_apart(box: Sandbox) -> None:
    box.exec("X=41; cd /var; f() { echo from f; }")
    seen = box.exec('echo "$X $PWD"; f; echo oops >&2; (exit 3)')
    assert (seen.stdout, seen.stderr, seen.exit_code, seen.boundary) == ("41 /var\nfrom f\n", "oops\n", 3, 2)


def test_a_timeout_kills_what_the_action_started_and_nothing_older(box: Sandbox) -> None:
    box.exec("cd /var; X=1; sleep 1000 & echo $! > /service")
    seen = box.exec("sleep 1000; touch /never; sleep 1000", timeout_s=0.3)
    assert seen.timed_out
    assert seen.exit_code == 124
    # The rest of its script never began; the shell went with it, the next one starts in the same directory.
    assert seen.session_ended
    gone = "until [ $(pgrep -c sleep) = 1 ]; do :; done"  # dead and reaped: the service's is left
    after = box.exec(f'kill -0 "$(cat /service)" && echo alive; pwd; {gone}; ls /never; echo "[$X]"', timeout_s=60)
    assert after.stdout == "alive\n/var\n[]\n"


def test_output_beyond_the_cap_is_cut_and_said(host: EnvHost, box: Sandbox) -> None:
    seen = box.exec("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo last; echo end >&2")
    assert (seen.truncated, seen.stdout_bytes) == (True, 3_000_011)
    assert seen.stdout.startswith("first\nxxx")
    assert seen.stdout.endswith("xxx" + "last\n")
    said = f"\n[belayer: {3_000_011 - (1 << 20)} bytes left out]\n"
    assert said in seen.stdout
    assert len(seen.stdout) == (1 << 20) + len(said)
    assert (seen.stderr, seen.stderr_bytes) == ("end\n", 4)


def test_three_generations_come_back_whole(host: EnvHost, box: Sandbox) -> None:
    assert box.exec(MAKE_TREE).exit_code == 0
    box.exec("X=41; cd /var; (i=0; while :; do i=$((i+1)); echo $i >> /log; sleep 0.01; done) & echo $! > /pid")
    for generation in range(1, 4):
        box.exec(f"echo {generation} > /w/gen; rm -f /w/gen-{generation - 1}; touch /w/gen-{generation}")
        before = manifest(box)
        context = [{"role": "user", "content": f"generation {generation}"}]
        made = box.checkpoint(context)
        assert made.boundary == box.boundary
        boundary = box.boundary
        box.exec("echo after >> /w/one; rm -rf /w/a; X=lost; cd /")  # after k: must be seen by nobody
        kill(host, box)
        with pytest.raises(SandboxLost):
            box.exec("true")
        assert box.restore() == (boundary, context_digest(context))
        assert manifest(box) == before
        # The counter in memory and its file are of one instant: a log without a gap that goes on.
        seen = box.exec(
            'echo "$X $PWD $(cat /w/gen)"; kill -0 $(cat /pid) && '
            "n=$(wc -l < /log); while [ $(wc -l < /log) -le $n ]; do sleep 0.01; done; "
            "awk '$1 != NR { print \"gap at\", NR; exit 1 }' /log && echo no gap"
        )
        assert seen.stdout == f"41 /var {generation}\nno gap\n"
        assert host.info(box.sandbox_id).incarnation == f"{box.sandbox_id}.{generation + 1}"
    eventually(lambda: len(host.containers()) == 1, what="the containers of the old lives are removed")


def test_an_action_in_flight_is_lost_and_never_an_observation(host: EnvHost, box: Sandbox) -> None:
    box.exec("echo 0 > /n")
    box.checkpoint()
    failed: list[BelayerError] = []

    def act() -> None:
        other = Sandbox.attach(box.sandbox_id, paths=host.paths)
        try:
            other.exec("echo 1 > /n; touch /begun; sleep 600; echo done", timeout_s=900)
        except BelayerError as why:
            failed.append(why)
        finally:
            other.close()

    thread = threading.Thread(target=act)
    thread.start()
    begun = Path(f"/proc/{host.info(box.sandbox_id).pid}/root/begun")
    eventually(begun.exists, what="the action runs")  # acting is more than that: it may not have reached the agent yet
    kill(host, box)
    thread.join(120)
    assert [type(why) for why in failed] == [SandboxLost], failed
    assert "unknown" in str(failed[0])
    assert box.restore()[0] == 1
    assert box.exec("cat /n; ls /begun 2>/dev/null").stdout == "0\n"


def test_racing_restorers_of_one_life_get_one_winner(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=7")
    box.checkpoint()
    kill(host, box)
    won: list[tuple[int, str]] = []
    lost: list[BelayerError] = []
    start = threading.Barrier(4)

    def race() -> None:
        other = Sandbox.attach(box.sandbox_id, paths=host.paths)
        start.wait(120)
        try:
            won.append(other.restore())
        except BelayerError as why:
            lost.append(why)
        finally:
            other.close()

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [type(why) for why in lost] == [ClaimTaken] * 3, lost
    assert len(won) == 1
    with pytest.raises(ClaimTaken):
        box.restore()  # still names the life that was lost
    again = Sandbox.attach(box.sandbox_id, paths=host.paths)
    assert again.exec("echo $X").stdout == "7\n"
    again.close()


def test_rewind_of_a_living_sandbox_and_a_stale_client(host: EnvHost, box: Sandbox) -> None:
    box.exec("echo a > /x")
    first = box.checkpoint()
    box.exec("echo b > /x")
    second = box.checkpoint()
    assert [row.checkpoint_id for row in box.checkpoints().checkpoints] == [first.checkpoint_id, second.checkpoint_id]
    stale = Sandbox.attach(box.sandbox_id, paths=host.paths)
    assert box.restore(first.checkpoint_id)[0] == 1
    assert box.exec("cat /x").stdout == "a\n"
    with pytest.raises(Fenced):
        stale.exec("true")
    stale.close()


def test_the_daemon_is_killed_and_its_sandbox_is_served_again(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=5; (i=0; while :; do i=$((i+1)); echo $i > /i; sleep 0.01; done) &")
    box.checkpoint()
    pid = host.info(box.sandbox_id).pid
    host.kill()
    host.restart()
    assert host.info(box.sandbox_id).pid == pid
    assert box.exec("echo $X").stdout == "5\n"
    kill(host, box)
    host.kill()
    host.restart()
    assert host.info(box.sandbox_id).state == "lost"
    assert box.restore()[0] == 1
    assert box.exec("echo $X").stdout == "5\n"


def test_the_daemon_is_killed_in_the_middle_of_an_action(host: EnvHost, box: Sandbox) -> None:
    box.exec("X=5")
    box.checkpoint()

    told: list[BelayerError] = []

    def act() -> None:
        other = Sandbox.attach(box.sandbox_id, paths=host.paths)
        try:
            other.exec("touch /begun; sleep 1000")
        except BelayerError as why:
            told.append(why)
        finally:
            other.close()

    thread = threading.Thread(target=act)
    thread.start()
    begun = Path(f"/proc/{host.info(box.sandbox_id).pid}/root/begun")
    eventually(begun.exists, what="the action runs")  # acting is more than that: it may not have reached the agent yet
    host.kill()
    host.restart()
    assert "action 2" in host.info(box.sandbox_id).reason
    with pytest.raises(SandboxLost, match="action 2"):
        box.exec("true")
    assert box.restore()[0] == 1
    assert box.exec("echo $X").stdout == "5\n"
    thread.join(120)
    assert isinstance(told[0], SandboxLost), told  # within seconds, not at the end of the action's own limit
