"""Matrices packed into private memory, for slots that ask for it (``[slot] packed_weights``, ADR 0023).

A matrix in the owner's memory lies as its file has it. For a product with more than one row MKL first copies it into
the order that its kernel reads, in every step: 40 % of the CPU time of a small float32 model at 8 requests. vLLM's own
engine packs each matrix once instead, by oneDNN. The same is done here beside the view, which stays what is verified,
updated and shared; the packed form is made anew from it for every weight version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from belayer.errors import WeightsBroken

_SHAPES = 32  # kernels that a matrix keeps, one per number of rows: as vLLM has it


def pack(model: nn.Module) -> int:
    """Pack every matrix that the model multiplies with; their bytes. What was packed before is freed. Raises
    WeightsBroken where this CPU packs none of this type."""
    layers = _multiplied(model)
    for name, layer in layers.items():
        layer.cpu_linear = _product(name, layer.weight)
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers.values())


def _multiplied(model: nn.Module) -> dict[str, Any]:
    """Linear layers and the output matrix, which may be the table of the inputs; else that table is only looked up."""
    modules = dict(model.named_modules())
    tied = not any(isinstance(module, ParallelLMHead) for module in modules.values())
    found = {}
    for name, module in modules.items():
        method = getattr(module, "quant_method", None)
        output = isinstance(method, UnquantizedEmbeddingMethod) and (tied or isinstance(module, ParallelLMHead))
        if isinstance(method, UnquantizedLinearMethod) or output:
            found[name] = module
    return found


def _product(name: str, weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    if not ops._supports_onednn:
        raise _not_here(name, weight, "this vLLM was built without oneDNN")
    try:
        packed = ops.create_onednn_mm(weight.t(), _SHAPES)
    except RuntimeError as why:
        raise _not_here(name, weight, " ".join(str(why).split())) from why

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made: Tensor = ops.onednn_mm(packed, x, bias)
        return made

    return product


def _not_here(name: str, weight: Tensor, why: str) -> WeightsBroken:
    return WeightsBroken(
        f"{name}: this CPU cannot pack a matrix of {weight.dtype}: {why}",
        kept="the owner's weights as they are",
        remedy="packed_weights = false for this slot: nothing is lost where there is nothing to pack",
    )
