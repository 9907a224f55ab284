"""Bringing a model from disk into the owner's memory: the only slow thing that an owner does.

All headers are read and checked, and every conversion and place is decided, before memory is allocated, so that a
broken folder costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from belayer.clock import Stopwatch
from belayer.errors import BelayerError, HostUnfit, WeightsBroken
from belayer.messages.owner import TensorSpec
from belayer.paths import Paths
from gpuowner import hugepages, recipes
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.port import WeightsMemory
from gpuowner.copying import Files, Progress, all_chunks, file_jobs, run_jobs, sink_for
from gpuowner.digest import default_threads, root_digest
from gpuowner.layout import place
from gpuowner.safetensors_file import RawTensor, read_model
from gpuowner.vmem import PROT_READ, Mapping

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "auto": "", "": ""}

__all__ = ["DTYPES", "Loaded", "Progress", "load"]


@dataclass(frozen=True)
class Loaded:
    """A model in memory, hashed and sealed. ``mapping`` is the owner's own, now read-only; None where the owner cannot
    map it. ``mb_per_s``: reading, converting and hashing together."""

    memory: WeightsMemory
    mapping: Mapping | None
    layout: tuple[TensorSpec, ...]
    chunks: tuple[bytes, ...]
    digest: str
    load_ms: float
    mb_per_s: float

    def unmap(self) -> None:
        if self.mapping is not None:
            self.mapping.close()

    def drop(self) -> None:
        """Nothing is kept."""
        self.unmap()
        self.memory.close()


class LaidOut(NamedTuple):
    """What is in a model's files, and where it goes; nothing is allocated yet."""

    tensors: dict[str, RawTensor]
    layout: tuple[TensorSpec, ...]
    nbytes: int


def lay_out(model: str, folder: Path, dtype: str, kept: Path | None, rank: int, ranks: int) -> LaidOut:
    """As ``load``. Raises WeightsBroken."""
    if dtype not in DTYPES:
        raise WeightsBroken(f"model {model}: unknown dtype {dtype!r}", remedy=f"one of {sorted(filter(None, DTYPES))}")
    tensors = read_model(folder)
    kept = kept if kept is not None else Paths().state / "recipes"
    recipe = recipes.find(folder, tensors, dtype, kept, rank, ranks)
    layout, nbytes = place(recipe, tensors, DTYPES[dtype])
    if nbytes == 0:
        raise WeightsBroken(f"model {model}: {folder} holds no tensor", kept="nothing was sealed")
    return LaidOut(tensors, layout, nbytes)


def load(
    model: str,
    folder: Path,
    dtype: str,
    progress: Progress,
    *,
    kept: Path | None = None,
    threads: int | None = None,
    huge_pages: str = "off",
    seal: bool = True,
    rank: int = 0,
    ranks: int = 1,
) -> Loaded:
    """Load, hash and seal. ``kept``: where answers of vLLM about layouts are kept (default: the host's state folder).
    ``huge_pages``: as in ``gpuowner.hugepages``. ``seal``: False for a model that is updated in place, by writers
    that the owner lets in. ``rank`` of ``ranks``: whose part of each tensor (tensor parallel) is loaded.

    Raises WeightsBroken with nothing allocated or sealed, HostUnfit or OSError when memory is short.
    """
    watch = Stopwatch()
    tensors, layout, nbytes = lay_out(model, folder, dtype, kept, rank, ranks)
    nbytes = hugepages.rounded(nbytes, huge_pages)
    room_or_refuse(model, nbytes)
    memory = Memfd(f"weights-{model}" + (f"-{rank}" if ranks > 1 else ""), nbytes, huge_pages)
    files = Files()
    try:
        mapping = memory.map_writable()
        jobs = list(file_jobs(layout, tensors, files))
        sink = sink_for(memory.fd, lambda: mapping, huge_pages)
        begun = watch.ms()
        view = memoryview(mapping.buffer()).cast("B")[:nbytes]
        digests = run_jobs(jobs, sink, threads or default_threads(), progress, view, all_chunks(nbytes))
        chunks = tuple(digests[index] for index in all_chunks(nbytes))
        hugepages.proven(mapping.address, huge_pages)
        if seal:
            memory.seal_writes()
        # The owner's mapping stays the only door to the bytes (for updates), and is shut until one begins.
        mapping.protect(PROT_READ)
    except (OSError, BelayerError):
        memory.close()
        raise
    finally:
        files.close()
    return Loaded(
        memory=memory,
        mapping=mapping,
        layout=layout,
        chunks=chunks,
        digest=root_digest(chunks, nbytes),
        load_ms=watch.ms(),
        mb_per_s=nbytes / 1e6 / max((watch.ms() - begun) / 1e3, 1e-9),
    )


def room_or_refuse(model: str, nbytes: int) -> None:
    """A memfd has no memory until it is written, and then a full host answers with SIGBUS: ask first."""
    row = next(row for row in Path("/proc/meminfo").read_text().splitlines() if row.startswith("MemAvailable:"))
    free = int(row.split()[1]) << 10
    if nbytes > free:
        raise HostUnfit(
            f"model {model} needs {nbytes >> 20} MiB and the host has {free >> 20} MiB available",
            kept="nothing was allocated",
            remedy="free memory, or use a smaller model or dtype",
        )
