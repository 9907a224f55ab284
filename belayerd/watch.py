"""Watching one worker: its pidfd (death, in milliseconds) and its heartbeat file (hang). Shell; policy judges."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable

import zmq.asyncio

from belayer import procs
from belayer.clock import monotonic
from belayer.heartbeat import Observation, Watch
from belayer.ids import slot_of
from belayer.messages.worker import FOLLOWS
from belayer.paths import Paths
from belayerd import policy
from belayerd.links import WorkerLink
from belayerd.pair import Cause, Ref

Lost = Callable[[str, Cause, str], None]

_LOGS = 32  # of dead workers, for each slot


class Watched:
    """A live worker process: pidfd, control link, heartbeat. ``close`` forgets it; it does not kill."""

    def __init__(
        self, ref: Ref, pidfd: int, paths: Paths, context: zmq.asyncio.Context, lost: Lost, ranks: int = 1
    ) -> None:
        """``ranks``: tensor-parallel processes of the worker."""
        self.ref, self.pidfd = ref, pidfd
        self.link = WorkerLink(context, paths.worker_sock(ref.worker_id))
        self.seen = Observation(age_s=0.0, pulse=None)
        self._watch = Watch(paths.heartbeat(ref.worker_id), monotonic())
        self._lost, self._told, self._ranks = lost, False, ranks
        self._cpu_at_change: dict[int, float] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._died)

    def _died(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self.link.gone()
        self._tell(Cause.DEATH, f"pid {self.ref.pid} ended (pidfd)")

    def look(self, now: float, limits: policy.Limits) -> None:
        """One look at the heartbeat; tells once."""
        self._observe(now, limits)
        if self._told:
            return
        hung = policy.hang(self.seen, self._vital(limits), limits)
        if hung:
            # Once more: a starved loop that beats and falls asleep between the two looks has beaten.
            self._observe(now, limits)
        if hung and self.seen.age_s > 0.0:
            self._tell(Cause.HANG, hung)
            return
        stuck = policy.stuck(self.seen, limits)
        if stuck:
            self._tell(Cause.STUCK, stuck)

    def _observe(self, now: float, limits: policy.Limits) -> None:
        self.seen = self._watch.observe(now, policy.gap(limits))
        if self.seen.age_s == 0.0:
            self._cpu_at_change = {pid: procs.cpu_s(pid) for pid in self._processes()}

    def _vital(self, limits: policy.Limits) -> policy.Vital:
        """Asked of /proc only when the beat is late: the usual look costs one stat(2)."""
        if self.seen.age_s <= limits.hang_limit_s:
            return policy.Vital("", 0.0)
        return policy.vital_of(
            [
                policy.Vital(procs.state(pid), procs.cpu_s(pid) - self._cpu_at_change.get(pid, 0.0))
                for pid in self._processes()
            ]
        )

    def moving(self) -> str:
        """How far it is with a weight version that it verifies and maps, as its beat says; "" otherwise: what beats and
        does not get on with that is no reason to wait for it."""
        pulse = self.seen.pulse
        return pulse.phase if pulse is not None and pulse.phase.startswith(FOLLOWS) else ""

    def _processes(self) -> list[int]:
        """The worker that beats, then its other ranks: it sleeps in a step while one of them computes."""
        return [self.ref.pid, *self.others()]

    def others(self) -> list[int]:
        """Pids of ranks 1 and up, in order: the first children that the leader has made."""
        return procs.children(self.ref.pid)[: self._ranks - 1] if self._ranks > 1 else []

    def _tell(self, cause: Cause, detail: str) -> None:
        if not self._told:
            self._told = True
            self._lost(self.ref.worker_id, cause, detail)

    @property
    def dead(self) -> bool:
        return procs.is_dead(self.pidfd)

    def close(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self.link.close()
        os.close(self.pidfd)


def sweep(paths: Paths, cgroups: procs.Cgroups, worker_id: str) -> None:
    """Remove what a dead worker left: socket, heartbeat, temporary files, control group."""
    paths.worker_sock(worker_id).unlink(missing_ok=True)
    paths.heartbeat(worker_id).unlink(missing_ok=True)
    paths.last_words(worker_id).unlink(missing_ok=True)
    tmp = paths.worker_tmp(worker_id)
    if tmp.is_dir():
        shutil.rmtree(tmp)
    cgroups.remove(worker_id)
    _forget_old_logs(paths, slot_of(worker_id))


def _forget_old_logs(paths: Paths, slot: str) -> None:
    """A worker leaves its log behind, to be read; of one slot the last ``_LOGS`` are enough. Of living ones (they have
    a heartbeat) none is removed."""
    logs = paths.log("x").parent.glob(f"{slot}-{'[0-9a-f]' * 8}.log")
    dead = [path for path in logs if not paths.heartbeat(path.stem).exists()]
    for path in sorted(dead, key=lambda path: path.stat().st_mtime)[:-_LOGS]:
        path.unlink(missing_ok=True)
