"""The rules of a slot: (pair, event, now) -> pair and ordered effects. Pure; belayerd.pair_table says when which.

``Save`` comes before the effects that others can see: a belayerd that dies in between finds in the file what it may
have begun, never less.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from belayer.messages.worker import Oracle
from belayerd import policy
from belayerd.handover import BY_ACTION, Action, OnFailure, plan_for
from belayerd.pair import (
    ActionDone,
    ActionFailed,
    Alert,
    Announce,
    BackoffOver,
    Cause,
    Effect,
    Event,
    Followed,
    HandoverAsked,
    Kill,
    Pair,
    Perform,
    QuarantineArena,
    Record,
    Ref,
    Refuse,
    RestoreArena,
    Running,
    Save,
    Spawn,
    Spawned,
    SpawnFailed,
    StandbyReady,
    State,
    Timing,
    Wait,
    Withdraw,
    WorkerLost,
)

Out = tuple[Pair, list[Effect]]
Rule = Callable[[Pair, Event, float, policy.Limits], Out]


def _set(pair: Pair, **changes: object) -> Pair:
    return msgspec.structs.replace(pair, **changes)


# --- rules ------------------------------------------------------------------------------------------------------


def ignore(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    return pair, []


def refuse(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    raise Refuse(f"slot {pair.slot} is {pair.state}" + (f" ({pair.reason})" if pair.reason else ""))


def start(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    return _set(pair, state=State.ARMING, reason=""), [Save(), Spawn()]


def again(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """The back-off before another start is over (nothing to do when a worker is on its way already)."""
    return pair, [] if pair.shadow else [Spawn()]


def rearm(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    return _set(pair, state=State.REARMING), [Save(), Spawn()]


def spawned(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, Spawned)
    if pair.shadow is not None:
        return pair, [Kill(worker=event.worker)]
    return _set(pair, shadow=event.worker), [Save()]


def spawned_unwanted(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, Spawned)
    return pair, [Kill(worker=event.worker)]


def _start_failed(pair: Pair, reason: str, now: float, limits: policy.Limits, without: State, again: State) -> Out:
    failed = pair.failed_starts + 1
    pair = _set(pair, shadow=None, failed_starts=failed, reason=reason)
    if policy.gives_up(failed, limits):
        reason = f"{failed} starts in a row failed, the last one: {reason}"
        record = Record(running=_no_start(pair, reason, now), outcome=f"gave up: {without}")
        return _set(pair, state=without, reason=reason), [Save(), record, Alert(reason=reason)]
    return _set(pair, state=again), [Save(), Wait(seconds=policy.backoff(failed, limits))]


def _no_start(pair: Pair, reason: str, now: float) -> Running:
    """An incident of no handover: the slot is left as it is."""
    return Running(
        incident_id=f"start-{pair.slot}-{pair.generation}-{int(now * 1e3)}",
        cause=Cause.START,
        detail=reason,
        plan=(),
        done=0,
        old=None,
        detected_at=now,
    )


def _candidate(pair: Pair) -> str:
    """What the worker that does not come up was to be."""
    return "spare" if pair.spare else "main"


def first_start_failed(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, SpawnFailed)
    said = f"{_candidate(pair)} did not start: {event.reason}"
    return _start_failed(pair, said, now, limits, State.EMPTY, State.ARMING)


def rearm_failed(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, SpawnFailed)
    return _start_failed(pair, f"shadow did not start: {event.reason}", now, limits, State.EXPOSED, State.REARMING)


def _first_main(worker_id: str, now: float) -> Running:
    return Running(
        incident_id=f"start-{worker_id}",
        cause=Cause.START,
        detail="first main",
        plan=plan_for(has_old_main=False),
        done=0,
        old=None,
        detected_at=now,
    )


def candidate_ready(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """A worker is ready and no main serves: promote it, or go on with the handover that lost its candidate."""
    assert isinstance(event, StandbyReady)
    if pair.shadow is None or pair.shadow.worker_id != event.worker_id:
        return pair, []
    pair = _set(pair, failed_starts=0, reason="")
    running = pair.running
    if running is None:
        running = _first_main(event.worker_id, now)
    pair = _newer(pair, event.oracle)
    if pair.spare:
        return _set(pair, state=State.RESERVE), [Save()]
    return _perform(_set(pair, state=State.HANDOVER, running=running))


def _newer(pair: Pair, oracle: Oracle | None) -> Pair:
    """The first worker of a weight version records the oracle that all later ones must equal (R5). One that comes
    with an older version is brought to the last one by the handover, before its own oracle counts."""
    if oracle is None or (pair.oracle is not None and pair.oracle.weight_version >= oracle.weight_version):
        return pair
    return _set(pair, oracle=oracle)


def followed(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """A worker that serves, or is ready to, has taken a new weight version."""
    assert isinstance(event, Followed)
    mine = event.worker_id in {ref.worker_id for ref in (pair.main, pair.shadow) if ref is not None}
    after = _newer(pair, event.oracle) if mine else pair
    return (after, [Save()]) if after is not pair else (pair, [])


def called_ready(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert pair.shadow is not None
    running = _first_main(pair.shadow.worker_id, now)
    return _perform(_set(pair, spare=False, state=State.HANDOVER, running=running))


def called_early(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """The worker is still on its way; it becomes a main when it is ready."""
    return _set(pair, spare=False), [Save()]


def called_down(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    return start(_set(pair, spare=False), event, now, limits)


def reserve_lost(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, WorkerLost)
    if pair.shadow is None or event.worker_id != pair.shadow.worker_id:
        return pair, []
    after, effects = _start_failed(pair, f"spare lost: {event.detail}", now, limits, State.EMPTY, State.ARMING)
    return after, [Kill(worker=pair.shadow), *effects]


def reserve_anew(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """The kv owner was replaced, the ready worker maps an arena of the old one."""
    assert pair.shadow is not None
    after = _set(pair, state=State.ARMING, shadow=None, reason="the kv owner was replaced")
    return after, [Kill(worker=pair.shadow), Save(), Spawn()]


def shadow_ready(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, StandbyReady)
    if pair.shadow is None or pair.shadow.worker_id != event.worker_id:
        return pair, []
    return _set(pair, state=State.PROTECTED, failed_starts=0, reason=""), [Save()]


def _perform(pair: Pair) -> Out:
    """Save, then the next action of the running handover."""
    running = pair.running
    assert running is not None
    action = running.action
    assert action is not None
    running = msgspec.structs.replace(running, serial=running.serial + 1, waits=False)
    worker = pair.shadow if pair.state is State.HANDOVER else None
    perform = Perform(
        action=action, serial=running.serial, worker=worker, old=running.old, generation=pair.generation + 1
    )
    return _set(pair, running=running), [Save(), perform]


def _begin(pair: Pair, cause: Cause, detail: str, incident_id: str, now: float) -> Pair:
    running = Running(
        incident_id=incident_id,
        cause=cause,
        detail=detail,
        plan=plan_for(has_old_main=True),
        done=0,
        old=pair.main,
        detected_at=now,
    )
    return _set(pair, main=None, running=running)


def main_lost(to: State) -> Rule:
    """HANDOVER with a ready shadow. FENCING without one (degraded path): unregister and fence now, promote when one
    is ready. A lost shadow is only replaced."""

    def rule(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
        assert isinstance(event, WorkerLost)
        if pair.shadow is not None and event.worker_id == pair.shadow.worker_id:
            return shadow_lost(pair, event, now, limits)
        if pair.main is None or event.worker_id != pair.main.worker_id:
            return pair, []
        if event.cause is not Cause.WEIGHTS and policy.is_repeat(pair.last_failover, now, limits):
            return _repeat(pair, event, now)
        return _begin_and_perform(_begin(pair, event.cause, event.detail, event.incident_id, now), to)

    return rule


def _begin_and_perform(begun: Pair, to: State) -> Out:
    after, effects = _perform(_set(begun, state=to))
    assert after.running is not None
    return after, [*effects, Record(running=after.running, outcome="open")]


def shadow_lost(pair: Pair, event: WorkerLost, now: float, limits: policy.Limits) -> Out:
    assert pair.shadow is not None
    said = "shadow did not start" if pair.state is State.REARMING else "shadow lost"
    after, effects = _start_failed(pair, f"{said}: {event.detail}", now, limits, State.EXPOSED, State.REARMING)
    return after, [Kill(worker=pair.shadow), *effects]


def _repeat(pair: Pair, event: WorkerLost, now: float) -> Out:
    """A second failure inside the post-handover window is hardware (R7)."""
    assert pair.last_failover is not None
    ago = now - pair.last_failover
    reason = f"second failure {ago:.1f} s after a handover: {event.cause}, {event.detail}"
    begun = _begin(pair, event.cause, event.detail, event.incident_id, now)
    assert begun.running is not None
    return _quarantine(begun, reason)


def _quarantine(pair: Pair, reason: str) -> Out:
    running = pair.running
    workers = [ref for ref in (running.old if running else None, pair.main, pair.shadow) if ref is not None]
    effects: list[Effect] = [Save()]
    # Told first: peers may take half a minute, and a belayerd that is killed meanwhile does the rest in its next life,
    # but alerts nobody a second time.
    if running is not None:
        effects += [Record(running=running, outcome=f"quarantined: {reason}")]
    effects += [Alert(reason=reason), Withdraw(generation=pair.generation, reason=reason)]
    effects += [Kill(worker=worker) for worker in workers]
    effects += [QuarantineArena(reason=reason)]
    after = _set(pair, state=State.QUARANTINED, main=None, shadow=None, running=None, reason=reason, failed_starts=0)
    return after, effects


def candidate_lost(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, WorkerLost)
    if pair.shadow is None or event.worker_id != pair.shadow.worker_id:
        return pair, []
    said = f"{_candidate(pair)} did not start" if pair.state is State.ARMING else "worker lost"
    return _drop_candidate(pair, pair.shadow, f"{said}: {event.detail}", now, limits)


def _drop_candidate(pair: Pair, worker: Ref, reason: str, now: float, limits: policy.Limits) -> Out:
    """No main serves and the candidate died: another one. What the handover has done to the old main stays done;
    what was done to the candidate begins again with the next one. A candidate that may have held the lease, or
    may have been registered, is itself unregistered and fenced like a main, and its generation is spent."""
    running = pair.running
    if running is not None:
        if running.done >= running.plan.index(Action.LEASE):
            running = msgspec.structs.replace(running, plan=plan_for(has_old_main=True), done=0, old=worker)
            pair = _set(pair, generation=pair.generation + 1)
        else:
            done = min(running.done, running.plan.index(Action.OWNERS))
            running = msgspec.structs.replace(running, done=done)
        running = msgspec.structs.replace(running, serial=running.serial + 1)
    after, effects = _start_failed(_set(pair, running=running), reason, now, limits, State.EMPTY, State.ARMING)
    if after.state is State.EMPTY and running is not None:
        after, effects = _quarantine(after, after.reason)
    return after, [Kill(worker=worker), *effects]


def fencing_lost(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """The worker that was starting died while the old main is being fenced: forget it, the fence goes on."""
    assert isinstance(event, WorkerLost)
    if pair.shadow is None or event.worker_id != pair.shadow.worker_id:
        return pair, []
    return _set(pair, shadow=None), [Kill(worker=pair.shadow), Save()]


def fencing_ready(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """Ready while the old main is still being fenced: go on as a handover; the pending action's end drives it."""
    assert isinstance(event, StandbyReady)
    if pair.shadow is None or pair.shadow.worker_id != event.worker_id:
        return pair, []
    return _set(pair, state=State.HANDOVER, failed_starts=0), [Save()]


