"""Rows of the rollout reports that concern GPU memory, over the fake driver; those named ``over_cuda`` again through
the real bindings over the stand-in library (tests/contract/test_cuda_driver.py). None of this has run on a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

from belayer.config import Model, Slot
from belayer.errors import BelayerError, HostUnfit, Refused, WeightsBroken, WorkerFailed
from belayer.messages import owner as o
from belayerd.worker.adapter import gpu_checks, gpu_loader, gpu_seat, gpu_sleep
from belayerd.worker.adapter.device import GpuDevice
from belayerd.worker.adapter.gpu_engine import gpu_engine_args
from belayerd.worker.adapter.gpu_kv import AnswerKv
from belayerd.worker.adapter.gpu_pools import PARKED
from belayerd.worker.adapter.gpu_standby import ORDER, stand_by
from belayerd.worker.adapter.gpu_worker import BelayerGpuWorker, check_environment
from gpuowner import vmem
from gpuowner.attach_gpu import GpuArena
from gpuowner.attach_gpu_weights import GpuWeights
from gpuowner.backends.cuda_vmm import CudaVmm, DeviceBytes
from gpuowner.backends.driver import DriverError, driver_for
from gpuowner.backends.fake_vmm import used_bytes
from gpuowner.backends.port import Access
from gpuowner.backends.sums import ChunkSum
from tests.support import memory as support
from tests.support.gpu_pools import GRAIN, TOTAL, allocate, assert_content, filled, fresh, release
from tests.support.uploaded import Uploaded, upload

SPEC = os.environ.get("BELAYER_TEST_DRIVER", f"fake:rowgpu{os.getpid()}:{TOTAL}")
TIMES = 20


def test_rows_26_and_53_twenty_parks_give_the_same_bytes_at_the_same_addresses_over_cuda() -> None:
    memory = CudaVmm(driver_for(SPEC))
    device = GpuDevice(memory)
    content = filled(memory, device.pools)
    for _ in range(TIMES):
        assert "parked" in device.park()
        assert device.parked
        assert "back" in device.unpark()
        assert_content(memory, content)
    for tag in PARKED:
        device.pools.discard((tag,))
    device.unpark()
    assert all(support.get(memory, va, len(data)) == bytes(len(data)) for va, data in content.items())
    assert device.probe(60.0) >= 0


def test_row_54_parking_gives_every_byte_back_to_the_device() -> None:
    name, memory = fresh("bytes")
    device = GpuDevice(memory)
    memory.digest(memory_block(memory), GRAIN)  # makes the small buffer that results go to, which stays
    before = used_bytes(name)
    content = filled(memory, device.pools)
    full = used_bytes(name)
    assert full - before == sum(map(len, content.values())) == device.pools.nbytes()
    for _ in range(3):
        device.park()
        assert used_bytes(name) == before, "nothing of the pools is left on the device"
        device.unpark()
        assert used_bytes(name) == full
    for va, data in content.items():
        tag = next(tag for tag in PARKED if va in device.pools.tagged(tag).pool._blocks)
        release(device.pools, tag, va, len(data))
    assert used_bytes(name) == before


def memory_block(memory: CudaVmm) -> int:
    va = memory.reserve(GRAIN)
    handle = memory.private(GRAIN)
    memory.map_handle(va, GRAIN, handle, GRAIN, Access.READ_WRITE)
    memory.release(handle)
    return va


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "NCCL_GRAPH_REGISTER is None"),
        ({"NCCL_GRAPH_REGISTER": "1"}, "needs '0'"),
        ({"NCCL_GRAPH_REGISTER": "0"}, "VLLM_USE_V2_MODEL_RUNNER"),
        (
            {
                "NCCL_GRAPH_REGISTER": "0",
                "VLLM_USE_V2_MODEL_RUNNER": "0",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            },
            "expandable segments",
        ),
    ],
)
def test_row_54_settings_that_make_parking_unsafe_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(HostUnfit, match=said):
        check_environment(environment)
    check_environment({"NCCL_GRAPH_REGISTER": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"})


def test_a_segment_that_torch_did_not_get_is_no_exception_there_and_no_park_here() -> None:
    _, memory = fresh("segments")
    device = GpuDevice(memory)
    assert allocate(device.pools, "cudagraph", 2 * TOTAL) == 0
    with pytest.raises(WorkerFailed, match=r"1 call\(s\) of torch into the graph pools failed.*cudagraph"):
        device.park()
    with pytest.raises(WorkerFailed, match="failed before"):
        device.unpark()


def test_the_owners_memory_and_unknown_tags_have_no_pool() -> None:
    _, memory = fresh("tags")
    device = GpuDevice(memory)
    for tag, said in (("weights", "owner's memory"), ("kv_cache", "owner's memory"), ("new", "not a tag of vLLM")):
        with pytest.raises(Refused, match=said):
            device.pools.tagged(tag)
    with device.pool("weights"), device.pool("kv_cache"):
        pass


# --- the arena and the weights --------------------------------------------------------------------------------------


class Owner:
    """What GpuArena asks of a connection to gpuowner@kv; the real one is in tests/process/test_gpuowner_cuda.py."""

    welcome = o.Welcome(owner_generation=1, kind="kv", pid=os.getpid())

    def __init__(self, memory: CudaVmm, nbytes: int) -> None:
        self.memory, self.arena = memory, memory.create("kv", nbytes)
        self.asked: list[str] = []

    def call(self, message: Any, reply: Any) -> tuple[Any, tuple[int, ...]]:
        self.asked.append(type(message).__name__)
        if isinstance(message, o.OpenArena):
            return SimpleNamespace(), (os.dup(self.arena.fd),)
        return o.LeaseGrant(slot="slot0", epoch=message.epoch), (os.dup(self.arena.fd),)

    def must_live(self) -> None:
        """It lives."""

    def on_return(self, rejoin: Any) -> None:
        """It does not return."""

    def content(self, nbytes: int) -> bytes:
        """As another process sees it."""
        va = self.memory.reserve(self.arena.nbytes)
        self.memory.map(va, self.arena.fd, self.arena.nbytes, Access.READ_WRITE)
        found = support.get(self.memory, va, nbytes)
        self.memory.unmap(va)
        self.memory.free_va(va)
        return found

    def write(self, data: bytes) -> None:
        va = self.memory.reserve(self.arena.nbytes)
        self.memory.map(va, self.arena.fd, self.arena.nbytes, Access.READ_WRITE)
        support.put(self.memory, va, data)
        self.memory.unmap(va)
        self.memory.free_va(va)


def on_host(buffer: DeviceBytes) -> torch.Tensor:
    """The fake device's addresses are host memory."""
    return torch.frombuffer(vmem.bytes_at(buffer.va, buffer.nbytes), dtype=torch.uint8)


