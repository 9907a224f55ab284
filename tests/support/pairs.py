"""A world of one slot in memory: performs the effects of belayerd.pair_table as perfect, dead or failing peers.

It is a model of the *outside*: the owner's arena, the router's registration and the processes. The invariants are
checked after every single effect (promises R1, R2, R5): that is what a crash at that point would leave behind.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import msgspec

from belayer.messages.worker import Oracle
from belayerd import pair as p
from belayerd import pair_table, policy
from belayerd.handover import Action

LIMITS = policy.Limits(repeat_window_s=60, restart_budget=3, restart_backoff_s=1)
ORACLE = Oracle(weight_version=1, token=7, logprob=-0.5)


@dataclass
class World:
    """``alive``: worker ids that run. ``holder``: who may write the arena. ``routed``: who gets requests."""

    pair: p.Pair = field(default_factory=lambda: p.Pair(slot="slot0"))
    saved: p.Pair | None = None
    alive: set[str] = field(default_factory=set)
    holder: str | None = None
    routed: str | None = None
    routed_generation: int = 0
    gated: set[str] = field(default_factory=set)
    pending: list[p.Event] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    fail: dict[Action, str] = field(default_factory=dict)
    not_yet: set[Action] = field(default_factory=set)
    quarantined: bool = False
    now: float = 0.0
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    stop_after: int | None = None
    performed: int = 0

    def send(self, event: p.Event) -> None:
        self.pair, effects = pair_table.step(self.pair, event, self.now, LIMITS)
        for effect in effects:
            if self.stop_after is not None and self.performed >= self.stop_after:
                raise Stopped
            self.perform(effect)
            self.performed += 1
            self.check()

    def drain(self, limit: int = 200) -> None:
        for _ in range(limit):
            if not self.pending:
                return
            self.send(self.pending.pop(0))
        raise AssertionError(f"no rest after {limit} events: {self.pair}")

    def perform(self, effect: p.Effect) -> None:
        match effect:
            case p.Save():
                self.saved = msgspec.msgpack.decode(msgspec.msgpack.encode(self.pair), type=p.Pair)
            case p.Spawn():
                ref = p.Ref(worker_id=f"slot0-{next(self.ids):08x}", pid=1, start_time=1)
                self.alive.add(ref.worker_id)
                self.pending += [p.Spawned(worker=ref), p.StandbyReady(worker_id=ref.worker_id, oracle=ORACLE)]
            case p.Perform():
                self.act(effect)
            case p.Kill():
                self.die(effect.worker.worker_id)
            case p.Wait():
                self.now += effect.seconds
                self.pending.append(p.BackoffOver())
            case p.Record():
                self.outcomes.append(effect.outcome)
            case p.Withdraw():
                self.routed = None
            case p.Announce():
                self.route(effect.worker.worker_id, effect.generation)
            case p.QuarantineArena():
                self.holder, self.quarantined = None, True
            case p.RestoreArena():
                self.quarantined = False
            case p.Alert():
                self.alerts.append(effect.reason)

    def act(self, effect: p.Perform) -> None:
        """An action really done (idempotently) to this world; its end comes as an event."""
        action, worker = effect.action, effect.worker.worker_id if effect.worker else ""
        if action in self.not_yet:
            self.pending.append(p.ActionFailed(action=action, serial=effect.serial, reason="not yet", not_yet=True))
            return
        failed = self.fail.get(action)
        if failed or (worker and worker not in self.alive):
            gone = not failed
            self.pending.append(
                p.ActionFailed(action=action, serial=effect.serial, reason=failed or "gone", worker_gone=gone)
            )
            return
        match action:
            case Action.UNREGISTER:
                if self.routed_generation < effect.generation:
                    self.routed = None
            case Action.FENCE:
                if effect.old:
                    self.die(effect.old.worker_id)
                # The owner frees the arena only of a holder that it has itself seen dead.
                assert self.holder is None or self.holder not in self.alive
                self.holder = None
            case Action.LEASE:
                assert self.holder in (None, worker), "the owner grants a free arena only (R1)"
                self.holder = worker
            case Action.ORACLE:
                self.gated.add(worker)
            case Action.REGISTER:
                self.route(worker, effect.generation)
            case _:
                pass
        self.pending.append(p.ActionDone(action=action, serial=effect.serial, ms=1.0))

    def route(self, worker: str, generation: int) -> None:
        assert generation >= self.routed_generation, "the router fences an older generation"
        assert generation > self.routed_generation or self.routed in (None, worker), "two mains in one generation"
        self.routed, self.routed_generation = worker, generation

    def die(self, worker_id: str) -> None:
        self.alive.discard(worker_id)

    def lose(self, worker_id: str) -> None:
        """The process dies and its pidfd tells."""
        self.die(worker_id)
        self.pending.append(
            p.WorkerLost(worker_id=worker_id, cause=p.Cause.DEATH, detail="killed", incident_id=f"i{next(self.ids)}")
        )

    def check(self) -> None:
        if self.routed is not None:
            assert self.routed in self.gated, "registered before the gate (R5)"
            assert self.routed == self.holder, "the router sends to a worker that does not hold the arena (R1)"
        main = self.pair.main
        if self.pair.state is p.State.PROTECTED:
            assert main is not None
            assert self.pair.shadow is not None
        if self.pair.state is p.State.QUARANTINED:
            assert main is None

    def restart(self) -> None:
        """belayerd was killed: all it knows is the file. Workers that no file knows are swept; dead ones told."""
        self.stop_after, self.pending = None, []
        self.pair = self.saved or p.Pair(slot="slot0")
        running = self.pair.running
        refs = [ref for ref in (self.pair.main, self.pair.shadow) if ref]
        known = {ref.worker_id for ref in refs} | ({running.old.worker_id} if running and running.old else set())
        # The orphan sweep: a worker that holds the arena or is routed is always in the file (Save comes first).
        for orphan in self.alive - known:
            assert orphan not in (self.holder, self.routed), "an unknown worker serves"
            self.die(orphan)
        for ref in refs:
            if ref.worker_id not in self.alive:
                self.lose(ref.worker_id)
        if self.pair.shadow and self.pair.shadow.worker_id in self.alive:
            self.pending.append(p.StandbyReady(worker_id=self.pair.shadow.worker_id, oracle=ORACLE))
        self.pending.append(p.Wanted())


class Stopped(Exception):
    """belayerd was killed here."""


def protected() -> World:
    """A world that has come up: main serving in generation 1, shadow ready."""
    world = World()
    world.send(p.Wanted())
    world.drain()
    assert world.pair.protected
    assert world.pair.generation == 1
    return world
