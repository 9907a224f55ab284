"""Rows of the rollout reports about a standby that is parked or cannot be woken: over the fake driver, with the
worker's own loop. None of this has run on a GPU."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from belayer.errors import Fenced, Refused, WorkerFailed
from belayer.heartbeat import Beat
from belayer.messages import worker as w
from belayer.messages.common import Done
from belayerd.worker.adapter.device import CpuDevice, GpuDevice
from belayerd.worker.engine import Engine, Line, Outbox, Standing
from belayerd.worker.heart import Heart
from gpuowner.backends.cuda_vmm import CudaVmm
from gpuowner.backends.driver import DriverError
from gpuowner.backends.fake_vmm import FakeDriver
from tests.support.gpu_pools import GRAIN, TOTAL, assert_content, filled, fresh
from tests.support.worker_client import ControlClient


class Tight(FakeDriver):
    """Has no room the next ``denied`` times; then it has."""

    denied = 0

    def create(self, device: int, nbytes: int) -> int:
        if self.denied:
            self.denied -= 1
            raise DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)
        return super().create(device, nbytes)


def tight(name: str, room_s: float) -> tuple[Tight, GpuDevice, dict[int, bytes]]:
    driver = Tight(f"{name}{os.getpid()}", TOTAL)
    device = GpuDevice(CudaVmm(driver), room_s=room_s)
    return driver, device, filled(device.memory, device.pools)


def test_row_37_no_room_at_first_is_tried_again_until_the_fenced_main_has_given_its_memory_back() -> None:
    driver, device, content = tight("again", 60.0)
    device.park()
    driver.denied = 3
    assert "back" in device.unpark()
    assert driver.denied == 0, "it was denied and came again"
    assert_content(device.memory, content)


class Unwell(FakeDriver):
    """Writes one wrong byte back."""

    def copy_in(self, va: int, host: int, nbytes: int) -> None:
        super().copy_in(va, host, nbytes)
        if nbytes == 3 * GRAIN and self.spoil:
            self.fill(va + 17, 0x55 ^ ctypes.string_at(host + 17, 1)[0], 1)

    spoil = False


class IdleCore:
    """An engine without work: what the worker's loop asks of it between two messages."""

    def has_work(self) -> bool:
        return False

    def turn(self) -> bool:
        return False

    def held(self) -> bool:
        return False

    def counts(self) -> tuple[int, int]:
        return 0, 0

    def others(self) -> tuple[()]:
        return ()

    def weight_version(self) -> str:
        return "1"


class Running:
    """The worker's real loop and socket over ``device``, standing by with the lease taken."""

    def __init__(self, folder: Path, device: Any) -> None:
        self.standing = Standing(worker_id="slot0-gpu", slot="slot0", state=w.WorkerState.STANDBY)
        line, heart = Line(folder / "w.sock"), Heart(Beat(folder / "beat"), 60.0)
        weights: Any = SimpleNamespace(grant=SimpleNamespace(version=1, digest="d"))
        arena: Any = SimpleNamespace(epoch=4)
        core: Any = IdleCore()
        outbox = Outbox(line, self.standing, heart)
        engine = Engine(line, outbox, core, heart, self.standing, weights, arena, 100, None, device)
        self._thread = threading.Thread(target=engine.run, daemon=True)
        self._thread.start()
        self.control = ControlClient(folder / "w.sock")

    def call(self, message: msgspec.Struct) -> Done:
        return self.control.call(message, Done)

    def state(self) -> w.WorkerStatusReply:
        return self.control.call(w.WorkerStatus(), w.WorkerStatusReply)

    def end(self) -> None:
        self.call(w.Retire(generation=self.standing.generation))
        self._thread.join(120)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("fault", ["no room", "wrong content"])
def test_rows_14_15_and_37_an_unpark_that_fails_is_said_and_the_worker_never_serves(tmp_path: Path, fault: str) -> None:
    """The failed step quarantines the slot (tests/tables/test_pair_table.py); here the worker itself stays out too."""
    if fault == "no room":
        driver, device, _ = tight("full", 0.2)
        device.park()
        driver.denied = 1 << 30
    else:
        unwell = Unwell(f"unwell{os.getpid()}", TOTAL)
        device = GpuDevice(CudaVmm(unwell))
        filled(device.memory, device.pools)
        device.park()
        unwell.spoil = True
    worker = Running(tmp_path, device)
    said = "OUT_OF_MEMORY" if fault == "no room" else "came back different"
    with pytest.raises(WorkerFailed, match=said):
        worker.call(w.Unpark())
    assert worker.state().state is w.WorkerState.FAILED
    assert said in worker.state().failure
    for message in (w.BecomeMain(generation=1), w.Unpark(), w.ProbeDevice()):
        with pytest.raises((Refused, WorkerFailed)):
            worker.call(message)
    assert worker.state().generation == 0
    worker.end()


def test_row_29_nothing_runs_on_a_parked_standby(tmp_path: Path) -> None:
    """An update, an oracle or a promotion of it is refused by name; after Unpark it serves."""
    _, memory = fresh("parked")
    device = GpuDevice(memory)
    content = filled(memory, device.pools)
    device.park()
    worker = Running(tmp_path, device)
    for message in (w.FollowWeights(version=2), w.CheckOracle(), w.BecomeMain(generation=1)):
        with pytest.raises(Refused, match="parked: Unpark comes first"):
            worker.call(message)
    assert "probe kernel is right" in worker.call(w.ProbeDevice()).detail
    assert "bytes of graph memory back" in worker.call(w.Unpark()).detail
    assert_content(memory, content)
    assert "main of slot0" in worker.call(w.BecomeMain(generation=1)).detail
    with pytest.raises(Fenced):
        worker.call(w.BecomeMain(generation=1))
    worker.end()


def test_a_cpu_worker_says_that_it_has_nothing_to_park_or_probe(tmp_path: Path) -> None:
    worker = Running(tmp_path, CpuDevice())
    assert worker.call(w.Unpark()).detail == "CPU: no graph memory was parked"
    with pytest.raises(Refused, match="no device to probe"):
        worker.call(w.ProbeDevice())
    worker.end()
