"""Load format "belayer": every parameter is a view of the owner's read-only memory, and what cannot be one is named.

The trap is prepacking. On some CPUs (float32 with oneDNN, bf16 with AMX) vLLM packs a matrix into private memory and
leaves an empty tensor behind: sharing is lost and a later update of the owner's bytes is not seen. So packing is
switched off for every layer, on every CPU, and afterwards each parameter's address is checked to lie in the mapping.

Two kinds of tensors are private copies by design, said in the log and made anew for every weight version: buffers
(the engine may write to them) and the experts of a mixture on the CPU, whose kernel reads only its own packed form.
Where a slot asks for it (``packed_weights``), matrices are packed as well, beside the views and not in their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from belayer.clock import Stopwatch
from belayer.errors import WeightsBroken
from belayer.messages.owner import TensorSpec
from belayerd.worker.adapter import packing
from belayerd.worker.adapter.bound import Bound, Copied
from belayerd.worker.adapter.seat import seat
from gpuowner.attach import WeightsView

logger = structlog.get_logger(daemon="worker")

_TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DERIVED_BYTES = 4096  # a tensor that a layer makes of its weights; scales and flags are smaller


class UnpackedEmbedding(UnquantizedEmbeddingMethod):
    """vLLM's embedding and output matrix without the packing step, which ignores the per-layer switch."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = nn.functional.linear


@register_model_loader("belayer")
class OwnerLoader(BaseModelLoader):
    """Builds the model with untouched storage and points its parameters into the owner's mapping."""

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        return seat().weights.grant.nbytes

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch: the owner has it."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        raise WeightsBroken("weights in the owner's memory are updated through the owner, not by a reload")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        view = seat().weights
        device = torch.device("cpu")
        with set_default_torch_dtype(model_config.dtype):
            with device:
                model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            bound = bind(model, view)
            _forbid_packing(model)
            before = _attributes(model)
            process_weights_after_loading(model, model_config, device)
        assert_inside(model, view, bound)
        _assert_nothing_derived(model, view, before)
        if seat().packed:
            bound = replace(bound, packed_bytes=packing.pack(model))
        seat().bound = bound
        logger.info("weights_bound", model=view.grant.model, version=view.grant.version, **bound.say())
        return model.eval()


def bind(model: nn.Module, view: WeightsView) -> Bound:
    """Point each parameter at its bytes, or give it a copy of them where it must have one. Raises WeightsBroken when
    one is missing or of another shape or dtype."""
    packed = _packed_experts(model)
    views, nbytes, copies = 0, 0, []
    for name, parameter in model.named_parameters():
        spec = _spec(view, name, parameter)
        if name in packed:
            parameter.data = _bytes(view, spec).clone()
            copies.append(Copied(name, spec.nbytes, "the CPU's expert kernel packs it"))
        else:
            parameter.data = _bytes(view, spec)
            views, nbytes = views + 1, nbytes + spec.nbytes
    return Bound(views, nbytes, (*copies, *_fill_buffers(model, view)))


def _spec(view: WeightsView, name: str, wanted: torch.Tensor) -> TensorSpec:
    spec = view.tensors.get(name)
    if spec is None:
        raise WeightsBroken(
            f"model {view.grant.model} needs {name}, which its files do not hold under that name",
            remedy="this architecture renames or reshapes its weights; it needs a layout of its own",
        )
    if _TORCH.get(spec.dtype) is not wanted.dtype or tuple(wanted.shape) != spec.shape:
        raise WeightsBroken(
            f"{name}: the engine wants {tuple(wanted.shape)} {wanted.dtype}, the owner has {spec.shape} {spec.dtype}",
            remedy="set dtype of the [[model]] to the engine's",
        )
    return spec


def _bytes(view: WeightsView, spec: TensorSpec) -> torch.Tensor:
    base = torch.frombuffer(view.mapping.buffer(), dtype=torch.uint8)
    return base[spec.offset : spec.offset + spec.nbytes].view(_TORCH[spec.dtype]).view(spec.shape)


def _fill_buffers(model: nn.Module, view: WeightsView) -> list[Copied]:
    copies = []
    for name, buffer in model.named_buffers():
        given = view.tensors.get(name)
        if given is not None and given.buffer:
            spec = _spec(view, name, buffer)
            buffer.copy_(_bytes(view, spec))
            copies.append(Copied(name, spec.nbytes, "the engine may write to it"))
    return copies


