"""What others see of a slot: its row of the status, and its incidents. Asks /proc, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from belayer import config, procs
from belayer.clock import wall
from belayer.messages.control import Incident, RankView, SlotView, StepTiming, WorkerView
from belayerd import pair as p
from belayerd.handover import BY_ACTION
from belayerd.watch import Watched


def slot(
    pair: p.Pair,
    said: config.Slot,
    watched: Mapping[str, Watched],
    reason: str,
    since: float,
    last_incident: Incident | None,
    rearm_ms: float,
    gave_up: bool,
) -> SlotView:
    refs = (("main", pair.main), ("shadow", pair.shadow))
    return SlotView(
        slot=pair.slot,
        state=pair.state,
        generation=pair.generation,
        protected=pair.protected,
        model=said.model,
        device=said.device,
        weight_version=pair.oracle.weight_version if pair.oracle else 0,
        workers=tuple(_worker(role, ref, watched.get(ref.worker_id)) for role, ref in refs if ref is not None),
        handovers=pair.handovers,
        reason=reason,
        since=since,
        last_incident=last_incident,
        rearm_ms=rearm_ms,
        gave_up=gave_up,
    )


def _worker(role: str, ref: p.Ref, watched: Watched | None) -> WorkerView:
    seen = watched.seen if watched else None
    view = WorkerView(
        worker_id=ref.worker_id,
        pid=ref.pid,
        role=role,
        state=procs.state(ref.pid) or "gone",
        age_ms=seen.age_s * 1e3 if seen else 0.0,
        rss_mb=procs.rss_mb(ref.pid),
        ranks=_ranks(watched) if watched else (),
    )
    if seen is None or seen.pulse is None:
        return view
    pulse = seen.pulse
    return msgspec.structs.replace(
        view, phase=pulse.phase, step=pulse.step, running=pulse.running, waiting=pulse.waiting
    )


def _ranks(watched: Watched) -> tuple[RankView, ...]:
    return tuple(
        RankView(rank=rank, pid=pid, state=procs.state(pid) or "gone", rss_mb=procs.rss_mb(pid))
        for rank, pid in enumerate(watched.others(), start=1)
    )


def incident(pair: p.Pair, running: p.Running, outcome: str, injected: bool, detail: str, now: float) -> Incident:
    """``running`` as it stands at ``now`` (monotonic)."""
    total = (now - running.detected_at) * 1e3
    return Incident(
        incident_id=running.incident_id,
        slot=pair.slot,
        at=wall() - total / 1e3,
        cause=running.cause,
        detail=detail,
        from_generation=pair.generation - (outcome == "served"),
        to_generation=pair.generation,
        outcome=outcome,
        steps=tuple(
            StepTiming(step=f"{BY_ACTION[t.action].number} {t.action}", ms=t.ms, detail=t.detail)
            for t in running.timings
        ),
        total_ms=total,
        injected=injected,
    )
