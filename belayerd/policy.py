"""Judgements of the supervisor, pure: repeat failures, restart budget, staleness of a heartbeat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from belayer.heartbeat import Observation


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and counts from [policy] and [[slot]] of the configuration."""

    repeat_window_s: float = 60.0
    restart_budget: int = 3
    restart_backoff_s: float = 1.0
    retry_s: float = 0.2
    hang_limit_s: float = 2.0
    start_deadline_s: float = 180.0


def is_repeat(last_failover: float | None, now: float, limits: Limits) -> bool:
    """Paper section 3.2: a second failure soon after a handover points at the device, not at the worker."""
    return last_failover is not None and now - last_failover < limits.repeat_window_s


def gives_up(failed_starts: int, limits: Limits) -> bool:
    return failed_starts >= limits.restart_budget


def gave_up(state: str, failed_starts: int, limits: Limits) -> bool:
    """Whether a slot in this state waits for somebody outside."""
    return state == "quarantined" or (state in ("empty", "exposed") and gives_up(failed_starts, limits))


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a slot comes back by itself. ``gave_up``: nothing is tried any more; ``workers``: how many
    it has."""

    slot: str
    state: str
    gave_up: bool
    workers: int


def beyond_help(slots: Sequence[Outlook], *, missing: bool, blocked: bool) -> tuple[str, ...]:
    """Slots that serve nobody and that only an operator brings back, by name. ``missing``: an owner is away, or weights
    are being written: what a slot gave up for may be mended without an operator, and is then tried again. ``blocked``:
    what every new worker needs has refused to start, so a slot without any gets none."""
    return tuple(sorted(row.slot for row in slots if _beyond_help(row, missing, blocked)))


def _beyond_help(row: Outlook, missing: bool, blocked: bool) -> bool:
    if row.state == "quarantined":
        return True
    if row.workers:
        return False
    return blocked or (row.gave_up and not missing)


def backoff(failed_starts: int, limits: Limits) -> float:
    """Doubling, from ``restart_backoff_s``, capped at a minute."""
    return float(min(60.0, limits.restart_backoff_s * 2.0 ** max(0, failed_starts - 1)))


class SpareView(msgspec.Struct, frozen=True, kw_only=True):
    """What decides about spares. ``configured``: declared as a spare; ``waiting``: not called yet."""

    slot: str
    model: str
    state: str
    configured: bool = False
    waiting: bool = False


def spares_to_call(slots: Sequence[SpareView]) -> list[str]:
    """One spare for each quarantined slot of its model, ready ones first. A called spare stays in service, also when
    the quarantined slot is restored."""
    called = []
    for model in dict.fromkeys(slot.model for slot in slots):
        mine = [slot for slot in slots if slot.model == model]
        out = sum(slot.state == "quarantined" and not slot.waiting for slot in mine)
        serving = sum(slot.configured and not slot.waiting for slot in mine)
        ready = sorted((slot for slot in mine if slot.waiting), key=lambda slot: slot.state != "reserve")
        called += [slot.slot for slot in ready[: max(0, out - serving)]]
    return called


class Vital(msgspec.Struct, frozen=True):
    """The process behind the heartbeat: state letter of proc(5), CPU seconds since the last change of the beat."""

    state: str
    cpu_s: float


_STOPPED = frozenset("Tt")


def vital_of(processes: Sequence[Vital]) -> Vital:
    """Of a worker of several processes, the one that beats first. One that is stopped stops all; else one that works
    speaks for the leader that waits for it, with the most CPU that any has used (a stuck one uses it up)."""
    leader = processes[0]
    for kind in (_STOPPED, _WANTS_CPU):
        for one in processes:
            if one.state in kind:
                return Vital(one.state, max(row.cpu_s for row in processes))
    return leader


# A process that wants a core and gets none is starved, not hung: its budget is then CPU time, up to this many limits.
_STARVED = 10.0
_WANTS_CPU = frozenset("RD")


def look_every(poll_s: float, limits: Limits) -> float:
    """Seconds between two looks at a heartbeat. A death is told by its pidfd; a hang may be seen a fortieth of its
    limit later, for which belayerd sleeps the rest of the time."""
    return max(poll_s, limits.hang_limit_s / 40)


def gap(limits: Limits) -> float:
    """Seconds between two looks that count as watched; a longer gap is the watcher's own, not the worker's silence."""
    return limits.hang_limit_s / 4


def hang(seen: Observation, vital: Vital, limits: Limits) -> str:
    """Why this heartbeat means a hang, or "". Before the first beat the start deadline rules.

    A stopped or sleeping process is hung at the limit. A runnable one (or one that waits for a page) is hung when it
    has *used* the limit in CPU time without a beat, so that a crowded host is no false alarm."""
    pulse = seen.pulse
    if pulse is None:
        if seen.age_s > limits.start_deadline_s:
            return f"no first heartbeat in {limits.start_deadline_s:g} s"
        return ""
    allowed = max(limits.hang_limit_s, pulse.deadline_s)
    if seen.age_s <= allowed:
        return ""
    starved = vital.state in _WANTS_CPU and vital.cpu_s < allowed and seen.age_s < _STARVED * allowed
    if starved:
        return ""
    return (
        f"no heartbeat for {seen.age_s:.2f} s in phase {pulse.phase} (allowed {allowed:g} s), "
        f"process state {vital.state or 'gone'}, {vital.cpu_s:.2f} s of CPU since"
    )


def stuck(seen: Observation, limits: Limits) -> str:
    """Why a beating loop is stuck, or "": it has work and its step and token counters stand still."""
    pulse = seen.pulse
    if pulse is None or pulse.deadline_s > 0:
        return ""
    allowed = 5 * limits.hang_limit_s
    if seen.steps_flat_s > allowed:
        return f"loops but makes no step for {seen.steps_flat_s:.2f} s with {pulse.waiting + pulse.running} requests"
    return ""
