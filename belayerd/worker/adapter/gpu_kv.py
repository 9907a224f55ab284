"""vLLM's one allocation of KV cache, answered by the addresses that lead to scratch now and to the arena later."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from belayer.errors import BelayerError
from belayerd.worker.adapter.gpu_seat import gpu_seat


class AnswerKv(TorchFunctionMode):
    """Answers exactly one ``torch.zeros(n, dtype=int8)``. Nothing is zeroed: before the lease it is scratch, and with
    the lease the arena is zeroed once, by ``GpuArena.promote``."""

    def __init__(self) -> None:
        super().__init__()
        self._answered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8:
            return self._answer(int(args[0]))
        return func(*args, **kwargs)

    def _answer(self, nbytes: int) -> torch.Tensor:
        seat = gpu_seat()
        if self._answered or nbytes > seat.arena.nbytes:
            raise BelayerError(f"vLLM asks for {nbytes} bytes of KV cache, the arena has {seat.arena.nbytes}")
        self._answered = True
        whole = seat.device.memory.as_buffer(seat.arena.va, seat.arena.nbytes)
        return seat.tensor_of(whole)[:nbytes].view(torch.int8)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and not self._answered:
            raise BelayerError("vLLM no longer allocates its KV cache by torch.zeros: the arena was not used")
