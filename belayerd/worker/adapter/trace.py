"""What vLLM's own weight loader does with a model's tensors, written down as a recipe.

The model is built with untouched storage, its loader gets meta tensors (shapes without bytes), and every copy into a
parameter is noted instead of done: which region of which file tensor goes where. So the layout of any architecture
that only copies is known without a rule of ours. A loader that computes is refused by name, and so is a parameter
that the copies do not cover.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import ModelRegistry
from vllm.utils.torch_utils import set_default_torch_dtype

from belayer.errors import WeightsBroken
from belayerd.worker.adapter.gloo import Group, join
from gpuowner.parts import complement
from gpuowner.recipe import Param, Piece, Recipe, is_run
from gpuowner.recipes import read_config
from gpuowner.safetensors_file import RawTensor, elements

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {kind: name for name, kind in TORCH.items()}


class _Notes(TorchDispatchMode):
    """Notes copies into, and zero fills of, the tensors of ``targets`` (storage -> name); does none of them."""

    def __init__(self, targets: dict[int, str], sources: dict[int, str]) -> None:
        super().__init__()
        self._targets, self._sources = targets, sources
        self._kept: list[torch.Tensor] = []  # a freed storage's address could come back as another tensor's
        self.pieces: list[Piece] = []
        self.zeroed: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in ("aten::_to_copy", "aten::clone"):
            return self._converted(args[0], func(*args, **kwargs))
        if not func._schema.is_mutable or not args or not isinstance(args[0], torch.Tensor):
            return func(*args, **kwargs)
        target = self._targets.get(_storage(args[0]))
        if target is None:
            return func(*args, **kwargs)
        name = func.name()
        if name == "aten::copy_":
            self._copy(target, args[0], args[1])
        elif name == "aten::zero_" or (name == "aten::fill_.Scalar" and args[1] == 0):
            self.zeroed.append((target, args[0]))
        else:
            raise _cannot(f"the engine's loader changes {target} by {name}, which is no copy")
        return args[0]

    def _converted(self, value: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """A whole tensor in another dtype or place is still that tensor; a part of one is not followed."""
        source = self._sources.get(_storage(value))
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()
        if source is not None and whole and result.is_contiguous():
            self._sources[_storage(result)] = source
            self._kept.append(result)
        return result

    def _copy(self, target: str, into: torch.Tensor, value: torch.Tensor) -> None:
        source = self._sources.get(_storage(value))
        if source is None:
            raise _cannot(f"the engine's loader computes what it puts into {target}")
        if into.shape != value.shape:
            value = value.expand(into.shape)
        shape = tuple(into.shape)
        self.pieces.append(
            Piece(
                source,
                target,
                shape,
                value.storage_offset(),
                tuple(value.stride()),
                into.storage_offset(),
                tuple(into.stride()),
            )
        )


def trace(folder: Path, dtype: str, tensors: dict[str, RawTensor], group: Group | None = None) -> Recipe:
    """The recipe of the model in ``folder`` computed in ``dtype`` (as in the configuration), or of this rank's part of
    it. Raises WeightsBroken with the reason when it has none. Once per process: it sets up vLLM's process groups."""
    _look_here(read_config(folder)[1].get("architectures") or [])
    # One rank needs no peer: a store in memory, no file and no port.
    group = group or Group(0, 1, torch.distributed.HashStore())
    args = EngineArgs(
        model=str(folder), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=16,
        tensor_parallel_size=group.size, distributed_executor_backend="uni",
    )  # fmt: skip
    config = args.create_engine_config()
    if config.model_config.quantization is not None:
        raise _cannot(f"it is quantized ({config.model_config.quantization})")
    with set_current_vllm_config(config):
        join(group)
        init_distributed_environment(group.size, group.rank, "env://", group.rank, "gloo")
        ensure_model_parallel_initialized(group.size, 1)
        # As a worker builds it: storage that nobody touches costs no memory, and not every constructor likes meta.
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model = initialize_model(config, model_config=config.model_config)
        return note(model, tensors, tie=bool(getattr(config.model_config.hf_config, "tie_word_embeddings", False)))


