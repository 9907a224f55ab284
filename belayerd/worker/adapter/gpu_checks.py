"""What the GPU hooks lean on in vLLM, looked up before a GPU engine is built (see ``checks``)."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

from belayer.errors import HostUnfit
from belayerd.worker.adapter import checks
from belayerd.worker.adapter.checks import Hooked

_SLEEP = "vllm.device_allocator.sleep_mode_backend"
_WORKER = "vllm.v1.worker.gpu_worker"
_RUNNER = "vllm.v1.worker.gpu_model_runner"

HOOKED: Hooked = (
    (_SLEEP, "SleepModeBackendFactory.register_backend", ("name", "module_path", "class_name")),
    (_SLEEP, "SleepModeBackendFactory.get_backend_class", ("name",)),
    (_SLEEP, "SleepModeBackendFactory._registry", None),
    (_SLEEP, "SleepModeBackend.suspend", ("level",)),
    (_SLEEP, "SleepModeBackend.resume", ("tags",)),
    (_SLEEP, "SleepModeBackend.discard", ("tags",)),
    (_WORKER, "Worker.init_device", ()),
    (_WORKER, "Worker._make_model_runner", ()),
    (_WORKER, "Worker._maybe_get_memory_pool_context", ("tag",)),
    (_WORKER, "Worker.initialize_from_config", ("kv_cache_config",)),
    (_WORKER, "Worker.compile_or_warm_up_model", ()),
    (_WORKER, "Worker.sleep_mode_backend", None),
    (_WORKER, "Worker.synchronize_device", ()),
    (_RUNNER, "GPUModelRunner._update_states", ("scheduler_output",)),
    ("vllm.platforms.interface", "Platform._global_graph_pool", None),
    ("vllm.platforms.interface", "Platform.get_global_graph_pool", ()),
    ("vllm.compilation.cudagraph_pool", "capture_pool", ("pool", "vllm_config")),
    ("vllm.v1.worker.utils", "allocate_kv_cache", ("kv_cache_config", "device", "layout")),
    ("vllm.config.model", "ModelConfig.sleep_mode_backend", None),
    ("torch.cuda", "MemPool", None),
    ("torch.cuda", "use_mem_pool", ("pool",)),
)

TAGS = frozenset(("weights", "kv_cache", "runtime", "workspace"))  # cudagraph comes by the platform's graph pool
_TAG = re.compile(r"""_maybe_get_memory_pool_context\((?:tag=)?"(\w+)"\)""")


def self_check(hooked: Hooked = HOOKED, tags: frozenset[str] = TAGS) -> None:
    """Raise HostUnfit naming the first hook of ours that vLLM no longer offers, or a pool that it asks for and that we
    do not know: memory of an unknown tag would be parked wrongly, or not at all."""
    checks.self_check(hooked, ())
    asked = set(_TAG.findall(inspect.getsource(import_module(_WORKER))))
    if asked != tags:
        raise HostUnfit(
            f"vLLM's GPU worker asks for pools {sorted(asked)}, the adapter was written for {sorted(tags)}",
            kept="nothing was started",
            remedy=f"install vLLM {checks.VLLM} (`make setup`)",
        )
