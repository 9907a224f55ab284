"""What NVML says of one GPU, each question with a deadline. Judged in ``health``.

A hung driver hangs its callers inside the kernel, so every question is asked from a thread that may be left behind.
After one that gave no answer nothing more is asked: the others would hang as well, and the verdict is known."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from belayer.bounded import bounded
from belayer.errors import HostUnfit
from belayerd.health import Answer, Check, Sample, State, Verdict, judge

_MOST_EVENTS = 64
_DEADLINE_S = 1.0
_INIT_S = 10.0


def load_nvml() -> Any:
    """The module ``pynvml`` (package nvidia-ml-py), initialised. Raises HostUnfit."""
    try:
        import pynvml
    except ImportError as why:
        raise HostUnfit(
            f"slots on a GPU need the package nvidia-ml-py: {why}",
            kept="nothing was started",
            remedy="pip install 'belayer[gpu]'",
        ) from why
    try:
        bounded(pynvml.nvmlInit, _INIT_S, "nvmlInit")
    except (pynvml.NVMLError, TimeoutError) as why:
        raise HostUnfit(
            f"NVML does not start: {why}",
            kept="nothing was started",
            remedy="nvidia-smi shows whether this host has a driver and a device",
        ) from why
    return pynvml


class Device:
    """One GPU. ``name``: ``gpu``, ``gpu:INDEX`` or ``gpu:UUID``, as in [[slot]]. ``nvml``: the module, or a fake that
    has passed tests/unit/test_nvml.py. The first sample is the baseline of counters."""

    def __init__(self, nvml: Any, name: str, deadline_s: float = _DEADLINE_S) -> None:
        self._nvml, self._deadline_s = nvml, deadline_s
        self._hung = ""
        self._unforgiven: list[int] = []  # Xids since the last healthy verdict
        self._lock = threading.Lock()  # two slots may share a device
        try:
            self._handle, self.uuid = bounded(lambda: self._find(name), 10 * deadline_s, f"NVML for {name}")
        except (nvml.NVMLError, TimeoutError, ValueError) as why:
            raise HostUnfit(
                f"device {name!r}: {why}", kept="nothing was started", remedy="nvidia-smi -L lists index and UUID"
            ) from why
        self._events = self._watch()
        self.baseline = self.sample()

    def check(self, probe: Answer) -> Verdict:
        """Judge the device now; a healthy sample becomes the next baseline. Blocking: use a thread.

        NVML tells an Xid once. One that made a device unhealthy stays in every later sample, or the next slot on the
        same device would be told that all is well."""
        with self._lock:
            now = self.sample()
            verdict = judge(self.baseline, now, probe)
            if verdict.healthy:
                self.baseline, self._unforgiven = now, []
            return verdict

    def sample(self) -> Sample:
        return Sample(
            recovery_action=self._ask(Check.RECOVERY_ACTION, self._recovery_action),
            xids=self._ask(Check.XID, self._xids),
            ecc=self._ask(Check.ECC, self._ecc),
            remapped_rows=self._ask(Check.REMAPPED_ROWS, self._remapped),
            nvlink=self._ask(Check.NVLINK, self._nvlink),
        )

    def _ask(self, check: Check, question: Callable[[], tuple[int, ...]]) -> Answer:
        nvml = self._nvml
        if self._hung:
            return Answer(State.TIMEOUT, said=f"not asked: {self._hung}")
        try:
            return Answer(State.ANSWERED, bounded(question, self._deadline_s, f"NVML {check}"))
        except TimeoutError as why:
            self._hung = str(why)
            return Answer(State.TIMEOUT, said=str(why))
        except nvml.NVMLError as why:
            gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_NOT_FOUND)
            if why.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                return Answer(State.NOT_SUPPORTED, said=str(why))
            return Answer(State.LOST if why.value in gone else State.FAILED, said=str(why))

    # --- questions ---

    def _find(self, name: str) -> tuple[Any, str]:
        _, _, which = name.partition(":")
        nvml = self._nvml
        by_uuid = which.startswith("GPU-")
        handle = nvml.nvmlDeviceGetHandleByUUID(which) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(int(which or 0))
        return handle, str(nvml.nvmlDeviceGetUUID(handle))

    def _watch(self) -> Any:
        """An event set for Xids; None where the device has no events."""
        nvml = self._nvml
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError

        def register() -> Any:
            supported = wanted & nvml.nvmlDeviceGetSupportedEventTypes(self._handle)
            if not supported & nvml.nvmlEventTypeXidCriticalError:
                return None
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(self._handle, supported, events)
            return events

        try:
            return bounded(register, self._deadline_s, "NVML event registration")
        except TimeoutError as why:
            self._hung = str(why)
            return None
        except nvml.NVMLError as why:
            if why.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise HostUnfit(f"NVML gives no Xid events for {self.uuid}: {why}", kept="nothing was started") from why

    def _recovery_action(self) -> tuple[int, ...]:
        return (self._field(self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),)

    def _xids(self) -> tuple[int, ...]:
        nvml, found = self._nvml, self._unforgiven
        if self._events is None:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        while len(found) < _MOST_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as why:
                if why.value == nvml.NVML_ERROR_TIMEOUT:
                    return tuple(found)
                raise
            double_bit = event.eventType == nvml.nvmlEventTypeDoubleBitEccError
            found.append(48 if double_bit else int(event.eventData))
        return tuple(found)

    def _ecc(self) -> tuple[int, ...]:
        nvml = self._nvml
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return (int(nvml.nvmlDeviceGetTotalEccErrors(self._handle, uncorrected, volatile)),)

    def _remapped(self) -> tuple[int, ...]:
        _, _, pending, failed = self._nvml.nvmlDeviceGetRemappedRows(self._handle)
        return int(pending), int(failed)

    def _nvlink(self) -> tuple[int, ...]:
        nvml = self._nvml
        links, errors, down = 0, 0, 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                up = nvml.nvmlDeviceGetNvLinkState(self._handle, link) == nvml.NVML_FEATURE_ENABLED
                errors += self._field(nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, link) if up else 0
            except nvml.NVMLError as why:
                # A link that this board does not have, or a counter that this link does not have, is no sign.
                if why.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                    continue
                raise
            links, down = links + 1, down + (not up)
        if not links:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        return errors, down

    def _field(self, number: int, scope: int = 0) -> int:
        nvml = self._nvml
        (value,) = nvml.nvmlDeviceGetFieldValues(self._handle, [(number, scope)])
        if value.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(value.nvmlReturn)
        wide = value.valueType in (nvml.NVML_VALUE_TYPE_UNSIGNED_LONG, nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
        return int(value.value.ullVal if wide else value.value.uiVal)
