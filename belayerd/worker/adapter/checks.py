"""What the hooks lean on, written down and looked up before an engine is built (fail closed).

A renamed attribute or a changed signature in vLLM does not raise where it matters: a hook would silently
stop hooking (weights copied, arena private, resume wrong). So each name is checked here, and the error
names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from belayer.errors import HostUnfit
from belayerd import vllm_words

VLLM = "0.32.0"

# (module, attribute path, parameters that must be there); None: the attribute only has to exist.
_LOADER = "vllm.model_executor.model_loader"
_LAYERS = "vllm.model_executor.layers"
_SAMPLE = "vllm.v1.sample"

Hooked = tuple[tuple[str, str, tuple[str, ...] | None], ...]
Fields = tuple[tuple[str, str, tuple[str, ...]], ...]

HOOKED: Hooked = (
    (_LOADER, "register_model_loader", ("load_format",)),
    (f"{_LOADER}.base_loader", "BaseModelLoader.load_model", ("vllm_config", "model_config", "prefix")),
    (f"{_LOADER}.base_loader", "BaseModelLoader.create_model", ("vllm_config", "model_config", "prefix")),
    (f"{_LOADER}.utils", "initialize_model", ("vllm_config", "model_config")),
    (f"{_LAYERS}.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod._setup_kernel", ("layer",)),
    (f"{_LAYERS}.fused_moe.oracle.unquantized", "UnquantizedMoeBackend.CPU", None),
    ("vllm.distributed.parallel_state", "init_model_parallel_group", ("use_message_queue_broadcaster",)),
    ("vllm.distributed", "init_distributed_environment", ("world_size", "rank", "local_rank", "backend")),
    (f"{_LOADER}.utils", "process_weights_after_loading", ("model", "model_config", "target_device")),
    (f"{_LOADER}.utils", "record_metadata_for_reloading", ("model",)),
    (f"{_SAMPLE}.logits_processor", "_load_logitsprocs_plugins", ()),
    ("vllm.v1.worker.cpu_worker", "CPUModelRunner", None),
    (f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod.process_weights_after_loading", ("layer",)),
    (f"{_LAYERS}.linear", "UnquantizedLinearMethod.process_weights_after_loading", ("layer",)),
    (f"{_LAYERS}.vocab_parallel_embedding", "ParallelLMHead", None),
    ("vllm._custom_ops", "create_onednn_mm", ("weight", "primitive_cache_size")),
    ("vllm._custom_ops", "onednn_mm", ("dnnl_handler", "x", "bias")),
    ("vllm._custom_ops", "_supports_onednn", None),
    ("vllm.tokenizers.registry", "cached_tokenizer_from_config", ("model_config",)),
    ("vllm.v1.worker.utils", "allocate_kv_cache", ("kv_cache_config", "device", "layout")),
    ("vllm.v1.worker.gpu_worker", "Worker._maybe_get_memory_pool_context", ("tag",)),
    ("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", ()),
    ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner._update_states", ("scheduler_output",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", ("throttle_prefills",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler._handle_blocked_waiting_request", ("request",)),
    ("vllm.v1.core.sched.utils", "check_stop", ("request", "max_model_len")),
    ("vllm.v1.structured_output", "StructuredOutputManager.accept_tokens", ("request", "new_token_ids")),
    ("vllm.v1.structured_output", "StructuredOutputManager.grammar_init", ("request",)),
    ("vllm.v1.core.block_pool", "BlockPool._insert_block_hash", ("block_hash_with_group_id", "block", "num_tokens")),
    ("vllm.v1.core.block_pool", "BlockPool._remove_cached_block_hashes", ("block",)),
    ("vllm.v1.core.block_pool", "BlockPool.reset_prefix_cache", ()),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.remove", ("block",)),
    ("vllm.v1.core.kv_cache_utils", vllm_words.KV_CHECK, ("available_memory", "get_needed_memory")),
    ("vllm.v1.engine.core", "EngineCore._initialize_kv_caches", ("vllm_config",)),
    ("vllm.v1.core.kv_cache_utils", "init_none_hash", ("hash_fn",)),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.may_reinitialize_input_batch", ("kv_cache_config",)),
    (f"{_SAMPLE}.thinking_budget_state", "ThinkingBudgetStateHolder.sync_batch", ("batch_update",)),
    (f"{_SAMPLE}.thinking_budget_state", "ThinkingBudgetStateHolder._update_think_state", ("state",)),
    (
        f"{_SAMPLE}.thinking_budget_state",
        "ThinkingBudgetStateHolder._find_last_sequence_index",
        ("target_list", "token_ids"),
    ),
    ("vllm.v1.request", "Request.from_engine_core_request", ("request", "block_hasher")),
    ("vllm.v1.request", "Request.append_output_token_ids", ("token_ids",)),
    ("vllm.v1.engine.core", "EngineCore.reset_prefix_cache", ("reset_running_requests",)),
    ("vllm.v1.engine.core", "EngineCore.is_scheduler_paused", ()),
    ("vllm.v1.core.sched.scheduler", "Scheduler.set_pause_state", ("pause_state",)),
    ("vllm.v1.core.sched.interface", "PauseState.UNPAUSED", None),
    ("vllm.v1.core.sched.request_queue", "create_request_queue", ("policy",)),
    ("vllm.v1.core.sched.request_queue", "RequestQueue.prepend_requests", ("requests",)),
    ("vllm.v1.engine.core", "EngineCoreProc._handle_client_request", ("request_type", "request")),
    ("vllm.v1.engine.core", "EngineCoreProc._process_engine_step", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._notify_idle_state_callbacks", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._make_ready_response", ()),
    ("vllm.v1.engine.core", "EngineCoreProc._send_error_outputs_to_client", ("req_ids", "client_index")),
    ("vllm.v1.sample.ops.topk_topp_sampler", "TopKTopPSampler.forward_cpu", ("logits", "generators", "k", "p")),
    ("vllm.v1.executor.abstract", "Executor._init_executor", ()),
    ("vllm.v1.executor.abstract", "Executor.collective_rpc", ("method", "args", "kwargs", "non_block")),
    ("vllm.v1.executor.abstract", "Executor.execute_model", ("scheduler_output", "non_block")),
    ("vllm.v1.executor.abstract", "Executor.sample_tokens", ("grammar_output", "non_block")),
    ("vllm.v1.executor.abstract", "Executor.initialize_from_config", ("kv_cache_configs",)),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.initialize_from_config", ("kv_cache_configs",)),
    ("vllm.v1.worker.worker_base", "WorkerWrapperBase.init_worker", ("all_kwargs",)),
    ("vllm.v1.core.kv_cache_utils", "get_kv_cache_configs", ("vllm_config", "kv_cache_specs", "available_memory")),
    ("vllm.v1.core.single_type_kv_cache_manager", "register_all_kvcache_specs", ("vllm_config",)),
    ("vllm.platforms.cpu", "CpuPlatform.register_triton_kernel_overrides", ()),
    ("xgrammar", "TokenizerInfo.from_huggingface", ("tokenizer", "vocab_size", "stop_token_ids")),
    ("vllm.v1.serial_utils", "MsgpackDecoder.decode", None),
    ("vllm.v1.serial_utils", "MsgpackEncoder.encode", None),
)  # fmt: skip

FIELDS: Fields = (
    ("vllm.v1.core.sched.output", "NewRequestData", ("req_id", "prompt_token_ids", "prefill_token_ids")),
    ("vllm.v1.worker.gpu_input_batch", "CachedRequestState", ("output_token_ids", "generator", "sampling_params")),
    (
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_cached_reqs", "new_block_ids_to_zero"),
    ),
    ("vllm.v1.core.sched.output", "GrammarOutput", ("structured_output_request_ids", "grammar_bitmask")),
    ("vllm.v1.engine", "EngineCoreOutput", ("finish_reason", "stop_reason", "events", "prefill_stats")),
    ("vllm.v1.engine", "EngineCoreRequest", ("request_id", "prompt_token_ids", "client_index", "sampling_params")),
)


def _look_up(module: str, path: str) -> Any:
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as why:
        raise _unfit(f"{module}.{path} is gone ({why})") from why
    return found


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def self_check(hooked: Hooked = HOOKED, fields_of: Fields = FIELDS) -> None:
    """Raise HostUnfit naming the first hook of ours that vLLM no longer offers."""
    version = _look_up("vllm.version", "__version__")
    if str(version).split("+")[0] != VLLM:
        raise _unfit(f"its version is {version}")
    for module, path, wanted in hooked:
        found = _look_up(module, path)
        missing = sorted(set(wanted or ()) - _parameters(found)) if wanted else []
        if missing:
            raise _unfit(f"{module}.{path} has no parameter {missing[0]!r}")
    for module, path, fields in fields_of:
        kind = _look_up(module, path)
        has = set(getattr(kind, "__struct_fields__", ())) | set(getattr(kind, "__dataclass_fields__", ()))
        for name in fields:
            if name not in has:
                raise _unfit(f"{module}.{path} has no field {name!r}")


def _unfit(what: str) -> HostUnfit:
    return HostUnfit(
        f"vLLM is not the one that the worker was written for ({VLLM}): {what}",
        kept="nothing was started",
        remedy=f"install vLLM {VLLM} (`make setup`)",
    )
