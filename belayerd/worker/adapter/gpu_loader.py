"""Load format "belayer_gpu": every parameter is a view of the owner's GPU memory, mapped for reading.

The model is built with large tensors on the host and untouched, which costs nothing there; on the device it would cost
the weights a second time. Buffers are private copies, since a late write to one would end the engine (Xid 31).
"""

from __future__ import annotations

from typing import Any

import structlog
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, WeightsBroken
from belayer.messages.owner import TensorSpec
from belayerd.worker.adapter.bound import Bound, Copied
from belayerd.worker.adapter.gpu_seat import TensorOf, gpu_seat
from belayerd.worker.adapter.weights import Moved
from gpuowner.attach_gpu_weights import GpuWeights, GpuWeightsView

logger = structlog.get_logger(daemon="worker")

LARGE = 1 << 20  # bytes
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class LargeOnHost(TorchFunctionMode):
    """``torch.empty`` of more than ``LARGE`` bytes is made on the host: never written, it takes no memory there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and not kwargs.get("pin_memory") and kwargs.get("out") is None:
            meta = func(*args, **{**kwargs, "device": "meta"})
            if meta.numel() * meta.element_size() > LARGE:
                kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@register_model_loader("belayer_gpu")
class GpuOwnerLoader(BaseModelLoader):
    def get_external_weight_memory(self, vllm_config: Any) -> int:
        return gpu_seat().weights.nbytes

    def download_model(self, model_config: Any) -> None:
        """Nothing to fetch: the owner has it."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        raise WeightsBroken("weights in the owner's memory are updated through the owner, not by a reload")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        seat, device = gpu_seat(), torch.device("cuda", torch.cuda.current_device())
        with set_default_torch_dtype(model_config.dtype):
            with device, LargeOnHost():
                model = self.create_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            bound = bind(model, seat.weights, seat.tensor_of)
            process_weights_after_loading(model, model_config, device)
        assert_inside(model, seat.weights)
        logger.info("weights_bound", device=seat.device.name, **bound.say())
        return model.eval()


def bind(model: nn.Module, weights: GpuWeights, tensor_of: TensorOf) -> Bound:
    """Point each parameter at its bytes; buffers that the files hold are copied. Raises WeightsBroken."""
    views, nbytes = 0, 0
    for name, parameter in model.named_parameters():
        spec = _spec(weights, name, parameter)
        parameter.data = _view(weights, spec, parameter, tensor_of)
        views, nbytes = views + 1, nbytes + spec.nbytes
    return Bound(views, nbytes, tuple(_fill_buffers(model, weights, tensor_of)))


def _fill_buffers(model: nn.Module, weights: GpuWeights, tensor_of: TensorOf) -> list[Copied]:
    copies = []
    for name, buffer in model.named_buffers():
        given = weights.tensors.get(name)
        if given is not None and given.buffer:
            buffer.copy_(_view(weights, _spec(weights, name, buffer), buffer, tensor_of))
            copies.append(Copied(name, given.nbytes, "the engine may write to it"))
    return copies


def follow(model: nn.Module, weights: GpuWeights, tensor_of: TensorOf) -> Moved:
    """Move a built model to the owner's last version: verified, at the same addresses, its copies made anew. The caller
    has stopped stepping. Raises as ``GpuWeightsView.follow``."""
    if not isinstance(weights, GpuWeightsView):
        raise BelayerError("this engine's weights do not come from an owner that could have another version")
    watch, was = Stopwatch(), weights.grant.version
    remapped = weights.follow()
    copies = _fill_buffers(model, weights, tensor_of)
    assert_inside(model, weights)
    return Moved(was, weights.grant.version, remapped, len(copies), watch.ms())


def assert_inside(model: nn.Module, weights: GpuWeights) -> None:
    """Raise WeightsBroken when vLLM replaced a parameter by one of its own, which would be out of the owner's hands, or
    when something that is no parameter stayed on the host."""
    device = next(model.parameters()).device
    for name, buffer in model.named_buffers():
        if buffer.device != device:
            raise WeightsBroken(f"buffer {name} of {buffer.numel()} items is on {buffer.device}, the model on {device}")
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if nbytes == 0 or not weights.contains(parameter.data_ptr(), nbytes):
            raise WeightsBroken(
                f"{name} is not in the owner's GPU memory after loading: vLLM made a private copy of it",
                kept="the owner's weights as they are",
                remedy="this layer repacks its weights on this GPU; it cannot share them yet",
            )


def _spec(weights: GpuWeights, name: str, wanted: torch.Tensor) -> TensorSpec:
    spec = weights.tensors.get(name)
    if spec is None:
        raise WeightsBroken(f"the model needs {name}, which the owner does not hold under that name")
    if _NAMES.get(wanted.dtype) != spec.dtype or tuple(wanted.shape) != spec.shape:
        raise WeightsBroken(
            f"{name}: the engine wants {tuple(wanted.shape)} {wanted.dtype}, the owner has {spec.shape} {spec.dtype}"
        )
    return spec


def _view(weights: GpuWeights, spec: TensorSpec, like: torch.Tensor, tensor_of: TensorOf) -> torch.Tensor:
    return tensor_of(weights.of(spec)).view(like.dtype).view(spec.shape)
