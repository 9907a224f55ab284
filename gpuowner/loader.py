"""Bringing a model from disk into the owner's memory: the only slow thing that an owner does.

All headers are read and checked before memory is allocated, so that a broken folder costs nothing. bf16
becomes float32 by a shift of 16 bits, which is exact: float32 is bfloat16 with 16 more bits of fraction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from belayer.clock import Stopwatch
from belayer.errors import HostUnfit, WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner.backends.memfd import Memfd
from gpuowner.digest import chunk_digests, root_digest
from gpuowner.layout import plan
from gpuowner.safetensors_file import FileBytes, RawTensor, read_model
from gpuowner.vmem import PROT_READ, Mapping

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "auto": "", "": ""}
_REPORT_EVERY = 256 << 20

Progress = Callable[[int, int, float], None]  # bytes done, bytes in all, MB/s


@dataclass(frozen=True)
class Loaded:
    """A model in memory, hashed and sealed. ``mapping`` is the owner's own, now read-only."""

    memory: Memfd
    mapping: Mapping
    layout: tuple[TensorSpec, ...]
    chunks: tuple[bytes, ...]
    digest: str
    load_ms: float
    mb_per_s: float


def tied_names(folder: Path) -> dict[str, str]:
    """Aliases that ``config.json`` asks for. Raises WeightsBroken when it is missing or no JSON."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        tied = bool(config.get("tie_word_embeddings", False))
    except FileNotFoundError as why:
        raise WeightsBroken(f"model file {path}: the file is missing", kept="nothing was sealed") from why
    except (OSError, ValueError, AttributeError) as why:
        raise WeightsBroken(f"model file {path}: it cannot be read: {why}", kept="nothing was sealed") from why
    return {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}


def load(model: str, folder: Path, dtype: str, progress: Progress) -> Loaded:
    """Load, hash and seal. Raises WeightsBroken with nothing allocated or sealed, OSError when memory is
    short."""
    if dtype not in DTYPES:
        raise WeightsBroken(f"model {model}: unknown dtype {dtype!r}", remedy=f"one of {sorted(filter(None, DTYPES))}")
    watch = Stopwatch()
    tensors = read_model(folder)
    layout, nbytes = plan(tensors, DTYPES[dtype], tied_names(folder))
    if nbytes == 0:
        raise WeightsBroken(f"model {model}: {folder} holds no tensor", kept="nothing was sealed")
    _room_or_refuse(model, nbytes)
    memory = Memfd(f"weights-{model}", nbytes)
    try:
        mapping = memory.map_writable()
        _copy_all(mapping, tensors, layout, nbytes, watch, progress)
        copied_ms = watch.ms()
        chunks = tuple(chunk_digests(mapping.buffer()))
        memory.seal_writes()
        # The owner's mapping stays the only door to the bytes (for updates), and is shut until one begins.
        mapping.protect(PROT_READ)
    except (OSError, WeightsBroken):
        memory.close()
        raise
    return Loaded(
        memory=memory,
        mapping=mapping,
        layout=layout,
        chunks=chunks,
        digest=root_digest(chunks, nbytes),
        load_ms=watch.ms(),
        mb_per_s=nbytes / 1e6 / max(copied_ms / 1e3, 1e-9),
    )


def _room_or_refuse(model: str, nbytes: int) -> None:
    """A memfd has no memory until it is written, and then a full host answers with SIGBUS: ask first."""
    row = next(row for row in Path("/proc/meminfo").read_text().splitlines() if row.startswith("MemAvailable:"))
    free = int(row.split()[1]) << 10
    if nbytes > free:
        raise HostUnfit(
            f"model {model} needs {nbytes >> 20} MiB and the host has {free >> 20} MiB available",
            kept="nothing was allocated",
            remedy="free memory, or use a smaller model or dtype",
        )


def _copy_all(
    mapping: Mapping,
    tensors: dict[str, RawTensor],
    layout: tuple[TensorSpec, ...],
    nbytes: int,
    watch: Stopwatch,
    progress: Progress,
) -> None:
    target = np.frombuffer(mapping.buffer(), dtype=np.uint8)
    files = FileBytes()
    done = reported = 0
    for spec in layout:
        if spec.alias_of:
            continue
        raw = tensors[spec.name]
        source = np.frombuffer(files.of(raw), dtype=np.uint8)
        _copy(target[spec.offset : spec.offset + spec.nbytes], spec.dtype, source, raw.dtype)
        del source  # a live view would keep the file mapped
        done += spec.nbytes
        if done - reported >= _REPORT_EVERY or done == nbytes:
            reported = done
            progress(done, nbytes, done / 1e3 / max(watch.ms(), 1e-3))
    files.close()


def _copy(target: NDArray[np.uint8], to: str, source: NDArray[np.uint8], stored: str) -> None:
    if to == stored:
        target[:] = source
    elif (stored, to) == ("BF16", "F32"):
        np.left_shift(source.view("<u2"), 16, out=target.view("<u4"), dtype=np.uint32, casting="unsafe")
    elif (stored, to) == ("F16", "F32"):
        target.view("<f4")[:] = source.view("<f2")
    else:
        raise WeightsBroken(f"no exact conversion from {stored} to {to}")
