"""Where each tensor of a model lies in the owner's mapping.

Pure. vLLM fuses q|k|v and gate|up of a layer into one parameter. When the parts lie side by side, in that
order and without a gap, the fused parameter is a plain contiguous view of the same bytes and nothing is
copied (tensor parallel size 1). A tied output matrix is an alias.
"""

from __future__ import annotations

from collections.abc import Mapping

from belayer.errors import WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner.safetensors_file import ITEM_BYTES, RawTensor, elements

ALIGN = 64  # bytes: a cache line, and enough for every vector load

# Fused name part -> its parts in vLLM's order (vllm.model_executor.models: stacked_params_mapping).
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_FLOATS = frozenset({"F32", "F16", "BF16"})


def target_dtype(stored: str, wanted: str) -> str:
    """Dtype in the mapping: floats become ``wanted`` ("" keeps them), all else stays. Only exact
    conversions."""
    if stored not in _FLOATS or wanted in ("", stored):
        return stored
    if wanted == "F32":
        return wanted
    raise WeightsBroken(
        f"weights stored as {stored} cannot become {wanted} without loss",
        kept="nothing was sealed",
        remedy=f"set dtype of the [[model]] to float32 or to the stored type {stored}",
    )


def _groups(names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(fused name or "", member names) in file order; a group stands where its first member stood."""
    present, placed, out = set(names), set[str](), list[tuple[str, tuple[str, ...]]]()
    for name in names:
        if name in placed:
            continue
        group = _group_of(name, present)
        placed.update(group[1])
        out.append(group)
    return out


def _group_of(name: str, present: set[str]) -> tuple[str, tuple[str, ...]]:
    parts = name.split(".")
    for fused, members in FUSED.items():
        for member in members:
            if member not in parts:
                continue
            at = parts.index(member)
            siblings = tuple(".".join([*parts[:at], one, *parts[at + 1 :]]) for one in members)
            if all(one in present for one in siblings):
                return ".".join([*parts[:at], fused, *parts[at + 1 :]]), siblings
    return "", (name,)


def plan(tensors: Mapping[str, RawTensor], dtype: str, tied: Mapping[str, str]) -> tuple[tuple[TensorSpec, ...], int]:
    """Specs of all tensors, their fused views and their aliases, and the size of the mapping in bytes.

    ``dtype``: safetensors name that floats shall have, "" to keep theirs. ``tied``: alias -> tensor.
    """
    specs: list[TensorSpec] = []
    offset = 0
    for fused, members in _groups([name for name in tensors if name not in tied]):
        offset = -(-offset // ALIGN) * ALIGN
        start, rows = offset, []
        for name in members:
            spec = _spec(tensors[name], target_dtype(tensors[name].dtype, dtype), offset)
            offset += spec.nbytes
            rows.append(spec)
        specs.extend(rows)
        if fused:
            specs.append(_fuse(fused, rows, start))
    by_name = {spec.name: spec for spec in specs}
    for alias, name in tied.items():
        if name in by_name:
            base = by_name[name]
            specs.append(
                TensorSpec(
                    name=alias,
                    dtype=base.dtype,
                    shape=base.shape,
                    offset=base.offset,
                    nbytes=base.nbytes,
                    alias_of=name,
                )
            )
    return tuple(specs), offset


def _spec(raw: RawTensor, dtype: str, offset: int) -> TensorSpec:
    nbytes = elements(raw.shape) * ITEM_BYTES[dtype]
    return TensorSpec(name=raw.name, dtype=dtype, shape=raw.shape, offset=offset, nbytes=nbytes)


def _fuse(name: str, rows: list[TensorSpec], start: int) -> TensorSpec:
    first = rows[0]
    if any(row.shape[1:] != first.shape[1:] or row.dtype != first.dtype for row in rows):
        raise WeightsBroken(
            f"{name}: its parts {[(row.name, list(row.shape), row.dtype) for row in rows]} do not stack",
            kept="nothing was sealed",
            remedy="the model folder mixes tensors of different models or dtypes",
        )
    shape = (sum(row.shape[0] for row in rows), *first.shape[1:])
    return TensorSpec(
        name=name,
        dtype=first.dtype,
        shape=shape,
        offset=start,
        nbytes=sum(row.nbytes for row in rows),
        alias_of=first.name,
    )
