"""Errors named for the fact, with one base and closed wire codes.

A message says what failed and where; ``kept`` what is still whole; ``remedy`` what to do next. On the wire an
error is its code and these three sentences: a peer never chooses a Python class of ours.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class ErrorCode(StrEnum):
    CONFIG_INVALID = "config_invalid"
    HOST_UNFIT = "host_unfit"
    FENCED = "fenced"
    OWNER_GONE = "owner_gone"
    WEIGHTS_TORN = "weights_torn"
    WEIGHTS_BROKEN = "weights_broken"
    LEASE_REFUSED = "lease_refused"
    GPU_UNHEALTHY = "gpu_unhealthy"
    WORKER_GONE = "worker_gone"
    WORKER_FAILED = "worker_failed"
    HANDOVER_FAILED = "handover_failed"
    REPLACEMENT_OWED = "replacement_owed"
    MEMBER_REPLACED = "member_replaced"
    GROUP_BROKEN = "group_broken"
    REQUEST_UNKNOWN = "request_unknown"
    REQUEST_STALLED = "request_stalled"
    POISON_REQUEST = "poison_request"
    NO_HEALTHY_SLOT = "no_healthy_slot"
    SLOT_UNKNOWN = "slot_unknown"
    SANDBOX_LOST = "sandbox_lost"
    SANDBOX_UNKNOWN = "sandbox_unknown"
    CHECKPOINT_REFUSED = "checkpoint_refused"
    CHECKPOINT_INCOMPLETE = "checkpoint_incomplete"
    RESTORE_FAILED = "restore_failed"
    CLAIM_TAKEN = "claim_taken"
    ACTION_TIMEOUT = "action_timeout"
    DAEMON_UNREACHABLE = "daemon_unreachable"
    BAD_MESSAGE = "bad_message"
    REFUSED = "refused"
    BROKEN = "broken"


class BelayerError(Exception):
    """Base of every expected fault. ``str(error)`` is the whole story in one line."""

    code: ClassVar[ErrorCode] = ErrorCode.BROKEN

    def __init__(self, message: str, *, kept: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message, self.kept, self.remedy = message, kept, remedy

    def __str__(self) -> str:
        tail = [f"kept: {self.kept}"] if self.kept else []
        tail += [self.remedy] if self.remedy else []
        return "; ".join([self.message, *tail])


class ConfigInvalid(BelayerError):
    """The configuration names something that cannot be: exit 2, nothing started."""

    code = ErrorCode.CONFIG_INVALID


class HostUnfit(BelayerError):
    """The host lacks something that the daemon needs (Docker, CRIU, a port): exit 2, nothing started."""

    code = ErrorCode.HOST_UNFIT


class AlreadyRuns(HostUnfit):
    """Another instance of the daemon holds the lock of this root: that says nothing about the other one."""


class HostNotReady(HostUnfit):
    """It is there, but does not answer now: exit 3 at start, so that systemd tries again (exit 2 it does not)."""


class Fenced(BelayerError):
    """The message carries an old generation or epoch: its sender has been replaced."""

    code = ErrorCode.FENCED


class OwnerGone(BelayerError):
    code = ErrorCode.OWNER_GONE


class WeightsTorn(BelayerError):
    """A writer died inside an update: refused until the weights are published again (promise R4)."""

    code = ErrorCode.WEIGHTS_TORN


class WeightsBroken(BelayerError):
    """A model file is missing, truncated or does not match, or a digest differs."""

    code = ErrorCode.WEIGHTS_BROKEN


class LeaseRefused(BelayerError):
    """The arena has a holder, or its last holder has not been seen dead (promise R1)."""

    code = ErrorCode.LEASE_REFUSED


class GpuUnhealthy(BelayerError):
    """A check of the device failed, or did not answer in its bound: nothing resident on it is reused (promise R5)."""

    code = ErrorCode.GPU_UNHEALTHY


class WorkerGone(BelayerError):
    code = ErrorCode.WORKER_GONE


class WorkerFailed(BelayerError):
    """A worker lives but could not do what it was asked (its own words are in the message)."""

    code = ErrorCode.WORKER_FAILED


class HandoverFailed(BelayerError):
    code = ErrorCode.HANDOVER_FAILED


class ReplacementOwed(BelayerError):
    """A trainer has not acknowledged that a main was replaced: its group may hold a dead one, so no update begins."""

    code = ErrorCode.REPLACEMENT_OWED


class MemberReplaced(BelayerError):
    """A member of a trainer's collective group is dead and replaced: make the group anew, acknowledge, repeat."""

    code = ErrorCode.MEMBER_REPLACED


class GroupBroken(BelayerError):
    """A collective failed, or did not end in its bound, and no replacement explains it."""

    code = ErrorCode.GROUP_BROKEN


class RequestUnknown(BelayerError):
    code = ErrorCode.REQUEST_UNKNOWN


class RequestStalled(BelayerError):
    """A worker that lives had the request and said nothing about it within the bound (promise R6)."""

    code = ErrorCode.REQUEST_STALLED


class PoisonRequest(BelayerError):
    """Each of several workers died with this request on board: it is not given to another one."""

    code = ErrorCode.POISON_REQUEST


class NoHealthySlot(BelayerError):
    """No worker could take the request within its bound (promise R6)."""

    code = ErrorCode.NO_HEALTHY_SLOT


class SlotUnknown(BelayerError):
    code = ErrorCode.SLOT_UNKNOWN


class SandboxLost(BelayerError):
    """The sandbox died: what the action did is unknown, so there is no observation (promise E5)."""

    code = ErrorCode.SANDBOX_LOST


class SandboxUnknown(BelayerError):
    code = ErrorCode.SANDBOX_UNKNOWN


class CheckpointRefused(BelayerError):
    """The sandbox holds something that cannot be restored exactly; the reason is named (promise E4)."""

    code = ErrorCode.CHECKPOINT_REFUSED


class CheckpointIncomplete(BelayerError):
    code = ErrorCode.CHECKPOINT_INCOMPLETE


class RestoreFailed(BelayerError):
    code = ErrorCode.RESTORE_FAILED


class ClaimTaken(BelayerError):
    """Another restorer holds the one right to restore (promise E6)."""

    code = ErrorCode.CLAIM_TAKEN


class ActionTimeout(BelayerError):
    code = ErrorCode.ACTION_TIMEOUT


class DaemonUnreachable(BelayerError):
    """Nothing answered at the daemon's socket within the bound: exit 3 at the command line."""

    code = ErrorCode.DAEMON_UNREACHABLE


class OwnerComing(DaemonUnreachable):
    """An owner lives and does not answer yet, and gets on with what it does first: it is waited for. A fault of
    nothing."""


class BadMessage(BelayerError):
    """Bytes that are no message of ours: too large, torn, of another type."""

    code = ErrorCode.BAD_MESSAGE


class Refused(BelayerError):
    """Understood and declined in this state; the message names the state."""

    code = ErrorCode.REFUSED


_BY_CODE: dict[ErrorCode, type[BelayerError]] = {kind.code: kind for kind in BelayerError.__subclasses__()}


def from_code(code: str, message: str, kept: str = "", remedy: str = "") -> BelayerError:
    """The error that a peer reported; an unknown code becomes the base class, still with its sentences."""
    known = code in ErrorCode.__members__.values()
    kind = _BY_CODE.get(ErrorCode(code), BelayerError) if known else BelayerError
    return kind(message, kept=kept, remedy=remedy)
