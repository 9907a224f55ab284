"""full_restore into a fresh container (paper, section 5; promises E3, E4, E6).

Order, and why: the old life is killed and *seen dead* before anything new is made (never two lives of one sandbox) ->
a fresh container from the pinned image and our own recorded recipe, never from the archive -> its upper layer is
emptied and filled, with nothing mounted over it -> start, which restores the processes (envkeeper.revive) -> hashes of
everything that was used are compared (they run beside the steps above; nothing is served before they are in) -> the
nonce in PID 1's memory is asked back. Only then is it served; anything else destroys the new container and says why.
Between start and proof the limits of the recipe are put on: they are raised for the start (envkeeper.limits).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from belayer.clock import Stopwatch, monotonic
from belayer.errors import BelayerError, RestoreFailed
from belayer.procs import is_dead, wait_dead
from envkeeper import limits, passing, upper
from envkeeper.agentlink import AgentLink, open_pidfd
from envkeeper.docker_port import EngineFault
from envkeeper.engine import Engine, Life
from envkeeper.failpoints import Point, reach
from envkeeper.freezer import Freezer, of_process
from envkeeper.recipe import Recipe
from envkeeper.revive import Reviver
from envkeeper.store import Manifest, Store

FENCE_S = 30.0  # a task that waits for a busy disk takes its kill when the disk has answered


@dataclass(frozen=True, slots=True)
class Restored:
    """A served life. ``pidfd`` is the caller's to close."""

    life: Life
    pidfd: int
    link: AgentLink
    phases_ms: dict[str, float]
    proof: str


def fence(pidfd: int, group: Freezer | None, deadline_s: float = FENCE_S) -> None:
    """Kill PID 1 of a life and see it dead; with it die all processes of its pid namespace (pid_namespaces(7)).
    Raises RestoreFailed when it is not dead in time. A frozen group is thawed: a frozen task takes no signal."""
    with contextlib.suppress(ProcessLookupError):  # dead already
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if group is not None:
        group.thaw()
    if wait_dead([pidfd], deadline_s):
        raise RestoreFailed(
            f"the old life is not dead after {deadline_s:g} s",
            kept="the checkpoint and the claim",
            remedy="see the state of its processes; restore again",
        )
    end = monotonic() + deadline_s
    while group is not None and group.pids():
        if monotonic() > end:
            raise RestoreFailed(
                f"processes {group.pids()[:8]} of the old life are still there",
                kept="the checkpoint and the claim",
                remedy="see their state; restore again",
            )
        os.sched_yield()


@dataclass(frozen=True, slots=True)
class Order:
    """What to bring back, as whom. ``recipe`` is our own record of it, ``told`` the folder of envkeeper.lives.
    ``verified``: every hash was compared already."""

    manifest: Manifest
    store: Store
    sandbox_id: str
    incarnation: str
    told: Path | None = None
    verified: bool = False


@dataclass(frozen=True, slots=True)
class Fresh:
    """What to begin again from its image, as whom."""

    recipe: Recipe
    sandbox_id: str
    incarnation: str
    told: Path | None = None