PARAMETERS = {"linear.weight": (96, 64), "linear.bias": (96,)}
BUFFER = "scale"


def sealed_weights() -> tuple[dict[str, o.TensorSpec], dict[str, torch.Tensor], Uploaded]:
    """A small model in GPU memory, as the owner's uploading child leaves it."""
    generator, at = torch.Generator().manual_seed(3), 0
    tensors, specs = {}, {}
    for name, shape in {**PARAMETERS, BUFFER: (64,)}.items():
        tensors[name] = torch.randn(shape, generator=generator)
        nbytes = tensors[name].numel() * 4
        specs[name] = o.TensorSpec(name=name, dtype="F32", shape=shape, offset=at, nbytes=nbytes, buffer=name == BUFFER)
        at += -(-nbytes // 256) * 256
    data = bytearray(at)
    for name, tensor in tensors.items():
        spec = specs[name]
        data[spec.offset : spec.offset + spec.nbytes] = tensor.numpy().tobytes()
    return specs, tensors, upload(SPEC, bytes(data))


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 96)
        self.register_buffer(BUFFER, torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.scale)


@pytest.fixture(scope="module")
def seat() -> tuple[gpu_seat.GpuSeat, Owner, dict[str, torch.Tensor]]:
    """The one seat of this process: a fake device that holds sealed weights and a leased-out arena."""
    memory = CudaVmm(driver_for(SPEC))
    specs, tensors, made = sealed_weights()
    weights = GpuWeights(memory, os.dup(made.memory.fd), made.memory.nbytes, made.sums, specs)
    owner = Owner(memory, 64 * GRAIN)
    owner.write(b"of the main")
    arena = GpuArena(owner, memory, "slot0", 64 * GRAIN)  # type: ignore[arg-type]
    taken = gpu_seat.GpuSeat(device=GpuDevice(memory), weights=weights, arena=arena, wanted="gpu", tensor_of=on_host)
    gpu_seat.take(taken)
    return taken, owner, tensors


Seated = tuple[gpu_seat.GpuSeat, Owner, dict[str, torch.Tensor]]


