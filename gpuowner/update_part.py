"""One part of a version being written: the memory of one tensor-parallel rank, or of a model that lies in one.

It knows which bytes are of the new version, so that the rest can be copied from the last one and only changed chunks
are hashed. What belongs to all parts (which tensors, the commit) is ``gpuowner.update``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from belayer.messages import owner as m
from belayer.messages.owner import TensorSpec
from gpuowner.attach import layout_from
from gpuowner.backends.driver import REAL
from gpuowner.copying import Files, Job, Sink, all_chunks, array_jobs, file_jobs, run_jobs, widened
from gpuowner.digest import CHUNK, root_digest
from gpuowner.parts import Parts, complement
from gpuowner.safetensors_file import ITEM_BYTES, RawTensor
from gpuowner.targets import target_for
from gpuowner.tensors import HostTensor

At = Callable[[str], None]


class UpdatePart:
    """``fds``: of the grant, ours from now on. ``at`` is called at the points of this part. ``driver``: of GPU memory,
    where the grant is of some."""

    def __init__(
        self, grant: m.UpdateGrant, fds: tuple[int, ...], at: At | None, threads: int, driver: str = REAL
    ) -> None:
        self.grant, self._at, self._threads = grant, at or _nobody, threads
        rest = list(fds[1:])
        base_fd = rest.pop(0) if grant.has_base else -1
        self._has_base = grant.has_base
        self.layout = Parts(grant.layout or layout_from(rest[0]))
        for fd in rest:
            os.close(fd)
        self._target = target_for(grant, fds[0], base_fd, driver)
        self._sink: Sink = self._target.sink if at is None else _Torn(self._target.sink, at)
        self._written: list[tuple[int, int]] = []  # byte ranges that are of the new version
        self.sources: set[str] = set()  # tensors of the files that were written whole
        self._primed: set[str] = set()

    @property
    def touched(self) -> bool:
        return bool(self._written)

    # --- writing ---

    def write(self, held: Mapping[str, HostTensor], places: Mapping[str, list[TensorSpec]]) -> None:
        """``places``: where each tensor lies in this part."""
        jobs: list[Job] = []
        for name, tensor in held.items():
            self._prime(places[name])
            for spec in places[name]:
                jobs.extend(array_jobs(spec, tensor.flat, tensor.dtype))
        self._run(jobs, held)

    def write_files(self, tensors: Mapping[str, RawTensor], places: Mapping[str, list[TensorSpec]]) -> None:
        specs = [spec for name in tensors for spec in places[name]]
        self._prime(specs)
        files = Files()
        try:
            renamed = {spec.source: tensors[name] for name in tensors for spec in places[name]}
            self._run(list(file_jobs(specs, renamed, files)), tensors)
        finally:
            files.close()

    def write_items(self, name: str, values: HostTensor, indices: NDArray[np.int64]) -> None:
        """Items of ``name``, counted in C order; those of other parts are left out."""
        specs = self.layout.items_of(name, values.dtype)
        self._prime(specs, always=True)
        for spec in specs:
            item = ITEM_BYTES[spec.dtype]
            at, which = self.layout.place_items(name, spec, indices)
            bits = widened(values.flat[which], values.dtype, spec.dtype)
            end = spec.offset + item * (int(at.max()) + 1) if at.size else spec.offset
            self._target.put_items(spec.offset, end, at, bits)
            self._mark(spec)

    def items_written(self) -> None:
        self._at("written")

    def _run(self, jobs: list[Job], given: Iterable[str]) -> None:
        run_jobs(jobs, self._sink, self._threads, lambda *_: None, None, ())
        for name in given:
            for spec in self.layout.parts(name):
                self._mark(spec)
                self.sources.add(spec.source)
        self._at("written")

    def _mark(self, spec: TensorSpec) -> None:
        if spec.strides:
            spec = self.layout.whole(spec)  # primed: its other items are the base's
        self._written.append((spec.offset, spec.offset + spec.nbytes))

    def _prime(self, specs: Iterable[TensorSpec], *, always: bool = False) -> None:
        """Before items are written with gaps between them: the rest of that tensor comes from the base."""
        for spec in specs:
            whole = self.layout.whole(spec)
            if not (spec.strides or always) or whole.name in self._primed or not self._has_base:
                continue
            self._primed.add(whole.name)
            fresh = complement(self._written, whole.offset, whole.offset + whole.nbytes)
            self._copy_base(fresh)
            self._written.extend(fresh)

    def _copy_base(self, ranges: list[tuple[int, int]]) -> None:
        self._target.copy(ranges, self._sink, self._threads)

    # --- the end ---

    def copy_rest(self) -> None:
        if self._has_base:
            self._copy_base(complement(self._written, 0, self.grant.nbytes))
            self._at("rest_copied")

    def hashed(self) -> m.PartDigests:
        """Of all chunks: computed where something was written, carried from the last version elsewhere."""
        known = self.grant.chunk_digests
        touched = {chunk for start, end in self._written for chunk in range(start // CHUNK, -(-end // CHUNK))}
        todo = [chunk for chunk in all_chunks(self.grant.nbytes) if chunk in touched or not known]
        fresh = self._target.digests(todo, self._threads)
        chunks = tuple(fresh[chunk] if chunk in fresh else known[chunk] for chunk in all_chunks(self.grant.nbytes))
        self._at("hashed")
        return m.PartDigests(chunk_digests=chunks, digest=root_digest(chunks, self.grant.nbytes))

    def unmap(self) -> None:
        self.let_go()
        self._at("unmapped")

    def let_go(self) -> None:
        """A writable mapping that is left would keep the owner from sealing."""
        self._target.close()


def _nobody(point: str) -> None:
    """Nobody waits at the points outside the tests."""


class _Torn:
    """Stops once in the middle of a tensor's bytes."""

    def __init__(self, sink: Sink, at: At) -> None:
        self._sink, self._at, self._done = sink, at, False

    def write(self, offset: int, data: memoryview) -> None:
        if self._done or len(data) < 2:
            self._sink.write(offset, data)
            return
        self._done, half = True, len(data) // 2
        self._sink.write(offset, data[:half])
        self._at("torn")
        self._sink.write(offset + half, data[half:])
