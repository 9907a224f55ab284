"""full_checkpoint: file system and processes at one frozen point of an action boundary (paper, section 5; promise E1).

Order, and why: a fresh nonce goes into the agent's memory (the proof must belong to *this* checkpoint) -> where
reflinks are used, the upper layer is synced (a reflink writes dirty pages first; that must not happen frozen) -> CRIU
is started -> [ freeze -> preflight -> dump and copy side by side -> thaw ] -> hash, sync, publish. No action is in
flight and no connection of ours is open until the thaw: the caller holds the sandbox's gate.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from belayer.clock import Stopwatch, wall
from belayer.errors import BelayerError, CheckpointIncomplete, CheckpointRefused, SandboxLost
from envkeeper import freezer, mounts, passing, peers, preflight, remains, remaps, upper, watches
from envkeeper.agentlink import AgentError, AgentLink
from envkeeper.criu import DumpCut, Dumper, DumpHung, DumpPlan, kill_pending
from envkeeper.disk import FULL, sync_filesystem
from envkeeper.engine import BOUND, Life
from envkeeper.failpoints import Point, reach
from envkeeper.recipe import Recipe
from envkeeper.rests import Rests
from envkeeper.store import FORMAT, FileDigest, Manifest, Store

CRIU_FOLDER = "criu"
_ANSWERS_S = 30.0  # how long an agent may take to answer on a busy host, before a dump and after one that was cut off
_RESTS_S = 30.0  # how long tasks may take to freeze when they must be looked at: some may wait for a disk
_KEPT = "the sandbox runs on and the previous checkpoint stays READY"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checkpointed, and the prefix it belongs to."""

    sandbox_id: str
    incarnation: str
    boundary: int
    context_digest: str
    life: Life
    recipe: Recipe


