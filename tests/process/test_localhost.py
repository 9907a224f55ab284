"""A private host ends what is its own, and nothing else that knows its root."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from belayer import procs
from belayer.localhost import LocalHost


def test_a_users_program_with_the_root_in_its_environment_is_not_killed() -> None:
    """A shell that exports BELAYER_ROOT for belayerctl has an editor or a trainer as its children too."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        host = LocalHost(Path(folder), "")
        env = {**os.environ, "BELAYER_ROOT": folder}
        users = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
        holder = "import sys; sys.argv; input()"
        ours = subprocess.Popen([sys.executable, "-c", holder, "/x/gpuowner/holder.py"], stdin=subprocess.PIPE, env=env)
        try:
            host.stop()
            assert ours.wait(300) == -9, "what looks like the holder of this root has ended"
            assert users.poll() is None
            users.communicate(b"\n", 300)
            assert users.returncode == 0
        finally:
            for child in (users, ours):
                child.kill()
                child.communicate()


def test_a_worker_that_no_status_has_told_of_is_ended_by_its_control_group() -> None:
    """As one is that a zygote forks while the host is stopped. Its name is nobody's."""
    with tempfile.TemporaryDirectory(prefix="bl-") as folder:
        host = LocalHost(Path(folder), "")
        groups = procs.Cgroups(procs.tag_of(host.paths.run))
        if groups.base is None:
            pytest.skip("no control groups can be made here: the trees of workers are sessions")
        place = Path(groups.make("slot0-unknown"))
        worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            (place / "cgroup.procs").write_text(str(worker.pid))
            assert groups.all_pids() == [worker.pid]
            host.stop()
            assert worker.wait(300) == -9
            assert not groups.base.exists()
        finally:
            worker.kill()
            worker.communicate()