def test_row_28_parameters_are_the_owners_bytes_and_buffers_are_private_over_cuda(seat: Seated) -> None:
    taken, _, tensors = seat
    model = Net()
    bound = gpu_loader.bind(model, taken.weights, on_host)
    gpu_loader.assert_inside(model, taken.weights)
    assert (bound.views, [copy.name for copy in bound.copies]) == (2, [BUFFER])
    for name, parameter in model.named_parameters():
        spec = taken.weights.tensors[name]
        assert parameter.data_ptr() == taken.weights.va + spec.offset
        assert torch.equal(parameter, tensors[name])
    x = torch.ones(64)
    with torch.no_grad():
        expected = tensors["linear.weight"] @ (x * tensors[BUFFER]) + tensors["linear.bias"]
        assert torch.allclose(model(x), expected, atol=1e-5)
        model.scale.zero_()
    sums = taken.device.memory.digest(taken.weights.va, taken.weights.nbytes)
    taken.weights.verify(sums)
    again = gpu_loader._view(taken.weights, taken.weights.tensors[BUFFER], model.scale, on_host)
    assert torch.equal(again, tensors[BUFFER]), "a late write to a buffer stays in this engine"
    model.linear.weight = nn.Parameter(torch.zeros(96, 64))
    with pytest.raises(WeightsBroken, match=r"linear\.weight is not in the owner's GPU memory"):
        gpu_loader.assert_inside(model, taken.weights)


def test_a_model_that_wants_other_tensors_is_refused_by_name(seat: Seated) -> None:
    taken, _, _ = seat
    with pytest.raises(WeightsBroken, match=r"0\.weight, which the owner does not hold"):
        gpu_loader.bind(nn.Sequential(nn.Linear(2, 2)), taken.weights, on_host)
    odd = Net()
    odd.linear.weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.float16))
    with pytest.raises(WeightsBroken, match=r"linear\.weight: the engine wants .*float16"):
        gpu_loader.bind(odd, taken.weights, on_host)


def test_large_tensors_of_a_model_that_is_built_take_no_device_memory() -> None:
    with torch.device("meta"), gpu_loader.LargeOnHost():
        assert torch.empty(gpu_loader.LARGE + 1, dtype=torch.int8).device.type == "cpu"
        assert torch.empty(gpu_loader.LARGE, dtype=torch.int8).device.type == "meta"
        assert torch.zeros(gpu_loader.LARGE * 2, dtype=torch.int8).device.type == "meta"


def test_weights_that_differ_from_their_sums_are_not_mapped() -> None:
    memory = CudaVmm(driver_for(SPEC))
    specs, _, made = sealed_weights()
    wrong = (ChunkSum(made.sums[0].plain ^ 1, made.sums[0].weighted), *made.sums[1:])
    fd = os.dup(made.memory.fd)
    with pytest.raises(WeightsBroken, match="chunk 0 differs"):
        GpuWeights(memory, fd, made.memory.nbytes, wrong, specs)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    made.memory.close()


def test_row_55_a_hundred_attachments_leave_nothing_behind(seat: Seated) -> None:
    specs, _, made = sealed_weights()
    memory = CudaVmm(driver_for(SPEC))
    device = GpuDevice(memory)
    filled(memory, device.pools)

    def attach() -> None:
        weights = GpuWeights(memory, os.dup(made.memory.fd), made.memory.nbytes, made.sums, specs)
        weights.close()

    def park() -> None:
        device.park()
        device.unpark()

    attach()
    park()
    name = SPEC.split(":")[1] if SPEC.startswith("fake:") else "stand-in"
    gc.collect()  # what earlier tests have left to it is not closed between two counts
    before = used_bytes(name), len(os.listdir("/proc/self/fd")), mapped()
    for count in range(100):
        attach()
        if count % 20 == 0:
            park()
    assert (used_bytes(name), len(os.listdir("/proc/self/fd")), mapped()) == before


def mapped() -> int:
    rows = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd" in row for row in rows)


def test_scratch_writes_never_reach_the_arena_and_promotion_keeps_every_address_over_cuda(seat: Seated) -> None:
    """vLLM's one allocation is answered by scratch; what warm-up writes stays there; promoted, the same tensor is the
    arena, zeroed."""
    taken, owner, _ = seat
    with AnswerKv():
        kv = torch.zeros(48 * GRAIN, dtype=torch.int8)
        with pytest.raises(BelayerError, match="vLLM asks for"):
            torch.zeros(1, dtype=torch.int8)
    before = kv.data_ptr()
    assert before == taken.arena.va
    kv[:16] = 7
    kv[-16:] = 9
    assert owner.content(11) == b"of the main"
    taken.device.park()
    taken.device.unpark()
    assert owner.content(11) == b"of the main", "parking does not touch it either"
    taken.arena.promote(epoch=3)
    assert (kv.data_ptr(), taken.arena.epoch) == (before, 3)
    assert not kv.any(), "what the last main left could be NaN"
    kv[:3] = 5
    assert owner.content(4) == bytes([5, 5, 5, 0])
    with pytest.raises(BelayerError, match="no longer allocates"), AnswerKv():
        torch.zeros(4, dtype=torch.float32)
    with pytest.raises(BelayerError, match="the arena has"), AnswerKv():
        torch.zeros(65 * GRAIN, dtype=torch.int8)


