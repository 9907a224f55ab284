"""Is this GPU fit to be reused after a failure? Pure: what NVML and the probe answered goes in, a verdict comes out.

Any single bad sign makes the device unhealthy, and names itself. A check that the device does not offer is no sign; a
check that gives no answer is a bad one; a GPU that NVML calls lost is a bad one wherever it is said. The number of an
Xid is never trusted alone: after worker-local ones the device is still probed by a kernel of its own.

Xid classes: NVIDIA's documentation of Xid errors, and the list that its Kubernetes device plugin treats as errors of
the application (k8s-device-plugin, internal/rm/health.go)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

_Fault = Callable[[tuple[int, ...]], str]


class Check(StrEnum):
    RECOVERY_ACTION = "recovery_action"
    XID = "xid"
    ECC = "ecc"
    REMAPPED_ROWS = "remapped_rows"
    NVLINK = "nvlink"
    PROBE = "probe"


class Outcome(StrEnum):
    OK = "ok"
    BAD = "bad"
    NOT_SUPPORTED = "not_supported"
    TIMEOUT = "timeout"


class State(StrEnum):
    """How one question ended. LOST: NVML says that the GPU is gone or wants a reset; FAILED: any other error."""

    ANSWERED = "answered"
    NOT_SUPPORTED = "not_supported"
    LOST = "lost"
    TIMEOUT = "timeout"
    FAILED = "failed"


class Answer(msgspec.Struct, frozen=True):
    """``values`` mean what the check says; empty unless ANSWERED. ``said``: the error in words."""

    state: State
    values: tuple[int, ...] = ()
    said: str = ""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a device. ``recovery_action``: one value of nvmlDeviceGpuRecoveryAction_t. ``xids``: numbers seen
    since the last look. ``ecc``: (uncorrected errors since the driver was loaded). ``remapped_rows``: (pending,
    failed). ``nvlink``: (receive errors of all links, links that are down)."""

    recovery_action: Answer
    xids: Answer
    ecc: Answer
    remapped_rows: Answer
    nvlink: Answer


class Reading(msgspec.Struct, frozen=True):
    check: Check
    outcome: Outcome
    said: str


