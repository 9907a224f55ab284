# ruff: noqa: E501  (one case a line)
"""What is done to envkeeper and to containers, rather than run in a sandbox."""

from __future__ import annotations

import base64
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pytest

from belayer.clock import monotonic
from belayer.errors import BelayerError, CheckpointIncomplete, CheckpointRefused, HostUnfit
from envkeeper import admission
from envkeeper.criu import Criu
from envkeeper.engine import BOUND
from tests.conformance import tree
from tests.conformance.cases.refused import docker_exec
from tests.conformance.model import CRIU, EXACT, REFUSED, TRIAL, Deed
from tests.conformance.runner import Stack

IMAGE = "belayer-sandbox:base"
# Docker writes these anew for each container: declared differences. /run and /.belayer hold our own sockets and binds.
DOCKERS_OWN = (b"/etc/hosts", b"/etc/hostname", b"/etc/resolv.conf", b"/etc/mtab")
OURS = (b"/run", b"/.belayer", b"/.dockerenv")


def refused_at_admission(kind: str, tty: bool = False, **host: Any) -> Callable[[Stack], str]:
    """A real container made with what a sandbox must not have: judged by what Docker says that it made."""

    def run(stack: Stack) -> str:
        client = docker.APIClient(base_url=stack.docker)
        made = client.create_container(IMAGE, "true", tty=tty, host_config=client.create_host_config(**host))["Id"]
        try:
            found = admission.check(client.inspect_container(made), None, runtime="belayer", bound=BOUND)
        finally:
            client.remove_container(made, force=True)
            client.close()
        said = [str(finding) for finding in found if finding.kind == kind]
        assert said, f"{kind} is not among {[str(finding) for finding in found]}"
        return said[0]

    return run


def old_criu(version: str) -> Callable[[Stack], str]:
    def run(stack: Stack) -> str:
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder) / "criu"
            binary.write_text(f"#!/bin/sh\necho Version: {version}\n")
            binary.chmod(0o755)
            with pytest.raises(HostUnfit, match="too old for this kernel") as caught:
                Criu(binary, "").version()
        return str(caught.value).replace(str(binary), "PATH")

    return run


def second_generation(stack: Stack) -> str:
    """Between two generations an action starts a background process, and Docker's exec one that old runc puts into
    another time namespace: the first comes back, the second is refused by name."""
    box = stack.create(memory_mb=256)
    try:
        box.exec("X=1")
        box.checkpoint()
        box.kill()
        box.restore()
        box.exec("sleep 999 </dev/null >/dev/null 2>&1 & echo $! > /p")
        end = docker_exec("sh", "-c", "sleep 999 </dev/null >/dev/null 2>&1 & sleep 998")(stack, box.sandbox_id)
        with pytest.raises(CheckpointRefused, match="foreign_process"):
            box.checkpoint()
        end()
        box.exec("kill -9 $(pgrep -x sleep | grep -vx $(cat /p)); true")
        box.checkpoint()
        box.kill()
        box.restore()
        assert box.exec("kill -0 $(cat /p) && echo $X").stdout == "1\n"
        return "one of `docker exec` is refused (foreign_process)"
    finally:
        stack.destroy(box)


