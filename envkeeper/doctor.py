"""Proof instead of belief: dump a small sandbox with a TCP connection and a file lock, kill it, restore it, ask it.

CRIU's own check passes on hosts where every dump of a socket fails, so versions alone say nothing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from belayer.clock import Stopwatch
from belayer.config import Envkeeper
from belayer.errors import BelayerError, HostUnfit
from belayer.paths import Paths
from envkeeper import freezer, host, upper
from envkeeper.agentlink import Action, AgentLink, open_pidfd
from envkeeper.backend import containers
from envkeeper.checkpoint import Subject
from envkeeper.recipe import Recipe
from envkeeper.restore import Order
from envkeeper.store import Store

_LOAD = b"""
X=41; cd /var; (exec 8>/lock; flock 8 2>/dev/null || true; i=0; while :; do i=$((i+1)); echo $i >/n; sleep 0.02; done) &
"""
_ASK = b'echo "$X $PWD"'


def examine(config: Envkeeper, prefix: Path = host.PREFIX) -> list[str]:
    """Lines for people, one fact each. Raises HostUnfit when a sandbox would not come back here."""
    with tempfile.TemporaryDirectory(prefix="belayer-doctor-", dir="/var/tmp") as folder:
        paths = Paths(folder).make()
        found = host.inspect(config, paths, prefix)
        lines = [f"{name}: {value}" for name, value in sorted(found.versions.items())]
        reflink = upper.shares_blocks(Path(found.versions["data_root"]), paths.state)
        lines.append(f"reflink: {'yes' if reflink else 'no (large files are copied while frozen)'}")
        try:
            lines += _round_trip(config, paths, found)
        except BelayerError as why:
            raise HostUnfit(f"a small sandbox did not survive its death here: {why}", remedy=why.remedy) from why
        finally:
            for container_id in found.engine.ours():
                found.engine.remove(container_id)
        return lines


def _round_trip(config: Envkeeper, paths: Paths, found: host.Host) -> list[str]:
    engine, name = found.engine, "doctor"
    backend = containers(found, config, paths.checkpoints)
    recipe = Recipe(
        image_id=engine.pin(config.image)[0],
        agent=str(found.agent),
        hostname=name,
        memory_mb=config.memory_mb,
        cpus=config.cpus,
        pids=config.pids,
        env={},
    )
    watch = Stopwatch()
    container = engine.create(recipe, name, "doctor.1")
    engine.start(container)
    life = engine.life(container)
    pidfd = open_pidfd(life.pid)
    try:
        link = AgentLink(life.pid, pidfd)
        link.wait_ready()
        started = watch.lap()
        link.run(Action(1, _LOAD, 10.0, 4096))
        store = Store(paths.checkpoints, name)
        subject = Subject(name, "doctor.1", 1, "", life, recipe)
        manifest, _, _ = backend.publish(backend.capture(subject, link, store), store)
        backend.fence(pidfd, freezer.of_process(life.pid))
    finally:
        os.close(pidfd)
    watch.lap()
    back = backend.restore(Order(manifest, store, name, "doctor.2"), config.restore_timeout_s, lambda _: None)
    took = watch.lap()
    try:
        seen = back.link.run(Action(2, _ASK, 10.0, 4096)).stdout
    finally:
        os.close(back.pidfd)
    if seen != b"41 /var\n":
        raise HostUnfit(f"the restored shell answers {seen!r} instead of its variable and directory")
    return [
        f"start: {started:.0f} ms",
        f"frozen: {manifest.frozen_ms:.0f} ms",
        f"restore: {took:.0f} ms, proven by {back.proof}",
    ]