class Restorer:
    """Brings checkpoints back on one host."""

    def __init__(self, engine: Engine, reviver: Reviver) -> None:
        self._engine, self._reviver = engine, reviver

    def sweep(self) -> None:
        """Forget the half-made restores of a former life of the daemon."""
        self._reviver.sweep()

    def run(self, order: Order, timeout_s: float, made: Callable[[str], None]) -> Restored:
        """Blocking; the claim is held and the old life is dead. ``made`` is told the container's id at once, so that
        it is on record before it can run. On failure the new container is gone when this raises, or Docker refuses."""
        watch, phases = Stopwatch(), dict[str, float]()
        manifest, store = order.manifest, order.store
        self._same_path(manifest)
        with ThreadPoolExecutor(max_workers=1) as pool:
            hashes = None if order.verified else pool.submit(store.verify, manifest)
            container_id = self._create(order)
            try:
                made(container_id)
                phases["create"] = watch.lap()
                reach(Point.RESTORE_CREATED)
                with store.opened(manifest, order.incarnation) as plain:
                    phases["open"] = watch.lap()
                    self._install(manifest, plain, container_id)
                    phases["install"] = watch.lap()
                    reach(Point.RESTORE_INSTALLED)
                    self._reviver.revive(manifest, plain, container_id)
                phases["start"] = watch.lap()
                reach(Point.RESTORE_STARTED)
                if hashes is not None:
                    hashes.result()
                phases["verify_rest"] = watch.lap()
                reach(Point.RESTORE_VERIFIED)
                restored = self._prove(manifest, container_id, timeout_s)
                phases["proof"] = watch.lap()
                reach(Point.RESTORE_PROVED)
            except (BelayerError, OSError) as why:
                self._drop(container_id)
                self._reviver.forget(container_id)
                told = _of_engine(manifest, why)
                if told is why:
                    raise
                raise told from why
        self._reviver.forget(container_id)
        return Restored(restored[0], restored[1], restored[2], phases, restored[3])

    def fresh(self, order: Fresh, timeout_s: float, made: Callable[[str], None]) -> Restored:
        """A life that begins at the image itself. Blocking; on failure the new container is gone when this raises."""
        watch, phases = Stopwatch(), dict[str, float]()
        container_id = self._engine.create(order.recipe, order.sandbox_id, order.incarnation, order.told)
        try:
            made(container_id)
            phases["create"] = watch.lap()
            self._engine.start(container_id)
            life = self._engine.life(container_id)
            pidfd = open_pidfd(life.pid)
            phases["start"] = watch.lap()
            try:
                link = AgentLink(life.pid, pidfd)
                link.wait_ready(timeout_s)
            except BaseException:
                os.close(pidfd)
                raise
            phases["proof"] = watch.lap()
        except BelayerError:
            self._drop(container_id)
            raise
        return Restored(life, pidfd, link, phases, f"a fresh container of image {order.recipe.image_id[:19]}")

    def _create(self, order: Order) -> str:
        try:
            return self._engine.create(order.manifest.recipe, order.sandbox_id, order.incarnation, order.told)
        except (EngineFault, OSError) as why:
            raise _of_engine(order.manifest, why) from why

    def _drop(self, container_id: str) -> None:
        """What failed before is what must be told. The caller has the id on record, and tries the removal again."""
        with contextlib.suppress(BelayerError):
            self._engine.remove(container_id)

    def _same_path(self, manifest: Manifest) -> None:
        """Images of one engine path are none of another: taken by the wrong one they would come back in the network of
        the host, or not at all."""
        theirs = manifest.versions.get("engine_path", "fast")
        if theirs != self._reviver.path:
            raise RestoreFailed(
                f"checkpoint {manifest.checkpoint_id} was dumped by the engine path {theirs}, "
                f'and envkeeper.engine_path is "{self._reviver.path}"',
                kept="the checkpoint",
                remedy=f'set envkeeper.engine_path = "{theirs}" to restore it',
            )

    def _install(self, manifest: Manifest, plain: Path, container_id: str) -> None:
        layer, merged = self._engine.upper_of(container_id)
        if os.path.ismount(merged):
            raise RestoreFailed(f"{merged} is mounted already: its upper layer must not be filled under it")
        count = upper.unpack(plain, layer)
        if count != manifest.upper_entries:
            raise RestoreFailed(f"{count} entries of the upper layer, {manifest.upper_entries} were captured")

    def _prove(self, manifest: Manifest, container_id: str, timeout_s: float) -> tuple[Life, int, AgentLink, str]:
        life = self._engine.life(container_id)
        pidfd = open_pidfd(life.pid)
        try:
            differs = limits.put_on(life.pid, manifest.recipe)
            link = AgentLink(life.pid, pidfd)
            status = link.wait_ready(timeout_s)
            nonce = link.ask_nonce(timeout_s)
            if hashlib.sha256(nonce).hexdigest() != manifest.nonce_sha256:
                raise RestoreFailed(
                    "PID 1 does not remember the nonce of this checkpoint: its memory is another one"
                    if nonce
                    else "PID 1 remembers nothing: the container was started cold",
                    kept="the checkpoint",
                )
            if status.last_action != manifest.boundary or status.busy:
                raise RestoreFailed(f"the restored agent is after action {status.last_action}, not {manifest.boundary}")
            tree = _tree(life.pid)
            if is_dead(pidfd):
                raise RestoreFailed("the restored sandbox died at once")
        except BaseException:
            os.close(pidfd)
            raise
        said = f"nonce and boundary {manifest.boundary} from PID 1's memory; {tree}; sha256 of every file"
        said += f"; {differs}" if differs else ""
        return life, pidfd, link, said


def _of_engine(manifest: Manifest, why: BelayerError | OSError) -> BelayerError:
    """What failed, as one who may try another checkpoint must be told it: Hindered where that would not help."""
    what = f"checkpoint {manifest.checkpoint_id}"
    if isinstance(why, EngineFault):
        return passing.Hindered(f"{what}: {why.message}", kept="the checkpoint", again=not 400 <= why.status < 500)
    if isinstance(why, OSError):
        return passing.hindered(what, why) or RestoreFailed(f"{what}: {why}", kept="the checkpoint")
    return why


def _tree(pid: int) -> str:
    """The process tree below PID 1, all in one time namespace. Raises RestoreFailed: with two, what the next action
    starts would see another uptime than what was restored (runc 1.1.5 does this on some kernels)."""
    group = of_process(pid)
    home = os.readlink(f"/proc/{pid}/ns/time")
    seen = 0
    for task in group.pids():
        try:
            spaces = {os.readlink(f"/proc/{task}/ns/{name}") for name in ("time", "time_for_children")}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended in this moment, or is a zombie
        if spaces != {home}:
            raise RestoreFailed(
                f"process {task} of the restored sandbox is in another time namespace", kept="the checkpoint"
            )
        seen += 1
    return f"{seen} processes in one time namespace"
