"""Settings of an engine on a GPU, as they differ from ``core.engine_args``. Has never run on a GPU (docs/h200.md)."""

from __future__ import annotations

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from belayer.config import Model, Router, Slot
from belayerd.worker.adapter.core import engine_args


def gpu_engine_args(model: Model, slot: Slot, router: Router | None = None) -> EngineArgs:
    """Graphs of the decode step, since they are what parks; no torch.compile, whose minutes a shadow would take from
    each re-arm. vLLM's own sleep mode stays off: it would bring an allocator of its own."""
    args = engine_args(model, slot, router)
    args.load_format = "belayer_gpu"
    args.worker_cls = "belayerd.worker.adapter.gpu_worker.BelayerGpuWorker"
    args.enforce_eager = False
    args.enable_sleep_mode = args.enable_cumem_allocator = False
    args.compilation_config = CompilationConfig(
        mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY
    )
    return args
