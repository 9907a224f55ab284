"""The NVML shell: each question ends in its bound and in a named answer; the fake has the names of the real library."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from belayer.errors import HostUnfit
from belayerd import nvml as shell
from belayerd.health import RECOVERY_ACTIONS, Answer, Check, Sample, State
from belayerd.nvml import Device, load_nvml
from tests.support.fake_nvml import FakeNvml

PROBED = Answer(State.ANSWERED, said="probe")
_LOST, _UNSUPPORTED, _NO_ROOM = 15, 3, 20

# Which call each check makes first.
CALLS = {
    Check.XID: "nvmlEventSetWait_v2",
    Check.ECC: "nvmlDeviceGetTotalEccErrors",
    Check.REMAPPED_ROWS: "nvmlDeviceGetRemappedRows",
    Check.NVLINK: "nvmlDeviceGetNvLinkState",
    Check.RECOVERY_ACTION: "nvmlDeviceGetFieldValues",
}


@pytest.fixture
def nvml() -> Any:
    fake = FakeNvml()
    yield fake
    fake.let_go.set()


def of(sample: Sample, check: Check) -> Answer:
    answer = getattr(sample, "xids" if check is Check.XID else check.value)
    assert isinstance(answer, Answer)
    return answer


def test_a_well_device(nvml: FakeNvml) -> None:
    device = Device(nvml, "gpu")
    assert device.uuid == "GPU-1"
    assert device.baseline.ecc.values == (3,)
    assert device.baseline.nvlink.values == (5 * 18, 0)
    assert device.check(PROBED).healthy


@pytest.mark.parametrize("name", ["gpu:0", "gpu:GPU-1"])
def test_a_device_by_index_or_uuid(nvml: FakeNvml, name: str) -> None:
    assert Device(nvml, name).uuid == "GPU-1"


@pytest.mark.parametrize("name", ["gpu:7", "gpu:GPU-2", "gpu:first"])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(nvml: FakeNvml, name: str) -> None:
    with pytest.raises(HostUnfit, match=f"{name}.*nothing was started"):
        Device(nvml, name)


@pytest.mark.parametrize(("code", "state"), [(_LOST, State.LOST), (16, State.LOST), (_NO_ROOM, State.FAILED)])
@pytest.mark.parametrize("check", list(CALLS))
def test_an_error_of_one_call_is_the_answer_of_its_check(nvml: FakeNvml, check: Check, code: int, state: State) -> None:
    device = Device(nvml, "gpu")
    nvml.breaks[CALLS[check]] = code
    assert of(device.sample(), check).state is state
    assert any(reason.startswith(check.value) for reason in device.check(PROBED).reasons)


@pytest.mark.parametrize("check", list(CALLS))
def test_not_supported_is_said_and_no_failure(nvml: FakeNvml, check: Check) -> None:
    device = Device(nvml, "gpu")
    if check is Check.RECOVERY_ACTION:
        nvml.breaks["recovery field"] = _UNSUPPORTED  # the call works, the field does not exist on this board
    else:
        nvml.breaks[CALLS[check]] = _UNSUPPORTED
    assert of(device.sample(), check).state is State.NOT_SUPPORTED
    assert device.check(PROBED).healthy


@pytest.mark.parametrize("check", list(CALLS))
def test_a_hung_call_is_unhealthy_and_nothing_more_is_asked(nvml: FakeNvml, check: Check) -> None:
    device = Device(nvml, "gpu", deadline_s=0.5)
    nvml.breaks[CALLS[check]] = "hang"
    verdict = device.check(PROBED)
    assert f"{check.value}: NVML {check.value} gave no answer in 0.5 s" in verdict.reasons
    nvml.breaks.clear()
    again = device.check(PROBED)
    assert len(again.reasons) == len(CALLS), "a driver that hung once is not asked again"
    assert all("not asked" in reason for reason in again.reasons)


def test_each_bad_sign_of_the_library_is_seen(nvml: FakeNvml) -> None:
    def reasons(**changes: Any) -> tuple[str, ...]:
        device = Device(nvml, "gpu")
        old = {name: getattr(nvml, name) for name in changes}
        for name, value in changes.items():
            setattr(nvml, name, value)
        try:
            return device.check(PROBED).reasons
        finally:
            for name, value in old.items():
                setattr(nvml, name, value)

    assert reasons() == ()
    assert reasons(recovery_action=2) == ("recovery_action: the driver asks for: node reboot",)
    assert reasons(xids=[31, 79]) == ("xid: 79 (GPU has fallen off the bus)",)
    assert reasons(double_bit_events=1) == ("xid: 48 (double bit ECC error)",)
    assert reasons(ecc=4) == ("ecc: 1 new uncorrected errors",)
    assert reasons(rows=(0, 1, 1, 0)) == ("remapped_rows: a remapping waits for a reset",)
    assert reasons(nvlink_errors=6) == ("nvlink: 18 new receive errors",)
    assert reasons(links_down={3}) != ()
    assert reasons(links=0) == (), "no links: not supported"


def test_errors_that_a_healthy_check_has_seen_are_not_counted_twice(nvml: FakeNvml) -> None:
    device = Device(nvml, "gpu")
    nvml.xids = [31]
    assert device.check(PROBED).healthy
    assert device.baseline.xids.values == (31,)
    nvml.ecc = 4
    assert not device.check(PROBED).healthy
    assert not device.check(PROBED).healthy, "an unhealthy sample never becomes the baseline"


def test_an_xid_that_closed_the_gate_is_told_again_to_the_next_slot_of_the_device(nvml: FakeNvml) -> None:
    device = Device(nvml, "gpu")
    nvml.xids = [79]
    assert not device.check(PROBED).healthy
    assert nvml.xids == [], "NVML tells it once"
    assert device.check(PROBED).reasons == ("xid: 79 (GPU has fallen off the bus)",)
    assert Device(nvml, "gpu").check(PROBED).healthy, "opened anew, on an operator's word"


def test_a_device_without_events_says_so(nvml: FakeNvml) -> None:
    nvml.breaks["nvmlDeviceGetSupportedEventTypes"] = _UNSUPPORTED
    assert Device(nvml, "gpu").baseline.xids.state is State.NOT_SUPPORTED
    nvml.breaks["nvmlDeviceGetSupportedEventTypes"] = _NO_ROOM
    with pytest.raises(HostUnfit, match="no Xid events"):
        Device(nvml, "gpu")


def test_the_shell_and_the_fake_use_names_that_the_real_library_has() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    source = ast.parse(Path(shell.__file__).read_text())
    used = {
        node.attr
        for node in ast.walk(source)
        if isinstance(node, ast.Attribute)
        and node.attr.lower().startswith("nvml")
        and node.attr not in ("_nvml", "nvmlReturn")
    }
    assert len(used) > 20
    assert [name for name in sorted(used) if not hasattr(pynvml, name)] == []
    assert [name for name in sorted(used) if not hasattr(FakeNvml, name)] == [], "the fake has all of them"
    for name in used:
        real, fake = getattr(pynvml, name), getattr(FakeNvml, name)
        if isinstance(real, int):
            assert fake == real, name
        elif not inspect.isclass(real):
            assert len(inspect.signature(real).parameters) == len(inspect.signature(fake).parameters) - 1, name
    actions = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_GPU_RECOVERY_ACTION_")}
    assert set(actions.values()) == set(RECOVERY_ACTIONS)
    fields = {name for name, _ in pynvml.c_nvmlFieldValue_t._fields_}
    assert {"nvmlReturn", "valueType", "value"} <= fields
    assert {"uiVal", "ullVal"} <= {name for name, _ in pynvml.c_nvmlValue_t._fields_}
    assert {"eventType", "eventData"} <= {name for name, _ in pynvml.c_nvmlEventData_t._fields_}
    assert pynvml.NVMLError(3).value == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_host_without_a_driver_is_refused_by_name() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(HostUnfit, match=r"NVML does not start.*nothing was started"):
            load_nvml()
    else:
        assert Device(load_nvml(), "gpu").uuid.startswith("GPU-")
