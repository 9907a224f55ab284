"""A dump that does not come to its end: CRIU stopped, killed, or stuck. The source goes on or is declared lost, and is
never left frozen (promises E1, E2). Every fault is real and seen before its outcome is judged."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from belayer.errors import BelayerError, CheckpointIncomplete, CheckpointRefused, RestoreFailed, SandboxLost
from belayer.procs import lives, state
from belayer.sandbox import Sandbox
from envkeeper import freezer, preflight, remains
from envkeeper.agentlink import Action, AgentError, AgentLink, open_pidfd
from envkeeper.checkpoint import Checkpointer, Draft, Subject
from envkeeper.criu import Criu, DumpCut, Dumper, DumpHung, DumpPlan, Moment, search_path
from envkeeper.engine import Engine
from envkeeper.recipe import Recipe
from envkeeper.store import Store
from tests.support.envhost import EnvHost
from tests.support.wait import eventually

pytestmark = pytest.mark.docker

BINARY = Path("/opt/belayer/criu/usr/sbin/criu")
COUNT = "(i=0; while :; do i=$((i+1)); echo $i >>/n; sleep 0.01; done) &"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvHost]:
    found = EnvHost.start(tmp_path_factory.mktemp("dog"))
    yield found
    found.stop()


@dataclass
class Bench:
    """One sandbox with a counter, checkpointed by a Checkpointer of the test's own, without the daemon."""

    box: Sandbox
    subject: Subject
    link: AgentLink
    store: Store
    criu: Criu

    def capture(self, criu: Dumper, timeout_s: float = 30.0) -> Draft:
        return Checkpointer(criu, {}, timeout_s).capture(self.subject, self.link, self.store)

    def goes_on(self) -> None:
        """It is not frozen, its counter counts, its shell remembers, nothing of the attempt is left."""
        assert not freezer.of_process(self.subject.life.pid).wants_frozen()
        seen = self.box.exec('a=$(wc -l </n); until [ "$(wc -l </n)" -gt "$a" ]; do sleep 0.01; done; echo "$X"')
        assert seen.stdout == "41\n"
        assert list((self.store.home / "tmp").iterdir()) == []
        assert criu_children() == []


@pytest.fixture
def bench(host: EnvHost, tmp_path: Path) -> Iterator[Bench]:
    box = host.create()
    box.exec(f"X=41; {COUNT}")
    info = host.info(box.sandbox_id)
    life = Engine("unix:///var/run/docker.sock", "belayer", "").life(info.container_id)
    recipe = Recipe(image_id="", agent="", hostname="", memory_mb=1, cpus=1.0, pids=1, env={})
    pidfd = open_pidfd(life.pid)
    subject = Subject(box.sandbox_id, info.incarnation, info.boundary, "", life, recipe)
    criu = Criu(BINARY, search_path(BINARY, Path("/opt/belayer/lib/criu-path")))
    yield Bench(box, subject, AgentLink(life.pid, pidfd), Store(tmp_path, "dog"), criu)
    os.close(pidfd)
    try:
        box.destroy()
    except BelayerError:
        box.close()


class Sabotaged:
    """A real CRIU to which ``fault`` is done once all is frozen and the dump about to begin."""

    def __init__(self, criu: Criu, fault: Callable[[int], None]) -> None:
        self._criu, self._fault = criu, fault

    def dump(self, plan: DumpPlan, moment: Moment) -> None:
        self._criu.dump(plan, Beside(moment, self._fault))


@dataclass
class Beside:
    moment: Moment
    fault: Callable[[int], None]

    def start(self) -> None:
        self.moment.start()

    def begin(self) -> None:
        self.moment.begin()
        (pid,) = criu_children()
        self.fault(pid)

    def end(self) -> None:
        self.moment.end()

    def hold(self) -> None:
        self.moment.hold()

    def cut(self) -> None:
        self.moment.cut()

    def thaw(self) -> None:
        self.moment.thaw()


