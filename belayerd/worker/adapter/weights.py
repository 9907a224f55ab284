"""Load format "belayer": every parameter is a view of the owner's read-only memory, none is copied.

The trap is prepacking. On some CPUs (float32 with oneDNN, bf16 with AMX) vLLM packs a matrix into private
memory and leaves an empty tensor behind: sharing is lost and a later update of the owner's bytes is not
seen. So packing is switched off for every layer, on every CPU, and afterwards each parameter's address is
checked to lie in the mapping.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from belayer.errors import WeightsBroken
from belayerd.worker.adapter.seat import seat
from gpuowner.attach import WeightsView

_TORCH = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


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
            bind(model, view)
            _forbid_packing(model)
            process_weights_after_loading(model, model_config, device)
        assert_inside(model, view)
        return model.eval()


def bind(model: nn.Module, view: WeightsView) -> None:
    """Point each parameter at its bytes. Raises WeightsBroken when one is missing or of another shape or
    dtype."""
    base = torch.frombuffer(view.mapping.buffer(), dtype=torch.uint8)
    for name, parameter in model.named_parameters():
        spec = view.tensors.get(name)
        if spec is None:
            raise WeightsBroken(
                f"model {view.grant.model} needs {name}, which its files do not hold under that name",
                remedy="this architecture renames or reshapes its weights; it needs a layout of its own",
            )
        dtype = _TORCH.get(spec.dtype)
        if dtype is not parameter.dtype or tuple(parameter.shape) != spec.shape:
            raise WeightsBroken(
                f"{name}: the engine wants {tuple(parameter.shape)} {parameter.dtype}, "
                f"the owner has {spec.shape} {spec.dtype}",
                remedy="set dtype of the [[model]] to the engine's",
            )
        parameter.data = base[spec.offset : spec.offset + spec.nbytes].view(dtype).view(spec.shape)


def _forbid_packing(model: nn.Module) -> None:
    for module in model.modules():
        module._cpu_skip_gemm_dispatch = True
        if isinstance(getattr(module, "quant_method", None), UnquantizedEmbeddingMethod):
            module.quant_method = UnpackedEmbedding()


def assert_inside(model: nn.Module, view: WeightsView) -> None:
    """Raise WeightsBroken when a parameter has left the mapping (a packed copy, an emptied tensor)."""
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes == 0 or not view.mapping.contains(parameter.data_ptr(), nbytes):
            raise WeightsBroken(
                f"{name} is not in the owner's memory after loading: vLLM made a private copy of it",
                kept="the owner's weights as they are",
                remedy="this CPU takes a packing path that the adapter does not know; report its flags",
            )