def _expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers whose kernel replaces their parameters by a packed form of its own."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod)
        and method.unquantized_backend is UnquantizedMoeBackend.CPU
    }


def _packed_experts(model: nn.Module) -> set[str]:
    layers = _expert_layers(model)
    return {f"{layer}.{name}" for layer, module in layers.items() for name, _ in module.named_parameters(recurse=False)}


def _forbid_packing(model: nn.Module) -> None:
    for module in model.modules():
        module._cpu_skip_gemm_dispatch = True
        if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
            module.quant_method = UnpackedEmbedding()


def assert_inside(model: nn.Module, view: WeightsView, bound: Bound | None = None) -> None:
    """Raise WeightsBroken when a parameter that is no named copy has left the mapping (a packed copy, an emptied
    tensor)."""
    named = {row.name for row in bound.copies} if bound else set()
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if name in named:
            continue
        if nbytes == 0 or not view.mapping.contains(parameter.data_ptr(), nbytes):
            raise WeightsBroken(
                f"{name} is not in the owner's memory after loading: vLLM made a private copy of it",
                kept="the owner's weights as they are",
                remedy="this CPU takes a packing path that the adapter does not know; report its flags",
            )


def _attributes(model: nn.Module) -> set[tuple[str, str]]:
    """Plain tensor attributes of the layers: neither parameters nor buffers, so no list of vLLM's has them."""
    return {
        (name, attribute)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def _assert_nothing_derived(model: nn.Module, view: WeightsView, before: set[tuple[str, str]]) -> None:
    """Raise WeightsBroken when a layer made a tensor of its weights: an update would leave it as it was."""
    for name, attribute in sorted(_attributes(model) - before):
        value = getattr(model.get_submodule(name), attribute)
        nbytes = value.numel() * value.element_size()
        if nbytes > _DERIVED_BYTES and not view.mapping.contains(value.data_ptr(), nbytes):
            raise WeightsBroken(
                f"{name}.{attribute}: this layer keeps {nbytes} bytes that it derives from its weights",
                kept="the owner's weights as they are",
                remedy="this architecture cannot share its weights yet; report it",
            )


@dataclass(frozen=True)
class Moved:
    """``remapped``: other memory lies at the old addresses now; False: it was updated in place."""

    was: int
    now: int
    remapped: bool
    copies: int
    ms: float


def follow(model: nn.Module, view: WeightsView, bound: Bound, threads: int = 1) -> Moved:
    """Move a built model to the owner's last version: verified, at the same addresses, its copies made anew.

    The caller has stopped stepping. Raises as ``WeightsView.follow``; a WeightsBroken after the remap says so, and the
    engine must not step again."""
    watch, was = Stopwatch(), view.grant.version
    remapped = view.follow(threads, seat().verified)
    for layer, module in _expert_layers(model).items():
        _pack_again(layer, module, view)
    _fill_buffers(model, view)
    assert_inside(model, view, bound)
    if bound.packed_bytes:
        packing.pack(model)
    return Moved(was, view.grant.version, remapped, len(bound.copies), watch.ms())


def _pack_again(layer: str, module: Any, view: WeightsView) -> None:
    """vLLM packs experts once, when their kernel is built, so the kernel is built again."""
    for name in list(module._parameters):
        whole = _bytes(view, view.tensors[f"{layer}.{name}"]).clone()
        module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    module.quant_method.moe_kernel = None
    module.quant_method.process_weights_after_loading(module)


def move_engine(core: Any, threads: int = 1) -> Moved:
    """Move the engine of this process to the owner's last weight version. ``core``: the adapter's ``Core``.

    Called between two steps. The KV blocks of requests on board are of the old weights, so these requests go back to
    the queue and are read again with the new ones; their tokens stay. Afterwards every token carries the new version,
    and the caller takes a new oracle. Raises as ``follow``; before the remap nothing but the KV blocks is lost."""
    core.reset_prefix_cache(reset_running_requests=True)
    moved: Moved = core.model_executor.collective_rpc("follow_weights", args=(threads,))[0]
    core.set_weight_version(str(moved.now))
    logger.info("weights_moved", **{"from": moved.was, "to": moved.now, "remapped": moved.remapped, "ms": moved.ms})
    return moved
