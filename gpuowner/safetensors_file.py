"""Reading safetensors without torch: an 8-byte length, a JSON header, then raw little-endian tensors.

Format: https://github.com/huggingface/safetensors (README, "Format"). Every number of the header is
checked against the file before a byte is used: a truncated download must be a sentence, not garbage in a
model.
"""

from __future__ import annotations

import json
import operator
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from belayer.errors import WeightsBroken

_MAX_HEADER = 100 << 20
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class RawTensor:
    """Where one tensor lies: bytes ``start`` to ``end`` of ``path``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int


def elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def read_header(path: Path) -> dict[str, RawTensor]:
    """All tensors of one file. Raises WeightsBroken naming the file and what is wrong with it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise _broken(path, f"its header length says {length} and the file has {size} bytes")
            header = json.loads(file.read(length), object_pairs_hook=lambda rows: _no_twins(path, rows))
    except FileNotFoundError as why:
        raise _broken(path, "the file is missing") from why
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as why:
        raise _broken(path, f"its header cannot be read: {why}") from why
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, row, 8 + length, size) for name, row in header.items()}
    _tiles(path, tensors, 8 + length, size)
    return tensors


def _no_twins(path: Path, rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal keys; which of two tensors was meant is nobody's to guess."""
    table = dict(rows)
    if len(table) != len(rows):
        names = [name for name, _ in rows]
        raise _broken(path, f"its header names {next(name for name in names if names.count(name) > 1)} twice")
    return table


def _tiles(path: Path, tensors: dict[str, RawTensor], base: int, size: int) -> None:
    """The format allows neither overlaps nor holes: bytes that belong to two tensors, or to none, mean a lie."""
    at = base
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != at:
            kind = "overlaps the tensor before it" if tensor.start < at else "leaves a hole before it"
            raise _broken(path, f"{tensor.name} begins at byte {tensor.start}, not at {at}: it {kind}")
        at = tensor.end
    if at != size:
        raise _broken(path, f"its tensors end at byte {at} and the file has {size}")


def _tensor(path: Path, name: str, row: Any, base: int, size: int) -> RawTensor:
    try:
        dtype, shape = str(row["dtype"]), tuple(operator.index(n) for n in row["shape"])
        first, last = (operator.index(n) for n in row["data_offsets"])
    except (KeyError, TypeError, ValueError) as why:
        raise _broken(path, f"the header entry of {name} is malformed") from why
    if dtype not in ITEM_BYTES:
        raise _broken(path, f"{name} has the unknown dtype {dtype}")
    if min((0, *shape)) < 0 or last - first != elements(shape) * ITEM_BYTES[dtype]:
        raise _broken(path, f"{name} of shape {list(shape)} and dtype {dtype} does not fit its {last - first} bytes")
    if first < 0 or base + last > size:
        raise _broken(path, f"{name} ends at byte {base + last} and the file has {size}: it is truncated")
    return RawTensor(name=name, dtype=dtype, shape=shape, path=path, start=base + first, end=base + last)


def read_model(folder: Path) -> dict[str, RawTensor]:
    """All tensors of a Hugging Face model folder: ``model.safetensors``, or the shards of its index.

    Raises WeightsBroken when a file is missing or truncated, or the index and the shards disagree.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _read_shards(folder, index)
    single = folder / "model.safetensors"
    if not single.exists():
        raise WeightsBroken(
            f"no model.safetensors and no {index.name} in {folder}",
            kept="nothing was sealed",
            remedy="point [[model]] path at a Hugging Face safetensors folder",
        )
    return read_header(single)


def _read_shards(folder: Path, index: Path) -> dict[str, RawTensor]:
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        shards = {name: read_header(folder / Path(name).name) for name in sorted(set(where.values()))}
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as why:
        raise _broken(index, "it is no index with a weight_map") from why
    tensors: dict[str, RawTensor] = {}
    for name, shard in where.items():
        if name not in shards[shard]:
            raise _broken(folder / shard, f"the index says that {name} is in it, and it is not")
        tensors[name] = shards[shard][name]
    for shard, held in shards.items():
        twin = next((name for name in held if where.get(name, shard) != shard), "")
        if twin:
            raise _broken(folder / shard, f"it holds {twin}, which the index says is in {where[twin]}")
        stray = sorted(set(held) - set(tensors))
        if stray:
            raise _broken(folder / shard, f"it holds {stray[0]}, which the index does not list")
    return tensors


def _broken(path: Path, what: str) -> WeightsBroken:
    return WeightsBroken(
        f"model file {path}: {what}",
        kept="nothing was sealed",
        remedy="fetch the file again and restart gpuowner",
    )