class Verdict(msgspec.Struct, frozen=True):
    """``full_checksum``: page content is suspect, every digest must be verified before anything resident is reused."""

    readings: tuple[Reading, ...]
    full_checksum: bool = False

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the device is unhealthy; empty when it is not. The probe is ours: that it cannot be run is no excuse."""
        return tuple(
            f"{row.check}: {row.said}"
            for row in self.readings
            if row.outcome in (Outcome.BAD, Outcome.TIMEOUT)
            or (row.check is Check.PROBE and row.outcome is Outcome.NOT_SUPPORTED)
        )

    @property
    def healthy(self) -> bool:
        return not self.reasons

    def describe(self) -> str:
        """One line for the incident: what was checked, and what the device does not offer."""
        unseen = [row.check.value for row in self.readings if row.outcome is Outcome.NOT_SUPPORTED]
        said = "; ".join(f"{row.check}: {row.said}" for row in self.readings if row.outcome is Outcome.OK)
        return f"{said}; not offered by this device: {', '.join(unseen)}" if unseen else said


class XidClass(StrEnum):
    """WORKER_LOCAL: an error of one process. CONTAINED: memory of one process was hit, and its content is suspect.
    ACTION: the recovery action changed, which is a check of its own. GPU_WIDE: all else, known or not."""

    WORKER_LOCAL = "worker_local"
    CONTAINED = "contained"
    ACTION = "action"
    GPU_WIDE = "gpu_wide"


XIDS: dict[int, tuple[XidClass, str]] = {
    13: (XidClass.WORKER_LOCAL, "graphics engine exception"),
    31: (XidClass.WORKER_LOCAL, "memory page fault"),
    43: (XidClass.WORKER_LOCAL, "channel stopped"),
    45: (XidClass.WORKER_LOCAL, "channels removed after an error or a kill"),
    48: (XidClass.GPU_WIDE, "double bit ECC error"),
    62: (XidClass.GPU_WIDE, "internal microcontroller halt"),
    63: (XidClass.GPU_WIDE, "row remapping recorded"),
    64: (XidClass.GPU_WIDE, "row remapping failed"),
    68: (XidClass.WORKER_LOCAL, "video processor exception"),
    74: (XidClass.GPU_WIDE, "NVLink error"),
    79: (XidClass.GPU_WIDE, "GPU has fallen off the bus"),
    92: (XidClass.GPU_WIDE, "high rate of single bit ECC errors"),
    94: (XidClass.CONTAINED, "contained memory error"),
    95: (XidClass.GPU_WIDE, "uncontained memory error"),
    109: (XidClass.WORKER_LOCAL, "context switch timeout"),
    119: (XidClass.GPU_WIDE, "GSP does not answer"),
    120: (XidClass.GPU_WIDE, "GSP error"),
    140: (XidClass.GPU_WIDE, "unrecovered ECC error"),
    154: (XidClass.ACTION, "recovery action changed"),
}

# nvmlDeviceGpuRecoveryAction_t; a number that is not here is as bad as any but 0.
RECOVERY_ACTIONS = {
    0: "none",
    1: "GPU reset",
    2: "node reboot",
    3: "drain peer to peer traffic",
    4: "drain and reset",
    5: "recover the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}


def xid_class(number: int) -> XidClass:
    """Total: a number that nobody has classified is GPU-wide."""
    return XIDS[number][0] if number in XIDS else XidClass.GPU_WIDE


def judge(before: Sample, after: Sample, probe: Answer) -> Verdict:
    """``before``: the last sample of this device that was judged healthy, or the one of the start. ``probe``: what the
    small kernel in the warm context said."""
    readings = (
        _read(Check.RECOVERY_ACTION, after.recovery_action, _action),
        _read(Check.XID, after.xids, _xids),
        _read(Check.ECC, after.ecc, lambda now: _grown("uncorrected errors", before.ecc, now[0])),
        _read(Check.REMAPPED_ROWS, after.remapped_rows, _rows),
        _read(Check.NVLINK, after.nvlink, lambda now: _links(before.nvlink, now)),
        _read(Check.PROBE, probe, lambda now: ""),
    )
    contained = any(xid_class(number) is XidClass.CONTAINED for number in after.xids.values)
    return Verdict(readings, full_checksum=contained)


def _read(check: Check, answer: Answer, fault: _Fault) -> Reading:
    """``fault(values)``: what is wrong with an answer, or ""."""
    match answer.state:
        case State.NOT_SUPPORTED:
            return Reading(check, Outcome.NOT_SUPPORTED, answer.said or "not supported")
        case State.TIMEOUT:
            return Reading(check, Outcome.TIMEOUT, answer.said or "no answer")
        case State.LOST | State.FAILED:
            return Reading(check, Outcome.BAD, answer.said or answer.state.value)
        case State.ANSWERED:
            wrong = fault(answer.values)
            said = wrong or answer.said or _shown(check, answer.values)
            return Reading(check, Outcome.BAD if wrong else Outcome.OK, said)


def _shown(check: Check, values: tuple[int, ...]) -> str:
    if check is Check.XID:
        return f"worker-local {list(values)}" if values else "none"
    return RECOVERY_ACTIONS[0] if check is Check.RECOVERY_ACTION else " ".join(map(str, values))


def _action(now: tuple[int, ...]) -> str:
    return "" if now[0] == 0 else f"the driver asks for: {RECOVERY_ACTIONS.get(now[0], f'action {now[0]}')}"


def _xids(now: tuple[int, ...]) -> str:
    wide = [number for number in now if xid_class(number) is XidClass.GPU_WIDE]
    return ", ".join(f"{number} ({XIDS[number][1] if number in XIDS else 'unknown'})" for number in wide)


def _rows(now: tuple[int, ...]) -> str:
    pending, failed = now
    return "remapping failed" if failed else "a remapping waits for a reset" if pending else ""


def _grown(what: str, before: Answer, now: int) -> str:
    """A counter that could not be read before is counted from 0: an error that was missed is not forgiven."""
    new = now - (before.values[0] if before.state is State.ANSWERED else 0)
    # A counter that went back means that the driver was loaded again, and nothing resident has survived that.
    return f"{new} new {what}" if new > 0 else "the counter went back" if new < 0 else ""


def _links(before: Answer, now: tuple[int, ...]) -> str:
    errors, down = now
    was = before.values[1] if before.state is State.ANSWERED else 0
    return _grown("receive errors", before, errors) or (f"{down - was} more links are down" if down > was else "")