def _note(running: Running, event: ActionDone) -> Running:
    timing = Timing(action=event.action, ms=event.ms, detail=event.detail)
    return msgspec.structs.replace(running, done=running.done + 1, timings=(*running.timings, timing))


def fencing_done(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, ActionDone)
    running = pair.running
    if running is None or event.serial != running.serial:
        return pair, []
    running = _note(running, event)
    pair = _set(pair, running=running)
    if running.action is not None and running.plan.index(Action.FENCE) >= running.done:
        return _perform(pair)
    # Fenced: the rest needs a worker. One that is starting already is waited for, else one is started.
    after = _set(pair, state=State.ARMING)
    return after, [Save()] if pair.shadow else [Save(), Spawn()]


def handover_done(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, ActionDone)
    running = pair.running
    if running is None or event.serial != running.serial:
        return pair, []
    running = _note(running, event)
    pair = _set(_newer(pair, event.oracle), running=running)
    if running.action is not None:
        return _perform(pair)
    failed = running.cause in (Cause.DEATH, Cause.HANG, Cause.STUCK)
    after = _set(
        pair,
        state=State.REARMING,
        generation=pair.generation + 1,
        main=pair.shadow,
        shadow=None,
        running=None,
        handovers=pair.handovers + (running.cause is not Cause.START),
        last_failover=now if failed else pair.last_failover,
    )
    # The new main serves from here on; re-arming starts at once so that the slot is exposed for seconds only.
    return after, [Save(), Record(running=running, outcome="served"), Spawn(yielding=running.cause is not Cause.START)]