def test_vllms_sleep_backend_of_our_name_moves_graphs_only_over_cuda(seat: Seated) -> None:
    """Through vLLM's own registry, by the name in its model configuration."""
    taken, owner, _ = seat
    memory, pools = taken.device.memory, taken.device.pools
    content = filled(memory, pools)
    gpu_sleep.register()
    gpu_sleep.register()
    config: Any = SimpleNamespace(sleep_mode_backend="belayer")
    backend = SleepModeBackendFactory.create_backend(config)
    assert isinstance(backend, gpu_sleep.BelayerSleepBackend)
    held = memory.digest(taken.weights.va, taken.weights.nbytes), owner.content(64)
    for level in (1, 2):
        backend.suspend(level)
        assert (backend.state(), pools.parked) == ("SUSPENDED", True)
        assert (memory.digest(taken.weights.va, taken.weights.nbytes), owner.content(64)) == held
        backend.resume(["weights"])
        assert (backend.state(), pools.parked) == ("RUNNING", False)
        assert_content(memory, content)
    for tags in (("weights",), ("kv_cache", "workspace")):
        with pytest.raises(Refused, match="other workers map it"):
            backend.discard(tags)
    assert_content(memory, content)
    backend.discard(("workspace",))
    backend.resume()
    kept = {va: data for va, data in content.items() if va not in pools.tagged("workspace").pool._blocks}
    assert 0 < len(kept) < len(content)
    assert_content(memory, kept)
    assert (memory.digest(taken.weights.va, taken.weights.nbytes), owner.content(64)) == held


def test_row_17_a_worker_on_another_device_than_its_slot_is_refused() -> None:
    name, memory = fresh("uuid")
    device = GpuDevice(memory)
    device.must_be("gpu")
    device.must_be(f"gpu:GPU-fake-{name}")
    with pytest.raises(WorkerFailed, match="its slot is on gpu:GPU-00000000"):
        device.must_be("gpu:GPU-00000000-0000-0000-0000-000000000000")


# --- vLLM's side ----------------------------------------------------------------------------------------------------


def test_the_gpu_hooks_fit_this_vllm_and_a_changed_one_is_named() -> None:
    gpu_checks.self_check()
    with pytest.raises(HostUnfit, match=r"Worker\.vanished is gone"):
        gpu_checks.self_check((("vllm.v1.worker.gpu_worker", "Worker.vanished", None),))
    with pytest.raises(HostUnfit, match="asks for pools"):
        gpu_checks.self_check(tags=gpu_checks.TAGS - {"runtime"})


def test_the_gpu_worker_class_answers_each_pool_that_vllm_asks_for(seat: Seated) -> None:
    worker = object.__new__(BelayerGpuWorker)
    assert isinstance(worker._maybe_get_memory_pool_context("kv_cache"), AnswerKv)
    with worker._maybe_get_memory_pool_context("weights"):
        pass
    with pytest.raises(Refused, match="not a tag"):
        worker._maybe_get_memory_pool_context("unheard of")


def test_a_gpu_engine_captures_graphs_and_uses_no_allocator_but_ours(tmp_path: Path) -> None:
    args = gpu_engine_args(Model(name="m", path=str(tmp_path)), Slot(name="slot0", model="m", device="gpu"))
    assert (args.load_format, args.worker_cls.rpartition(".")[2]) == ("belayer_gpu", BelayerGpuWorker.__name__)
    assert (args.enforce_eager, args.enable_sleep_mode, args.enable_cumem_allocator) == (False, False, False)
    assert "DECODE" in args.compilation_config.cudagraph_mode.name


@pytest.mark.parametrize("broken", ["", *ORDER])
def test_a_standby_comes_up_in_its_order_or_is_not_offered(broken: str) -> None:
    done: list[str] = []

    def step(name: str) -> Callable[[], None]:
        def work() -> None:
            if name == broken:
                raise DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN", 999)
            done.append(name)

        return work

    steps = {name: step(name) for name in reversed(ORDER)}
    if broken:
        with pytest.raises(WorkerFailed, match=f"standby: {broken}: cuMemMap"):
            stand_by(steps, lambda name, ms: None)
    else:
        stand_by(steps, lambda name, ms: None)
    assert done == list(ORDER[: ORDER.index(broken)] if broken else ORDER)
    with pytest.raises(ValueError, match="are not"):
        stand_by({}, lambda name, ms: None)