@dataclass(slots=True)
class _Frozen:
    """What happens between the freeze and the thaw. Milliseconds of each part in ``phases``."""

    subject: Subject
    group: freezer.Freezer
    split: mounts.Split
    folder: Path
    pool: ThreadPoolExecutor
    relocks: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    watch: Stopwatch | None = None
    frozen_ms: float | None = None
    copy: Future[upper.Captured] | None = None
    pids: tuple[int, ...] = ()
    doubts: list[str] = field(default_factory=list)
    stdio: tuple[str, ...] = ()
    folders: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def start(self) -> None:
        self.watch = Stopwatch()

    def begin(self) -> None:
        """All images to come: freeze, look, start copying."""
        assert self.watch is not None
        self.group.freeze()
        reach(Point.CAPTURE_FROZEN)
        self.phases["freeze"] = self.watch.lap()
        pid = self.subject.life.pid
        self.pids = tuple(self.group.pids())
        tasks = preflight.scan(self.pids, locks=not self.relocks)
        findings = preflight.judge(
            pid, tasks, self.split.foreign, limits=preflight.may_read_limits(), relocks=self.relocks
        )
        findings = findings or peers.find(pid, tasks)
        if findings:
            raise CheckpointRefused("; ".join(str(finding) for finding in findings[:4]), kept=_KEPT)
        self.stdio = tuple(os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3))
        self.folders = upper.times_of(self.subject.life.upper, preflight.parents_of_unlinked(tasks))
        self.phases["preflight"] = self.watch.lap()
        self.copy = self.pool.submit(self._copy)
        reach(Point.CAPTURE_COPYING)

    def _copy(self) -> upper.Captured:
        watch = Stopwatch()
        captured = upper.capture(self.subject.life.upper, self.folder)
        self.phases["copy"] = watch.ms()
        return captured

    def end(self) -> None:
        """Images are written, tasks still stopped; the copy must be whole before they run."""
        assert self.watch is not None
        assert self.copy is not None
        self.phases["dump"] = self.watch.lap()
        reach(Point.CAPTURE_DUMPED)
        captured = self.copy.result()
        for name in remaps.names(self.folder / CRIU_FOLDER):
            upper.include(captured, self.subject.life.upper, self.folder, name)
        upper.keep_times(captured, self.folders)
        reach(Point.CAPTURE_COPIED)
        self.phases["copy_rest"] = self.watch.lap()

    def hold(self) -> None:
        self.group.hold()

    def cut(self) -> None:
        try:
            self.group.freeze(_RESTS_S)
            # Where it had to be thawed for the dump to die, no task had been touched, and some may have ended.
            before = self.pids if self.frozen_ms is None else ()
            self.doubts = remains.look(before, self.group.pids())
        except (BelayerError, OSError) as why:
            self.doubts = [f"it could not be looked at ({why})"]

    def thaw(self) -> None:
        if self.frozen_ms is None:
            upper.set_times(self.subject.life.upper, self.folders)  # CRIU has taken its names away by now
        self.group.thaw()
        if self.frozen_ms is None:
            self.frozen_ms = self.watch.ms() if self.watch is not None else 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Captured and thawed: a private copy that only has to be hashed and published."""

    subject: Subject
    folder: Path
    nonce: bytes
    stdio: tuple[str, ...]
    captured: upper.Captured
    frozen_ms: float
    phases: dict[str, float]


class Checkpointer:
    """Makes checkpoints on one host; at most ``at_once`` sandboxes are frozen at the same time, since more only
    lengthens everyone's freeze."""

    def __init__(
        self,
        dumper: Dumper,
        versions: dict[str, str],
        timeout_s: float,
        *,
        reflink: bool = False,
        relocks: bool = False,
        at_once: int | None = None,
    ) -> None:
        self._dumper, self._versions, self._timeout_s, self._reflink = dumper, versions, timeout_s, reflink
        self._relocks = relocks  # a restore takes record locks again (envkeeper.relocks)
        self._queue = threading.BoundedSemaphore(at_once or os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(thread_name_prefix="upper")
        self._rests = Rests()

    def run(self, subject: Subject, link: AgentLink, store: Store) -> tuple[Manifest, str, dict[str, float]]:
        """``capture`` and ``publish`` in one: (manifest, its digest, milliseconds by phase)."""
        return self.publish(self.capture(subject, link, store), store)

    def capture(self, subject: Subject, link: AgentLink, store: Store) -> Draft:
        """Blocking; the sandbox runs again when this returns or raises. On any failure nothing is left of it."""
        watch, phases = Stopwatch(), dict[str, float]()
        nonce = secrets.token_bytes(32)
        with _incomplete(subject):
            folder = store.begin(subject.boundary)
        with _nothing_left(subject, store, folder), _lost_if_dead(subject.life.pid):
            reach(Point.CAPTURE_BEGUN)
            self._set_nonce(subject, link, nonce)
            reach(Point.CAPTURE_NONCE)
            if self._reflink:  # a clone writes dirty pages out first: not while frozen. A copy reads them from memory.
                sync_filesystem(subject.life.upper)
            phases["sync_upper"] = watch.lap()
            with self._queue:
                phases["queue"] = watch.lap()
                frozen, captured = self._freeze_and_dump(subject, link, folder)
            phases.update(frozen.phases)
            assert frozen.frozen_ms is not None
            return Draft(subject, folder, nonce, frozen.stdio, captured, frozen.frozen_ms, phases)

    def _set_nonce(self, subject: Subject, link: AgentLink, nonce: bytes) -> None:
        """Nothing is frozen yet, and whichever nonce the agent keeps harms nobody: one that lives and is slow costs
        this checkpoint only."""
        limit = min(_ANSWERS_S, self._timeout_s)
        try:
            link.set_nonce(nonce, limit)
        except (SandboxLost, AgentError) as why:
            if isinstance(why, SandboxLost) and kill_pending(subject.life.pid):
                raise
            raise CheckpointIncomplete(
                f"the agent of {subject.sandbox_id} did not take a nonce within {limit:g} s ({why.message})",
                kept=_KEPT,
                remedy="checkpoint again later",
            ) from why

    def publish(self, draft: Draft, store: Store) -> tuple[Manifest, str, dict[str, float]]:
        """Blocking; actions may run meanwhile. The sandbox may even die: what was captured was captured alive."""
        watch = Stopwatch()
        with _nothing_left(draft.subject, store, draft.folder):
            upper.write_index(draft.captured, draft.folder)
            manifest, digest = store.publish(draft.folder, lambda files: self._manifest(draft, store, files))
        return manifest, digest, draft.phases | {"publish": watch.lap()}

    def _freeze_and_dump(self, subject: Subject, link: AgentLink, folder: Path) -> tuple[_Frozen, upper.Captured]:
        life = subject.life
        group = freezer.of_process(life.pid)
        split = mounts.split(mounts.of_process(life.pid), BOUND)
        frozen = _Frozen(subject, group, split, folder, self._pool, self._relocks)
        plan = DumpPlan(
            pid=life.pid,
            root=life.merged,
            images=folder / CRIU_FOLDER,
            freezer=group.folder,
            external=split.external,
            masked=split.masked,
            timeout_s=self._timeout_s,
            container_id=life.container_id,
            watched=watches.paths(group.pids(), Path(f"/proc/{life.pid}/root")),
        )
        self._rests.check(subject.sandbox_id)
        try:
            self._dumper.dump(plan, frozen)
        except DumpCut as why:
            if isinstance(why, DumpHung):
                self._rests.begin(subject.sandbox_id)
            _still_whole(subject, link, frozen, why)
            raise
        finally:
            reach(Point.CAPTURE_THAWED)
            if frozen.copy is not None:
                frozen.copy.exception()  # the folder must not be discarded under a running copy
        assert frozen.copy is not None
        return frozen, frozen.copy.result()

    def _manifest(self, draft: Draft, store: Store, files: dict[str, FileDigest]) -> Manifest:
        subject, before = draft.subject, store.ready()
        return Manifest(
            format=FORMAT,
            checkpoint_id=draft.folder.name,
            sandbox_id=subject.sandbox_id,
            incarnation=subject.incarnation,
            boundary=subject.boundary,
            context_digest=subject.context_digest,
            parent=before.checkpoint_id if before else "",
            made_at=wall(),
            recipe=subject.recipe,
            nonce_sha256=hashlib.sha256(draft.nonce).hexdigest(),
            stdio=draft.stdio,
            versions=self._versions,
            files=files,
            upper_entries=len(draft.captured.entries),
            frozen_ms=round(draft.frozen_ms, 3),
            phases_ms={name: round(ms, 3) for name, ms in draft.phases.items()},
        )


@contextlib.contextmanager
def _lost_if_dead(pid: int) -> Iterator[None]:
    """What a dying PID 1 no longer has (its socket, its root, its group) is no fault of the disk, and the sandbox does
    not run on."""
    try:
        yield
    except OSError as why:
        if kill_pending(pid):
            raise SandboxLost(f"PID 1 (pid {pid}) died before it could be dumped ({why})") from why
        raise


def _still_whole(subject: Subject, link: AgentLink, frozen: _Frozen, why: DumpCut) -> None:
    """After a dump that was cut off, and thawed. Raises SandboxLost in any doubt."""
    said = "; ".join(frozen.doubts[:4])
    if not said:
        try:
            link.status(_ANSWERS_S)
            return
        except (BelayerError, OSError) as silent:
            said = f"it does not answer ({silent})"
    raise SandboxLost(
        f"{subject.sandbox_id} may not be itself after a dump that was cut off: {said}. The dump: {why.message}",
        kept="the previous checkpoint stays READY",
        remedy="restore it",
    ) from why


@contextlib.contextmanager
def _nothing_left(subject: Subject, store: Store, folder: Path) -> Iterator[Path]:
    """Discard ``folder`` on any failure; a failed call of ours is CheckpointIncomplete."""
    with _incomplete(subject):
        try:
            yield folder
        except (BelayerError, OSError):
            store.discard(folder)
            raise


@contextlib.contextmanager
def _incomplete(subject: Subject) -> Iterator[None]:
    try:
        yield
    except OSError as why:
        raise CheckpointIncomplete(
            f"checkpoint at boundary {subject.boundary} of {subject.sandbox_id}: {why}",
            kept=_KEPT,
            remedy="free disk space below the checkpoint folder" if why.errno in FULL else passing.AGAIN,
        ) from why
