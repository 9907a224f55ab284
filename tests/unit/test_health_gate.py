"""Step 2 of a handover asks a GPU everything and a CPU nothing; and it says which."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from belayer.errors import GpuUnhealthy, HostUnfit, Refused, WorkerFailed, WorkerGone
from belayer.messages.common import Done
from belayer.messages.worker import ProbeDevice
from belayerd.gate import NOTHING_CHECKED, HealthGate, open_gate
from belayerd.nvml import Device
from tests.support.fake_nvml import FakeNvml


class Candidate:
    """A worker that answers probes; ``answers[full]`` is what it says or raises."""

    def __init__(self) -> None:
        self.answers: dict[bool, Exception | str] = {False: "probe kernel right in 0.1 ms", True: "all digests equal"}
        self.asked: list[bool] = []

    async def call(self, message: msgspec.Struct, reply: type[Any], within: float) -> Any:
        assert isinstance(message, ProbeDevice)
        assert reply is Done
        self.asked.append(message.full)
        answer = self.answers[message.full]
        if isinstance(answer, Exception):
            raise answer
        return Done(detail=answer)


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def gate(nvml: FakeNvml) -> HealthGate:
    return open_gate(["cpu", "gpu:0", "gpu:0"], lambda name: Device(nvml, name))


def check(gate: HealthGate, device: str, worker: Candidate) -> str:
    return asyncio.run(gate.check(device, worker, 5.0))


def test_a_cpu_slot_is_asked_nothing_and_says_so(gate: HealthGate) -> None:
    worker = Candidate()
    assert check(gate, "cpu", worker) == NOTHING_CHECKED
    assert worker.asked == []
    assert "nothing" in NOTHING_CHECKED


def test_a_well_gpu(gate: HealthGate) -> None:
    worker = Candidate()
    assert "probe kernel right" in check(gate, "gpu:0", worker)
    assert worker.asked == [False]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (WorkerFailed("did not answer ProbeDevice in 5 s"), "probe: did not answer"),
        (GpuUnhealthy("probe: wrong words at [31]"), "probe: probe: wrong words"),
        (Refused("this worker runs on the CPU"), "probe: this worker runs on the CPU"),
    ],
)
def test_a_probe_that_fails_closes_the_gate(gate: HealthGate, answer: Exception, said: str) -> None:
    worker = Candidate()
    worker.answers[False] = answer
    with pytest.raises(GpuUnhealthy, match=said) as why:
        check(gate, "gpu:0", worker)
    assert "GPU-1" in why.value.message


def test_a_candidate_that_dies_in_the_probe_is_no_sign_of_the_device(gate: HealthGate) -> None:
    worker = Candidate()
    worker.answers[False] = WorkerGone("it has ended")
    with pytest.raises(WorkerGone):
        check(gate, "gpu:0", worker)


def test_a_bad_sign_of_the_library_closes_the_gate(gate: HealthGate, nvml: FakeNvml) -> None:
    nvml.xids = [13, 79]
    with pytest.raises(GpuUnhealthy, match="fallen off the bus"):
        check(gate, "gpu:0", Candidate())


def test_a_contained_error_verifies_every_digest_before_anything_is_reused(gate: HealthGate, nvml: FakeNvml) -> None:
    worker = Candidate()
    nvml.xids = [94]
    assert "all digests equal" in check(gate, "gpu:0", worker)
    assert worker.asked == [False, True]
    nvml.xids = [94]
    worker.answers[True] = GpuUnhealthy("chunk 7 differs")
    with pytest.raises(GpuUnhealthy, match="digests after a contained memory error: chunk 7 differs"):
        check(gate, "gpu:0", worker)


def test_an_operators_word_opens_the_device_anew(gate: HealthGate, nvml: FakeNvml) -> None:
    nvml.ecc += 1
    for _ in range(2):
        with pytest.raises(GpuUnhealthy, match="1 new uncorrected errors"):
            check(gate, "gpu:0", Candidate())
    asyncio.run(gate.renew("cpu"))
    asyncio.run(gate.renew("gpu:0"))
    assert check(gate, "gpu:0", Candidate())


def test_a_host_without_the_device_starts_nothing(nvml: FakeNvml) -> None:
    with pytest.raises(HostUnfit, match=r"gpu:3.*nothing was started"):
        open_gate(["gpu:3"], lambda name: Device(nvml, name))