def action_failed(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert isinstance(event, ActionFailed)
    running = pair.running
    if running is None or event.serial != running.serial:
        return pair, []
    if event.worker_gone and pair.shadow is not None:
        return _drop_candidate(pair, pair.shadow, f"worker lost: {event.reason}", now, limits)
    if event.not_yet or BY_ACTION[event.action].on_failure is OnFailure.RETRY:
        running = msgspec.structs.replace(running, waits=True)
        return _set(pair, running=running, reason=f"{event.action}: {event.reason}"), [Wait(seconds=limits.retry_s)]
    return _quarantine(pair, f"{event.action} failed: {event.reason}")


def retry(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """The wait may be an older one, of a start: an action that is under way is not begun beside itself, since one of
    two (a lease, a generation) would be refused by the worker, which is a failed gate. A new life begins it again."""
    if isinstance(event, BackoffOver) and not (pair.running and pair.running.waits):
        return pair, []
    return _perform(_set(pair, reason=""))


def asked(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """A planned handover is the same path; the old main is fenced like a dead one."""
    assert isinstance(event, HandoverAsked)
    return _begin_and_perform(_begin(pair, Cause.OPERATOR, event.reason, event.incident_id, now), State.HANDOVER)


def still_quarantined(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """After a restart of belayerd: the effects of the quarantine may not have been performed."""
    return pair, [
        Withdraw(generation=pair.generation, reason=pair.reason),
        QuarantineArena(reason=pair.reason),
    ]


def restored(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    after = _set(pair, state=State.ARMING, reason="", last_failover=None, failed_starts=0)
    return after, [RestoreArena(), Save(), Spawn()]


def rearm_anew(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    """The shadow could not take over: another one, which opens its arena at the owner that lives. The main goes on
    in the memory that it has mapped."""
    assert pair.shadow is not None
    after = _set(pair, state=State.REARMING, shadow=None, reason="the kv owner was replaced")
    return after, [Kill(worker=pair.shadow), Save(), Spawn()]


def announce(pair: Pair, event: Event, now: float, limits: policy.Limits) -> Out:
    assert pair.main is not None
    return pair, [Announce(worker=pair.main, generation=pair.generation)]
