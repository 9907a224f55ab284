"""A layout read from the writer's side: which bytes a tensor of the files fills. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from belayer.errors import WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner.layout import WIDENS
from gpuowner.recipe import c_strides
from gpuowner.safetensors_file import elements


class Parts:
    """``tied``: second name of a tensor -> its first. ``sources``: the names that a whole rewrite must give."""

    def __init__(self, layout: Iterable[TensorSpec]) -> None:
        self._whole = {spec.name: spec for spec in layout if not spec.alias_of and spec.nbytes}
        self._by_source: dict[str, list[TensorSpec]] = {}
        self._ignored: set[str] = set()
        self.tied: dict[str, str] = {}
        filled: dict[str, str] = {}
        for spec in layout:
            if spec.source and spec.nbytes:
                self._by_source.setdefault(spec.source, []).append(spec)
                filled.setdefault(spec.alias_of or spec.name, spec.source)
            elif spec.source:
                self._ignored.add(spec.name)
        for spec in layout:
            if spec.alias_of and not spec.source:
                self.tied[spec.name] = filled[spec.alias_of]
        self.sources = frozenset(self._by_source)

    def parts(self, name: str) -> list[TensorSpec]:
        """The places that ``name`` fills; none for a tensor that the engine ignores. Raises WeightsBroken."""
        if name in self._ignored:
            return []
        specs = self._by_source.get(self.tied.get(name, name))
        if specs is None:
            raise WeightsBroken(
                f"the model has no tensor named {name}",
                kept="nothing of this call was written",
                remedy="use the names of the model's own files",
            )
        return specs

    def of(self, name: str, dtype: str, shape: tuple[int, ...]) -> list[TensorSpec]:
        """As ``parts``, for a whole tensor of this dtype and shape. Raises WeightsBroken when it does not fit."""
        specs = self.items_of(name, dtype)
        if specs and (specs[0].source_shape or specs[0].shape) != shape:
            raise WeightsBroken(
                f"{name} has shape {list(shape)}, the model has {list(specs[0].source_shape or specs[0].shape)}",
                kept="nothing of this call was written",
            )
        return specs

    def items_of(self, name: str, dtype: str) -> list[TensorSpec]:
        specs = self.parts(name)
        for spec in specs:
            if spec.dtype != dtype and (dtype, spec.dtype) not in WIDENS:
                raise WeightsBroken(
                    f"{name} is {dtype} and the model holds {spec.dtype}: not without loss",
                    kept="nothing of this call was written",
                    remedy=f"convert it to {spec.dtype}",
                )
        return specs

    def whole(self, spec: TensorSpec) -> TensorSpec:
        """The engine's tensor that ``spec`` is, or is a part of."""
        return self._whole[spec.alias_of or spec.name]

    def elements_of(self, name: str) -> int:
        specs = self.parts(name)
        return elements(specs[0].source_shape or specs[0].shape) if specs else 0

    def place_items(self, name: str, spec: TensorSpec, indices: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Items of the tensor, counted in C order, that lie in this part: (place in elements from ``spec.offset``,
        position in ``indices``)."""
        if not spec.source_strides and not spec.strides:
            inside = indices - spec.source_offset
            which = np.nonzero((inside >= 0) & (inside < elements(spec.shape)))[0]
            return inside[which], which
        # General strides: say for every item of the part which item of the tensor it is, and look the others up.
        source = _walk(spec.shape, spec.source_strides or c_strides(spec.shape)) + spec.source_offset
        place = _walk(spec.shape, spec.strides or c_strides(spec.shape))
        order = np.argsort(source, kind="stable")
        found = np.searchsorted(source, indices, sorter=order)
        found = np.minimum(found, source.size - 1)
        which = np.nonzero(source[order[found]] == indices)[0]
        return place[order[found[which]]], which


def _walk(shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[Any]:
    """Offset in elements of every item of a strided array, in C order."""
    out: NDArray[Any] = np.zeros(shape, dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        out += (np.arange(size, dtype=np.int64) * stride).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return out.reshape(-1)


def complement(ranges: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """What of [``start``, ``end``) is in none of ``ranges``, in order."""
    out, at = [], start
    for low, high in sorted(ranges):
        if low > at:
            out.append((at, min(low, end)))
        at = max(at, high)
        if at >= end:
            break
    if at < end:
        out.append((at, end))
    return [(low, high) for low, high in out if low < high]