def _look_here(architectures: list[str]) -> None:
    """vLLM looks at an unknown model class in a process of its own, which costs it 8 s, so that CUDA is not touched in
    a process that will fork. This one forks nothing."""
    for name in architectures:
        known = ModelRegistry.models.get(name)
        if known is not None:
            ModelRegistry.register_model(name, known.load_model_cls())


def note(model: nn.Module, tensors: dict[str, RawTensor], tie: bool) -> Recipe:
    """The recipe of ``model``. ``tie``: by its config the output matrix is the embedding."""
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    sources = {name: torch.empty(raw.shape, dtype=TORCH[raw.dtype], device="meta") for name, raw in tensors.items()}
    notes = _Notes(
        {_storage(tensor): name for name, tensor in held.items()},
        {_storage(tensor): name for name, tensor in sources.items()},
    )
    try:
        with notes:
            model.load_weights(iter(sources.items()))
    except WeightsBroken:
        raise
    # Whatever vLLM's loader raises about these files (a missing name, a size that does not fit) is about this model.
    except Exception as why:
        raise _cannot(f"the engine's loader does not take these tensors: {type(why).__name__}: {why}") from why
    return _recipe(model, notes, tensors, tie)


def _recipe(model: nn.Module, notes: _Notes, tensors: dict[str, RawTensor], tie: bool) -> Recipe:
    filled = {piece.target for piece in notes.pieces}
    params = []
    for name, tensor in model.named_parameters():
        _covered(name, tensor, notes)
        params.append(Param(name, tuple(tensor.shape), _NAMES[tensor.dtype]))
    for name, tensor in model.named_buffers():
        if name in filled:
            _covered(name, tensor, notes)
            params.append(Param(name, tuple(tensor.shape), _NAMES[tensor.dtype], buffer=True))
    used = {piece.source for piece in notes.pieces}
    tied = _tied(model, used) if tie else ()
    unused = tuple(name for name in tensors if name not in used and name not in dict(tied))
    return Recipe(tuple(params), tuple(notes.pieces), unused, tied)


def _tied(model: nn.Module, used: set[str]) -> tuple[tuple[str, str], ...]:
    """A state dict of a tied model names the matrix twice; the second name is the first tensor."""
    head = "lm_head.weight"
    names = dict(model.named_parameters(remove_duplicate=False))
    first = dict(model.named_parameters())
    if head in used or head not in names or head in first:
        return ()
    same = next((name for name, tensor in first.items() if tensor is names[head]), "")
    return ((head, same),) if same else ()


def _covered(name: str, tensor: torch.Tensor, notes: _Notes) -> None:
    """Every element comes from the files or is zero (padding), else the engine would compute with what lay there."""
    count = elements(tuple(tensor.shape))
    pieces = [piece for piece in notes.pieces if piece.target == name]
    regions = [(piece.offset, piece.shape, piece.strides) for piece in pieces]
    regions += [(z.storage_offset(), tuple(z.shape), tuple(z.stride())) for at, z in notes.zeroed if at == name]
    if all(is_run(shape, strides) for _, shape, strides in regions):
        gaps = complement([(offset, offset + elements(shape)) for offset, shape, _ in regions], 0, count)
        filled = count - sum(end - start for start, end in gaps)
    else:
        taken = np.zeros(count, dtype=np.bool_)
        for offset, shape, strides in regions:
            if elements(shape):
                np.lib.stride_tricks.as_strided(taken[offset:], shape, strides)[...] = True
        filled = int(taken.sum())
    if filled != count:
        raise _cannot(f"the files fill {filled} of the {count} elements of {name}")


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _cannot(what: str) -> WeightsBroken:
    return WeightsBroken(
        f"this model cannot be served from the owner's memory: {what}",
        kept="nothing was sealed",
        remedy="use an architecture whose loader only copies, unquantized",
    )
