"""NVML of one well H200, and every way in which it can be unwell. Same names and argument counts as ``pynvml``: a test
compares them (tests/unit/test_nvml.py)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 10: "Timeout", 15: "GPU is lost"}.get(value, f"error {value}"))
        self.value = value


class FakeNvml:
    """``breaks[name]``: the call ``name`` raises that NVML error, or hangs when it is "hang"."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS = 208
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FEATURE_ENABLED = 1
    nvmlEventTypeXidCriticalError = 8
    nvmlEventTypeDoubleBitEccError = 2

    def __init__(self) -> None:
        self.recovery_action = 0
        self.xids: list[int] = []
        self.double_bit_events = 0
        self.ecc = 3
        self.rows = (2, 0, 0, 0)
        self.links = 18
        self.links_down: set[int] = set()
        self.nvlink_errors = 5
        self.breaks: dict[str, int | str] = {}
        self.let_go = threading.Event()

    def _may(self, name: str) -> None:
        how = self.breaks.get(name)
        if how == "hang":
            self.let_go.wait()
        elif isinstance(how, int):
            raise NVMLError(how)

    def nvmlInit(self) -> None:
        self._may("nvmlInit")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self._may("nvmlDeviceGetHandleByIndex")
        if index:
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return "GPU-1"

    def nvmlDeviceGetSupportedEventTypes(self, handle: str) -> int:
        self._may("nvmlDeviceGetSupportedEventTypes")
        return 0xFF

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, eventTypes: int, eventSet: str) -> None:
        assert eventTypes == 10

    def nvmlEventSetWait_v2(self, eventSet: str, timeoutms: int) -> Any:
        self._may("nvmlEventSetWait_v2")
        if self.double_bit_events:
            self.double_bit_events -= 1
            return SimpleNamespace(eventType=2, eventData=0)
        if not self.xids:
            raise NVMLError(self.NVML_ERROR_TIMEOUT)
        return SimpleNamespace(eventType=8, eventData=self.xids.pop(0))

    def nvmlDeviceGetFieldValues(self, handle: str, fieldIds: list[Any]) -> list[Any]:
        self._may("nvmlDeviceGetFieldValues")
        out = []
        for number, _ in fieldIds:
            recovery = number == self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
            code = self.breaks.get("recovery field" if recovery else "nvlink field", 0)
            number = self.recovery_action if recovery else self.nvlink_errors
            value = SimpleNamespace(uiVal=number, ullVal=number)
            out.append(SimpleNamespace(nvmlReturn=code, valueType=1 if recovery else 3, value=value))
        return out

    def nvmlDeviceGetTotalEccErrors(self, handle: str, errorType: int, counterType: int) -> int:
        self._may("nvmlDeviceGetTotalEccErrors")
        assert (errorType, counterType) == (1, 0)
        return self.ecc

    def nvmlDeviceGetRemappedRows(self, device: str) -> tuple[int, int, int, int]:
        self._may("nvmlDeviceGetRemappedRows")
        return self.rows

    def nvmlDeviceGetNvLinkState(self, device: str, link: int) -> int:
        self._may("nvmlDeviceGetNvLinkState")
        if link >= self.links:
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return int(link not in self.links_down)