def criu_children() -> list[int]:
    """CRIU processes that this test started, dead ones not counted."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                name = (folder / "comm").read_text().strip()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if name == "criu" and int(fields[1]) == os.getpid() and fields[0] not in "ZX":
                found.append(int(folder.name))
    return found


def test_a_stopped_criu_is_ended_and_the_sandbox_goes_on(bench: Bench) -> None:
    stopped: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        eventually(lambda: state(pid) == "T", what="CRIU is stopped")
        stopped.append(pid)

    keeper = Checkpointer(Sabotaged(bench.criu, stop), {}, 1.0)
    with pytest.raises(DumpHung, match="not over after 1 s"):
        keeper.capture(bench.subject, bench.link, bench.store)
    assert len(stopped) == 1
    assert state(stopped[0]) == ""
    bench.goes_on()
    with pytest.raises(CheckpointIncomplete, match=r"the last dump .* hung: no other for"):
        keeper.capture(bench.subject, bench.link, bench.store)
    bench.goes_on()
    draft = bench.capture(bench.criu)  # it was CRIU that hung, not the sandbox
    assert (draft.folder / "criu" / "pstree.img").exists()


def test_criu_killed_anywhere_leaves_a_sandbox_that_goes_on_or_is_lost(bench: Bench) -> None:
    """Killed 0 to 45 ms after the freeze: before, among and after what it does inside of the tasks."""
    cut = 0
    for ms in range(0, 48, 3):
        timers: list[threading.Timer] = []

        def kill(pid: int, ms: int = ms, timers: list[threading.Timer] = timers) -> None:
            pidfd = os.pidfd_open(pid)  # it may be gone by then, and its number another's
            timers.append(threading.Timer(ms / 1000, finish, (pidfd,)))
            timers[0].start()

        try:
            draft = bench.capture(Sabotaged(bench.criu, kill))
            bench.store.discard(draft.folder)  # it was quicker
        except DumpCut:
            cut += 1
        except SandboxLost as why:
            assert "may not be itself" in str(why)  # noqa: PT017 - either outcome is right, an unnamed one is not
            return
        timers[0].join()
        bench.goes_on()
    assert cut > 2, "no kill hit a dump"


def finish(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def test_a_task_that_criu_cannot_seize_does_not_hold_the_sandbox(bench: Bench) -> None:
    """The preflight refuses a stopped task; here CRIU is let at one, and waits in the kernel for it for ever."""
    bench.box.exec("sleep 1000 & echo $! >/p; kill -STOP $!")
    group = freezer.of_process(bench.subject.life.pid)
    eventually(lambda: any(task.state == "T" for task in preflight.scan(group.pids())), what="a task is stopped")
    with pytest.raises(CheckpointRefused, match="is stopped"):
        bench.capture(bench.criu)
    bench.goes_on()
    images = bench.store.begin(0) / "criu"
    seen: list[str] = []

    @dataclass
    class Blind:
        """Freezes and does not look."""

        def start(self) -> None:
            return

        def begin(self) -> None:
            group.freeze()

        def end(self) -> None:
            seen.append("end")

        def hold(self) -> None:
            seen.extend(state(pid) for pid in criu_children())
            group.hold()

        def cut(self) -> None:
            seen.append("cut")

        def thaw(self) -> None:
            group.thaw()

    life = bench.subject.life
    plan = DumpPlan(life.pid, life.merged, images, group.folder, (), (), 5.0)
    with pytest.raises(DumpHung):
        bench.criu.dump(plan, Blind())
    assert seen in (["D", "cut"], ["S", "cut"])  # it lived and waited when its time was over, and wrote no image
    assert criu_children() == []
    bench.store.discard(images.parent)
    bench.box.exec("kill -CONT $(cat /p); kill $(cat /p)")
    bench.goes_on()
    bench.capture(bench.criu)


def test_code_that_a_dead_criu_left_in_a_task_is_found(bench: Bench) -> None:
    bench.box.exec("sleep 1000 &")
    group = freezer.of_process(bench.subject.life.pid)
    group.freeze()
    try:
        pids = group.pids()
        assert remains.look(pids, pids) == []
        victim = next(task.pid for task in preflight.scan(pids) if task.name == "sleep")
        row = next(row for row in Path(f"/proc/{victim}/maps").read_text().splitlines() if " r-xp " in row)
        with Path(f"/proc/{victim}/mem").open("r+b", buffering=0) as memory:
            memory.seek(int(row.split("-")[0], 16))
            memory.write(b"\x0f\x05\xcc\xcc\xcc\xcc\xcc\xcc")  # syscall, int3: what CRIU writes there for a moment
        assert [word for word in remains.look(pids, pids) if "not what its file holds" in word]
        assert remains.look([*pids, 1 << 22], pids)[0].endswith("ended in the moment in which the dump was cut off")
    finally:
        group.thaw()


def test_an_agent_that_is_slow_costs_its_checkpoint_only(bench: Bench) -> None:
    """Before the freeze nothing is at stake: a sandbox whose host has no time for it is not lost."""
    pid = bench.subject.life.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: state(pid) == "T", what="the agent stands still")
        with pytest.raises(CheckpointIncomplete, match=r"did not take a nonce within 0\.5 s"):
            bench.capture(bench.criu, 0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    bench.goes_on()
    assert bench.capture(bench.criu).captured.entries


def test_a_host_without_descriptors_has_asked_nothing(bench: Bench) -> None:
    """Which is no unknown fate, and no lost sandbox."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        while len(held) < before[0]:
            try:
                held.append(os.dup(0))
            except OSError:
                break
        with pytest.raises(AgentError, match="Too many open files"):
            bench.link.run(Action(1, b"touch /never", 10, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in held:
            os.close(fd)
    bench.goes_on()
    assert bench.box.exec("ls /never").exit_code == 2


def test_a_hung_restore_is_ended_by_name_and_the_checkpoint_comes_back_later(tmp_path: Path) -> None:
    """runc and CRIU know no deadline, and Docker would hold the container's lock for as long as they hang. An older
    checkpoint is not taken for one that is whole; envkeeper killed meanwhile ends the hung one at its next start."""
    hang, said, criu = tmp_path / "hang", tmp_path / "said", tmp_path / "criu"
    mounted = "grep -o 'runtime-runc[^ ]*/criu-root' /proc/mounts"  # runc is in the middle of a restore
    criu.write_text(
        f'#!/bin/sh\n[ "$1" = swrk ] && [ -e {hang} ] && {mounted} >>{said}.mounts && '
        f'{{ echo $$ >>{said}; kill -STOP $$; }}\nexec {BINARY} "$@"\n'
    )
    criu.chmod(0o755)
    config = f'criu = "{criu}"\n'
    with tempfile.TemporaryDirectory(prefix="bl-") as root:
        host = EnvHost.start(Path(root), f"{config}restore_timeout_s = 5\n")
        try:
            box = host.create()
            box.exec("X=40")
            box.checkpoint()
            box.exec("X=41")
            ready = box.checkpoint()
            os.kill(host.info(box.sandbox_id).pid, signal.SIGKILL)
            eventually(lambda: host.info(box.sandbox_id).state == "lost", what="its death is seen")
            hang.touch()
            with pytest.raises(RestoreFailed, match="was not over after 10 s; its runc and CRIU") as told:
                box.restore()
            assert ready.checkpoint_id in told.value.kept
            (stopped,) = said.read_text().split()
            eventually(lambda: not lives(int(stopped)), what="it was stopped, and is gone")
            eventually(lambda: not still_mounted(Path(f"{said}.mounts")), what="what runc had mounted is gone")
            host.kill()
            host.paths.config.write_text(f"[envkeeper]\n{config}restore_timeout_s = 300\n")
            host.restart()
            box = Sandbox.attach(box.sandbox_id, paths=host.paths)
            failed = threading.Thread(target=lambda: suppress_restore(box))
            failed.start()
            eventually(lambda: len(said.read_text().split()) == 2, what="another restore hangs")
            host.kill()
            failed.join()
            host.restart()
            stopped = said.read_text().split()[1]
            eventually(lambda: not lives(int(stopped)), what="the next life has ended it")
            eventually(lambda: not still_mounted(Path(f"{said}.mounts")), what="what runc had mounted is gone")
            hang.unlink()
            box = Sandbox.attach(box.sandbox_id, paths=host.paths)
            assert box.restore()[0] == 2
            assert box.exec("echo $X").stdout == "41\n"
            box.destroy()
        finally:
            host.stop()


def still_mounted(seen: Path) -> set[str]:
    """Of what was mounted while a restore hung; others restore on this host too, and come to their end."""
    now = Path("/proc/mounts").read_text()
    return {point for point in seen.read_text().split() if point in now}


def suppress_restore(box: Sandbox) -> None:
    with contextlib.suppress(BelayerError):  # envkeeper is killed meanwhile
        box.restore()