def parallel_restores(stack: Stack) -> str:
    boxes = [stack.create(memory_mb=256) for _ in range(6)]
    told: list[str] = []
    try:
        for number, box in enumerate(boxes):
            box.exec(f"X={number}; head -c 1000000 /dev/urandom > /f; sha256sum /f > /s")
            box.checkpoint()
            box.kill()

        def back(number: int) -> None:
            try:
                boxes[number].restore()
                told.append(boxes[number].exec("echo $X; sha256sum -c --quiet /s").stdout)
            except BelayerError as why:
                told.append(str(why))

        threads = [threading.Thread(target=back, args=(number,)) for number in range(len(boxes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert sorted(told) == [f"{number}\n" for number in range(len(boxes))]
        return f"{len(boxes)} at once"
    finally:
        for box in boxes:
            stack.destroy(box)


def disk_full(stack: Stack) -> str:
    box = stack.create(memory_mb=256)
    writing = stack.host.paths.checkpoints / box.sandbox_id / "tmp"
    try:
        first = box.checkpoint()
        box.exec("head -c 40000000 /dev/urandom > /big; X=2")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m,mode=0700", "belayer", writing], check=True)
        try:
            with pytest.raises(CheckpointIncomplete, match=r"No space left|free") as caught:
                box.checkpoint()
        finally:
            subprocess.run(["umount", "-l", writing], check=True)
        assert stack.host.info(box.sandbox_id).ready_checkpoint == first.checkpoint_id
        assert box.exec("echo $X").stdout == "2\n"
        return f"CheckpointIncomplete, READY as before; {caught.value.remedy}"
    finally:
        stack.destroy(box)


def unreadable_file(stack: Stack) -> str:
    """A file of the upper layer that says 4096 bytes and gives fewer: bound over it on the host, from /sys."""
    box = stack.create(memory_mb=256)
    try:
        first = box.checkpoint()
        box.exec("head -c 4096 /dev/zero > /victim")
        victim = upper_of(stack, box.sandbox_id) / "victim"
        subprocess.run(["mount", "--bind", "/sys/kernel/uevent_seqnum", victim], check=True)
        try:
            with pytest.raises(CheckpointIncomplete, match="victim"):
                box.checkpoint()
        finally:
            subprocess.run(["umount", "-l", victim], check=True)
        assert stack.host.info(box.sandbox_id).ready_checkpoint == first.checkpoint_id
        assert not stack.wants_frozen(box)
        box.checkpoint()
        return "CheckpointIncomplete naming the file, READY as before"
    finally:
        stack.destroy(box)


def whole_tree(stack: Stack) -> str:
    """Every name of the sandbox's file system, as it sees it and as the raw upper layer holds it, before the death and
    after a restore, twice."""
    box = stack.create(memory_mb=512)
    try:
        made = box.exec(tree.MAKE, timeout_s=240)
        assert made.exit_code == 0, made.stderr
        before = both(stack, box.sandbox_id)
        for _ in range(2):
            box.checkpoint()
            box.kill()
            box.restore()
            after = both(stack, box.sandbox_id)
            for view, rows in before.items():
                wrong = tree.differences(rows, after[view])
                assert not wrong, f"{len(wrong)} of {view}: {wrong[:3]}"
        return f"{len(before['merged'])} names merged, {len(before['upper'])} raw"
    finally:
        stack.destroy(box)


COUNTER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <fcntl.h>
#include <unistd.h>
int main(void) {
    int fd = open("/m", O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, 8192)) return 1;
    volatile long *file = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), n = 0;
    for (;; usleep(1000)) {
        if (file[700] != n) { FILE *out = fopen("/torn", "w"); fprintf(out, "%ld in the file, %ld in memory\\n", file[700], n); exit(2); }
        file[700] = ++n;
    }
}
"""


def compiled(stack: Stack) -> str:
    """A static program that compares its counter with the one in a file that it maps, at each step."""
    box = stack.create(memory_mb=256)
    try:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "c.c").write_text(COUNTER)
            subprocess.run(["musl-gcc", "-static", "-Os", "-s", "-o", "c", "c.c"], cwd=folder, check=True)
            data = base64.b64encode((Path(folder) / "c").read_bytes()).decode()
        box.exec(f"base64 -d > /c <<'B'\n{data}\nB\nchmod +x /c; /c & echo $! > /p")
        for _ in range(2):
            box.checkpoint()
            box.kill()
            box.restore()
            step = "python3 -c \"print(open('/m','rb').read(8192)[5600:5608])\""
            seen = box.exec(
                f'a=$({step}); until [ "$({step})" != "$a" ]; do :; done; kill -0 $(cat /p); cat /torn 2>&1'
            )
            assert seen.stdout == "cat: /torn: No such file or directory\n", seen
        return "two generations"
    finally:
        stack.destroy(box)


def clock_gap(stack: Stack) -> str:
    box = stack.create(memory_mb=256)
    try:
        clocks = "import time; print(time.time(), time.monotonic())"
        box.exec(f"python3 -c '{clocks}' > /then")
        made = box.checkpoint()
        box.kill()
        since = monotonic()
        stack.destroy(stack.create())  # dead for as long as that takes, at least
        dead = monotonic() - since
        back = box.restore_info()
        now, then = (box.exec(words).stdout.split() for words in (f"python3 -c '{clocks}'", "cat /then"))
        wall, inside = (float(a) - float(b) for a, b in zip(now, then, strict=True))
        assert back.checkpoint_id == made.checkpoint_id
        assert 0 < back.clock_gap_s <= wall
        dead += sum(back.phases_ms[name] for name in ("create", "open", "install")) / 1000  # before CRIU sets the clock
        assert wall - inside > dead, "the monotonic clock went on while the sandbox was dead"
        return "clock_gap_s"
    finally:
        stack.destroy(box)


def both(stack: Stack, sandbox_id: str) -> dict[str, dict[bytes, tree.Row]]:
    merged = Path(f"/proc/{stack.host.info(sandbox_id).pid}/root")
    seen = {"merged": tree.manifest(merged), "upper": tree.manifest(upper_of(stack, sandbox_id))}
    for rows in seen.values():
        for path in [path for path in rows if path in DOCKERS_OWN or path.startswith(OURS)]:
            del rows[path]
    return seen


def upper_of(stack: Stack, sandbox_id: str) -> Path:
    client = docker.APIClient(base_url=stack.docker)
    try:
        seen = client.inspect_container(stack.host.info(sandbox_id).container_id)
    finally:
        client.close()
    return Path(seen["GraphDriver"]["Data"]["UpperDir"])


CASES = [
    Deed(("W5",), "second generation, with processes of an action and of `docker exec`", CRIU + "2610", EXACT, second_generation),
    Deed(("W6",), "terminal", CRIU + "2179", REFUSED, refused_at_admission("tty", tty=True)),
    Deed(("W35b",), "tmpfs given to the container", CRIU + "529", REFUSED, refused_at_admission("tmpfs", tmpfs={"/t": "size=400m"})),
    Deed(("W38",), "old CRIU on a new kernel", CRIU + "2532", REFUSED, old_criu("3.17.1")),
    Deed(("W47b",), "CRIU below 4.2 on a kernel from 6.16", CRIU + "2804", REFUSED, old_criu("4.1.1")),
    Deed(("W48",), "docker.sock mounted", CRIU + "377", REFUSED, refused_at_admission(
        "docker_socket", binds={"/var/run/docker.sock": {"bind": "/var/run/docker.sock", "mode": "rw"}})),
    Deed(("W51",), "systemd as PID 1: privileged", "podman's manual", REFUSED, refused_at_admission("privileged", privileged=True)),
    Deed(("W59",), "parallel restores", "https://github.com/moby/moby/issues/42900", EXACT, parallel_restores),
    Deed(("W60",), "removed or restarted by Docker", "podman issue 3774", REFUSED, lambda stack: "; ".join((
        refused_at_admission("auto_remove", auto_remove=True)(stack),
        refused_at_admission("restart_policy", restart_policy={"Name": "always"})(stack)))),
    Deed(("W61",), "disk full in the middle of a checkpoint", "gvisor pull 14228", REFUSED, disk_full),
    Deed(("W62",), "one file of the upper layer cannot be read", "https://github.com/ai-dynamo/snapshot/issues/142", REFUSED, unreadable_file),
    Deed(("P33",), "compiled program with a mapped file, compared at each step", TRIAL, EXACT, compiled),
    Deed(("W53",), "wall clock jumps: the gap is in the restore record", CRIU + "2644", EXACT, clock_gap),
    Deed(("P54",), "the whole file system: every kind of node, name, attribute, owner, time, link and hole", TRIAL, EXACT, whole_tree),
]  # fmt: skip
