"""Which freezer a process belongs to."""

from __future__ import annotations

import os
from pathlib import Path

from belayer import procs
from envkeeper import freezer
from tests.support.wait import eventually


def test_a_zombie_has_no_freezer_of_its_own() -> None:
    """Seen on cgroup v1: an ended PID 1 that nobody has reaped is listed in the root group, with the whole host."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        eventually(lambda: procs.state(pid) == "Z", what="the child is a zombie")
        try:
            group = freezer.of_process(pid)
        except FileNotFoundError:
            return
        # cgroup v2 keeps a zombie in its group: then the group is a real one, below the root.
        assert group.v2
        assert group.folder != Path("/sys/fs/cgroup")
    finally:
        os.waitpid(pid, 0)
