"""What keeps the lives of sandboxes: the seam at which something else than containers and CRIU could stand in, such as
a snapshotter of microVMs (ADR 0010). All above it (states, boundaries, claims, store, lineage, policy) stays.

What a backend owes, whatever it is made of:

- ``capture`` freezes, copies file system and memory of one instant, and lets the life run again, or raises and leaves
  it running (or SandboxLost: then it must not be served again). It never ends its source.
- ``publish`` makes a captured copy READY; the life may have moved on or died meanwhile.
- ``restore`` and ``fresh`` make a new life and *prove* it (a secret that only the captured memory holds, the boundary,
  the process tree) before they return; a life that is not proven is gone when they raise.
- ``fence`` returns only when the old life is seen dead.
- ``engine_path`` is in every manifest; what one backend captured, another refuses by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from belayer.config import Envkeeper
from envkeeper import restore, upper
from envkeeper.agentlink import AgentLink
from envkeeper.checkpoint import Checkpointer, Draft, Subject
from envkeeper.criu import Dumper
from envkeeper.docker_api import ApiDumper, ApiReviver, DockerApi
from envkeeper.freezer import Freezer
from envkeeper.host import Host
from envkeeper.restore import Fresh, Order, Restored, Restorer
from envkeeper.revive import Reviver, RuntimeReviver
from envkeeper.store import Manifest, Store

Made = Callable[[str], None]


class Backend(Protocol):
    """All calls block and may come from several threads."""

    @property
    def engine_path(self) -> str: ...

    def capture(self, subject: Subject, link: AgentLink, store: Store) -> Draft: ...

    def publish(self, draft: Draft, store: Store) -> tuple[Manifest, str, dict[str, float]]: ...

    def restore(self, order: Order, timeout_s: float, made: Made) -> Restored: ...

    def fresh(self, order: Fresh, timeout_s: float, made: Made) -> Restored: ...

    def fence(self, pidfd: int, group: Freezer | None) -> None: ...

    def sweep(self) -> None:
        """Forget what a former life of the daemon left half made."""


class Containers:
    """Docker containers, dumped by CRIU."""

    def __init__(self, checkpointer: Checkpointer, restorer: Restorer, engine_path: str) -> None:
        self._checkpointer, self._restorer, self._engine_path = checkpointer, restorer, engine_path

    @property
    def engine_path(self) -> str:
        return self._engine_path

    def capture(self, subject: Subject, link: AgentLink, store: Store) -> Draft:
        return self._checkpointer.capture(subject, link, store)

    def publish(self, draft: Draft, store: Store) -> tuple[Manifest, str, dict[str, float]]:
        return self._checkpointer.publish(draft, store)

    def restore(self, order: Order, timeout_s: float, made: Made) -> Restored:
        return self._restorer.run(order, timeout_s, made)

    def fresh(self, order: Fresh, timeout_s: float, made: Made) -> Restored:
        return self._restorer.fresh(order, timeout_s, made)

    def fence(self, pidfd: int, group: Freezer | None) -> None:
        restore.fence(pidfd, group)

    def sweep(self) -> None:
        self._restorer.sweep()


def containers(host: Host, config: Envkeeper, checkpoints: Path) -> Containers:
    """The backend that the configuration names; never another one because it failed. Raises HostUnfit."""
    data_root = Path(host.versions["data_root"])
    relocks = host.plugins is not None and config.engine_path == "fast"
    dumper: Dumper
    reviver: Reviver
    if config.engine_path == "docker_api":
        api = DockerApi(config.docker, data_root)
        api.check(host.versions, host.search)
        dumper, reviver = ApiDumper(api), ApiReviver(api)
    else:
        start_s = 2 * config.restore_timeout_s  # the agent's answer has the time itself; pages come before it
        work = checkpoints / ".restores"
        dumper, reviver = host.criu, RuntimeReviver(host.engine, work, host.search, host.plugins, start_s)
    reflink = upper.shares_blocks(data_root, checkpoints)
    checkpointer = Checkpointer(dumper, host.versions, config.checkpoint_timeout_s, reflink=reflink, relocks=relocks)
    return Containers(checkpointer, Restorer(host.engine, reviver), reviver.path)
