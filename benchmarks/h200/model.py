"""A small decoder in the form of Qwen3 (RMSNorm, QK norm, grouped queries, rotary positions, SwiGLU) whose parameters
and KV cache are views of memory that others own. Greedy; every token, of a prompt as of an answer, goes through the
same step, so that a stream which is computed again gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.h200.plan import Shape

Take = Callable[[int], torch.Tensor]  # bytes -> a uint8 tensor of memory that can be parked


def dtype_of(shape: Shape) -> torch.dtype:
    return torch.bfloat16 if shape.dtype == "bfloat16" else torch.float32


def parameters(arena: torch.Tensor, shape: Shape) -> dict[str, torch.Tensor]:
    """Views of ``arena`` (uint8) by the layout of ``shape``."""
    kind, out = dtype_of(shape), {}
    for name, size, offset in shape.layout()[0]:
        count = 1
        for length in size:
            count *= length
        out[name] = arena[offset : offset + count * shape.item()].view(kind).view(size)
    return out


def fill_random(params: dict[str, torch.Tensor], seed: int, device: torch.device) -> None:
    """Same seed, same device kind, same bytes."""
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, tensor in params.items():
        if tensor.dim() == 1 or "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


class Decoder:
    """``step`` reads ``ids`` and ``pos`` ([batch] int64) and writes ``next`` ([batch] int64): the greedy token, shifted
    by the position. Without the shift random weights soon repeat one token, and equal streams would prove little."""

    def __init__(self, shape: Shape, weights: torch.Tensor, kv: torch.Tensor, take: Take) -> None:
        self.shape, self.w = shape, parameters(weights, shape)
        size = (shape.layers, 2, shape.batch, shape.max_len, shape.kv_heads, shape.head_dim)
        self.kv = kv[: shape.kv_bytes()].view(dtype_of(shape)).view(size)
        self._take = take
        self.ids, self.pos, self.next = (self._long(shape.batch) for _ in range(3))
        self.rows = self._long(shape.batch)
        self.rows.copy_(torch.arange(shape.batch))
        self.places = self._long(shape.max_len)
        self.places.copy_(torch.arange(shape.max_len))
        half = shape.head_dim // 2
        angles = torch.outer(torch.arange(shape.max_len).float(), 1e6 ** (-torch.arange(half).float() / half))
        self.cos = self._float(shape.max_len, half)
        self.sin = self._float(shape.max_len, half)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def _long(self, count: int) -> torch.Tensor:
        return self._take(count * 8).view(torch.int64)[:count]

    def _float(self, rows: int, columns: int) -> torch.Tensor:
        return self._take(rows * columns * 4).view(torch.float32)[: rows * columns].view(rows, columns)

    def step(self) -> None:
        with torch.no_grad():
            self._step()

    def _step(self) -> None:
        shape, w = self.shape, self.w
        x = w["embed"][self.ids]
        cos, sin = self.cos[self.pos].unsqueeze(1), self.sin[self.pos].unsqueeze(1)
        mask = (self.places[None, :] <= self.pos[:, None])[:, None, None, :]
        for at in range(shape.layers):
            x = x + self._attend(at, _norm(x, w[f"{at}.norm1"]), cos, sin, mask)
            gate, up = F.linear(_norm(x, w[f"{at}.norm2"]), w[f"{at}.gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w[f"{at}.down"])
        logits = F.linear(_norm(x, w["norm"]), w["head"])
        self.next.copy_((logits.argmax(dim=-1) + 7 * self.pos) % shape.vocab)

    def _attend(self, at: int, x: torch.Tensor, cos: Any, sin: Any, mask: torch.Tensor) -> torch.Tensor:
        shape, w = self.shape, self.w
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q, k, v = F.linear(x, w[f"{at}.qkv"]).split((q_size, kv_size, kv_size), dim=-1)
        q = _rotate(_norm(q.view(-1, shape.heads, shape.head_dim), w[f"{at}.qnorm"]), cos, sin)
        k = _rotate(_norm(k.view(-1, shape.kv_heads, shape.head_dim), w[f"{at}.knorm"]), cos, sin)
        keys, values = self.kv[at, 0], self.kv[at, 1]
        keys[self.rows, self.pos] = k
        values[self.rows, self.pos] = v.view(-1, shape.kv_heads, shape.head_dim)
        group = shape.heads // shape.kv_heads
        q = q.view(-1, shape.kv_heads, group, shape.head_dim)
        scores = torch.einsum("bkgd,blkd->bkgl", q, keys).float() * shape.head_dim**-0.5
        probabilities = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(values.dtype)
        out = torch.einsum("bkgl,blkd->bkgd", probabilities, values)
        return F.linear(out.reshape(-1, q_size), w[f"{at}.out"])


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
