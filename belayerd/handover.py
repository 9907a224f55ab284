"""The five steps of a handover as data (paper section 3.2, with the fence moved before the lease: promise R1).

Each action has a precondition (its place in the order), one effect, a deadline and what its failure means. An action
is idempotent in the daemon that performs it, so that a belayerd which was killed inside one performs it again.
The order is the protocol:

1 detect    the router drops the old generation first, so that nothing of it is delivered while it dies;
2 secure    the old tree is killed and *seen dead* before the arena is freed, owners and device are checked before
            anything resident is reused, the lease is taken before the view becomes shared, and the prefix cache is
            flushed before any request can hit it;
3 unpark    graph memory is mapped back, then one oracle token proves weights, arena and kernels together (R5);
4 register  the worker takes its generation before the router sends it a request;
5 resume    the router re-adds what was interrupted.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Action(StrEnum):
    UNREGISTER = "unregister"
    FENCE = "fence"
    OWNERS = "owners"
    HEALTH = "health"
    LEASE = "lease"
    FLUSH = "flush"
    UNPARK = "unpark"
    ORACLE = "oracle"
    BECOME = "become"
    REGISTER = "register"


class OnFailure(StrEnum):
    """RETRY: the peer is down, not the slot. QUARANTINE: nothing resident is reused, the device is excluded."""

    RETRY = "retry"
    QUARANTINE = "quarantine"


class Step(msgspec.Struct, frozen=True):
    """``number``: the paper's step. ``fence_deadline``: bound by policy.fence_deadline_s, not step_deadline_s."""

    action: Action
    number: int
    name: str
    on_failure: OnFailure
    why: str
    fence_deadline: bool = False


STEPS: tuple[Step, ...] = (
    Step(Action.UNREGISTER, 1, "detect", OnFailure.RETRY, "nothing of the old generation is delivered any more"),
    Step(Action.FENCE, 2, "secure", OnFailure.QUARANTINE, "every process of the old tree seen dead", True),
    Step(
        Action.OWNERS,
        2,
        "secure",
        OnFailure.QUARANTINE,
        "both owners alive, weights sealed, digest as recorded",
    ),
    Step(
        Action.HEALTH,
        2,
        "secure",
        OnFailure.QUARANTINE,
        "a GPU shows no bad sign and its probe is right; of a CPU nothing is checked",
    ),
    Step(
        Action.LEASE,
        2,
        "secure",
        OnFailure.QUARANTINE,
        "the arena is granted at a new epoch and mapped shared",
    ),
    Step(Action.FLUSH, 2, "secure", OnFailure.QUARANTINE, "no cached block of the old main can be hit"),
    Step(Action.UNPARK, 3, "unpark", OnFailure.QUARANTINE, "graph memory is mapped again"),
    Step(Action.ORACLE, 3, "unpark", OnFailure.QUARANTINE, "one token equal to what the main recorded"),
    Step(
        Action.BECOME,
        4,
        "register",
        OnFailure.QUARANTINE,
        "the worker accepts requests in the new generation",
    ),
    Step(
        Action.REGISTER,
        4,
        "register",
        OnFailure.RETRY,
        "the router sends to the new generation and resumes (step 5)",
    ),
)

BY_ACTION: dict[Action, Step] = {step.action: step for step in STEPS}

# A first main has no predecessor to unregister; FENCE stays, since it also frees an arena that a dead life left leased.
FIRST: tuple[Action, ...] = tuple(step.action for step in STEPS if step.action is not Action.UNREGISTER)
HANDOVER: tuple[Action, ...] = tuple(step.action for step in STEPS)


def plan_for(*, has_old_main: bool) -> tuple[Action, ...]:
    return HANDOVER if has_old_main else FIRST
