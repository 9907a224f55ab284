"""A model as its owner holds it: where it comes from, the bytes of a version, who reads and who writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from belayer.messages import owner as m
from gpuowner import core
from gpuowner.backends.choice import CUDA_VMM, MEMFD
from gpuowner.backends.device_memory import DeviceMemory
from gpuowner.backends.driver import REAL
from gpuowner.backends.memfd import Memfd
from gpuowner.backends.port import WeightsMemory
from gpuowner.device_loader import load_to_device
from gpuowner.digest import Told, nobody
from gpuowner.keeping import resident
from gpuowner.ledger import WeightsRow
from gpuowner.loader import Loaded, Progress, load, room_or_refuse

SWAP, IN_PLACE = "swap", "in_place"


@dataclass(frozen=True)
class Source:
    """What the configuration says of a model; a client never names a path. ``kept``: where vLLM's answers about its
    layout are kept, None for the usual place. ``memory``: as in [gpuowner]; ``driver``: of GPU memory."""

    folder: Path
    dtype: str
    update: str = SWAP
    huge_pages: str = "off"
    ranks: int = 1
    kept: Path | None = None
    memory: str = MEMFD
    driver: str = REAL

    def text(self) -> str:
        """Differs when the configuration asks for other bytes or another kind of memory."""
        parts = f" tp{self.ranks}" if self.ranks > 1 else ""
        parts += "" if self.memory == MEMFD else f" {self.memory}"
        return f"{self.folder} {self.dtype} {self.update} {self.huge_pages}{parts}"

    def load(self, model: str, progress: Progress, rank: int = 0) -> Loaded:
        """The part of tensor-parallel rank ``rank``; all of it when there is one rank."""
        if self.memory == CUDA_VMM:
            return load_to_device(
                model, self.folder, self.dtype, progress, driver=self.driver, kept=self.kept, rank=rank,
                ranks=self.ranks,
            )  # fmt: skip
        return load(
            model, self.folder, self.dtype, progress, seal=self.update == SWAP, huge_pages=self.huge_pages,
            kept=self.kept, rank=rank, ranks=self.ranks,
        )  # fmt: skip

    def stage(self, label: str, nbytes: int) -> WeightsMemory:
        """Memory for the next version, beside the last one. Raises HostUnfit or Refused: there is no room."""
        if self.memory == CUDA_VMM:
            return DeviceMemory.create(self.driver, 0, nbytes)
        return Memfd(label, nbytes, self.huge_pages)

    def adopt(self, fd: int, nbytes: int) -> WeightsMemory:
        """Memory of an earlier life. Raises OSError when it cannot be that."""
        if self.memory == CUDA_VMM:
            return DeviceMemory(nbytes, fd, self.driver)
        return Memfd.adopt(fd, nbytes)

    def room_or_refuse(self, model: str, nbytes: int) -> None:
        """Raises HostUnfit. A GPU says by itself that it has no room, before anything is written."""
        if self.memory == MEMFD:
            room_or_refuse(model, nbytes)


@dataclass(frozen=True)
class Version:
    """One version in memory. ``name``: in the store, "" while it is only being written."""

    memory: WeightsMemory
    name: str
    layout: tuple[m.TensorSpec, ...]
    chunks: tuple[bytes, ...]
    digest: str
    from_files: bool = False
    load_ms: float = 0.0
    mb_per_s: float = 0.0

    def difference(self, told: Told = nobody) -> int | None:
        """Hash everything; the first chunk that differs from its digest, or None. Slow: for a thread."""
        return self.memory.difference(self.chunks, told)


@dataclass(frozen=True)
class Job:
    """Slow work of a request. ``work`` runs in a thread and touches no state; ``finish`` takes its result in the
    loop and makes the reply (or raises)."""

    work: Callable[[], object]
    finish: Callable[[object], m.WeightsInfo]


@dataclass
class ModelEntry:
    """One part of a model. ``readers``: connection -> process and the version that it maps. ``next``: being written
    (swap). ``carried``: digests of the last version's chunks, where they were whole when the update began."""

    weights: core.Weights
    rank: int
    source: Source
    version: Version | None = None
    next: Version | None = None
    writer: str = ""
    carried: tuple[bytes, ...] = ()
    readers: dict[int, m.ReaderInfo] = field(default_factory=dict)

    def info(self) -> m.WeightsInfo:
        now = self.version
        return m.WeightsInfo(
            model=self.weights.model,
            state=self.weights.state.value,
            version=self.weights.version,
            nbytes=self.weights.nbytes,
            digest=now.digest if now else "",
            readers=tuple(sorted(self.readers.values(), key=lambda row: (row.who, row.pid))),
            load_ms=now.load_ms if now else 0.0,
            load_mb_s=now.mb_per_s if now else 0.0,
            owner_generation=self.weights.owner,
            writer=self.writer,
            staging=resident(self.next.memory) if self.next else 0,
            resident=resident(now.memory) if now else 0,
            reason=self.weights.reason,
            rank=self.rank,
        )

    def row(self) -> WeightsRow:
        now, state = self.version, self.weights
        return WeightsRow(
            model=state.model,
            rank=self.rank,
            nbytes=state.nbytes,
            memory=now.name if now else "",
            state=state.state,
            version=state.version,
            whole=state.whole,
            from_files=now.from_files if now else False,
            in_place=state.in_place,
            reason=state.reason,
            layout=now.layout if now else (),
            chunks=now.chunks if now else (),
            digest=now.digest if now else "",
            load_ms=now.load_ms if now else 0.0,
            mb_per_s=now.mb_per_s if now else 0.0,
            source=self.source.text(),
        )
