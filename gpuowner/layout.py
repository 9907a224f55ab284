"""Where each tensor of a model lies in the owner's mapping.

Pure. Every tensor of the engine is contiguous and stands alone; the file's tensors that fill it are parts of it, so
vLLM's fused parameters are plain views and nothing is copied (tensor parallel size 1). A tied output matrix is an
alias.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from belayer.errors import WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner.recipe import Param, Piece, Recipe, c_strides, is_run, merged
from gpuowner.safetensors_file import ITEM_BYTES, RawTensor, elements

ALIGN = 64  # bytes: a cache line, and enough for every vector load
WIDENS = frozenset({("BF16", "F32"), ("F16", "F32")})  # exact


def place(recipe: Recipe, tensors: Mapping[str, RawTensor], dtype: str) -> tuple[tuple[TensorSpec, ...], int]:
    """Specs of the engine's tensors, of their parts and of tied names, and the size of the mapping in bytes.

    ``dtype``: safetensors name that floats shall have where the recipe leaves it open, "" to keep theirs. Raises
    WeightsBroken when a conversion would lose bits, or the parts of a tensor leave a gap or overlap.
    """
    by_target: dict[str, list[Piece]] = {param.name: [] for param in recipe.params}
    for piece in merged(recipe.pieces):
        by_target[piece.target].append(piece)
    counts: dict[str, int] = {}
    for pieces in by_target.values():
        for piece in pieces:
            counts[piece.source] = counts.get(piece.source, 0) + 1
    specs: list[TensorSpec] = []
    offset = 0
    for param in recipe.params:
        pieces = by_target[param.name]
        to = _dtype(param, pieces, tensors, dtype)
        offset = -(-offset // ALIGN) * ALIGN
        _disjoint(param, pieces)
        rows = _rows(param, pieces, to, offset, tensors, counts)
        specs.extend(rows)
        offset += rows[0].nbytes
    by_name = {spec.name: spec for spec in specs}
    specs.extend(_tied(alias, by_name[name]) for alias, name in recipe.tied if name in by_name)
    specs.extend(
        TensorSpec(name=name, dtype=tensors[name].dtype, shape=tensors[name].shape, offset=0, nbytes=0, source=name)
        for name in recipe.unused
    )
    return tuple(specs), offset


def _dtype(param: Param, pieces: list[Piece], tensors: Mapping[str, RawTensor], wanted: str) -> str:
    if not pieces:
        raise WeightsBroken(f"nothing in the files fills {param.name}", kept="nothing was sealed")
    for piece in pieces:
        stored = tensors[piece.source].dtype
        to = param.dtype or (wanted if stored in ("F32", "F16", "BF16") and wanted else stored)
        if to != stored and (stored, to) not in WIDENS:
            raise WeightsBroken(
                f"{piece.source} is stored as {stored} and cannot become {to} without loss",
                kept="nothing was sealed",
                remedy=f"set dtype of the [[model]] to float32 or to the stored type {stored}",
            )
    return to


def _rows(
    param: Param,
    pieces: list[Piece],
    dtype: str,
    offset: int,
    tensors: Mapping[str, RawTensor],
    counts: Mapping[str, int],
) -> list[TensorSpec]:
    item = ITEM_BYTES[dtype]
    whole = TensorSpec(
        name=param.name, dtype=dtype, shape=param.shape, offset=offset, nbytes=elements(param.shape) * item,
        buffer=param.buffer,
    )  # fmt: skip
    rows = [whole]
    for number, piece in enumerate(pieces):
        name = piece.source if counts[piece.source] == 1 else f"{piece.source}#{number}"
        row = TensorSpec(
            name=name,
            dtype=dtype,
            shape=piece.shape,
            offset=offset + piece.offset * item,
            nbytes=elements(piece.shape) * item,
            alias_of=param.name,
            source=piece.source,
            strides=() if piece.strides == c_strides(piece.shape) else piece.strides,
            source_offset=piece.source_offset,
            source_strides=() if piece.source_strides == c_strides(piece.shape) else piece.source_strides,
            source_shape=() if tensors[piece.source].shape == piece.shape else tensors[piece.source].shape,
        )
        if name == param.name and row.shape == whole.shape and not row.strides:
            rows[0] = replace(row, offset=offset, alias_of="", buffer=param.buffer)
        else:  # a part that bears the name of its whole (a padded vocabulary) steps aside for it
            rows.append(row if name != param.name else replace(row, name=f"{name}#0"))
    return rows


def _tied(alias: str, base: TensorSpec) -> TensorSpec:
    return TensorSpec(
        name=alias, dtype=base.dtype, shape=base.shape, offset=base.offset, nbytes=base.nbytes, alias_of=base.name
    )


def _disjoint(param: Param, pieces: list[Piece]) -> None:
    """No element of ``param`` may be written twice: which copy wins would be the loader's accident."""
    count = elements(param.shape)
    for piece in pieces:
        last = piece.offset + sum((n - 1) * s for n, s in zip(piece.shape, piece.strides, strict=True))
        if piece.offset < 0 or last >= count or min((0, *piece.strides)) < 0:
            raise WeightsBroken(f"{piece.source} does not fit into {param.name} of shape {list(param.shape)}")
    if all(is_run(piece.shape, piece.strides) for piece in pieces):
        _runs_disjoint(param, pieces)
        return
    taken = np.zeros(count, dtype=np.bool_)
    for piece in pieces:
        part = np.lib.stride_tricks.as_strided(taken[piece.offset :], piece.shape, piece.strides)
        if part.any():
            raise _twice(piece, param)
        part[...] = True


def _runs_disjoint(param: Param, pieces: list[Piece]) -> None:
    """As above, without a map of every element: the experts of a mixture are many and large."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset < end:
            raise _twice(piece, param)
        end = piece.offset + elements(piece.shape)


def _twice(piece: Piece, param: Param) -> WeightsBroken:
    return WeightsBroken(f"{piece.source} is written over another part of {param.name}", kept="nothing was sealed")
