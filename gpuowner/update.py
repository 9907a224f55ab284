"""The writer of a new weight version: begin, write, commit or abort; one at a time per model.

Tensors come by the names of the model's files and land where the layout says. In mode "swap" the next version is
written beside the last one, which stays whole and readable whatever happens here; what is not written is copied over.
In mode "in_place" the bytes of the last version are overwritten while nobody may attach; a writer that dies leaves
TORN. A whole rewrite publishes a TORN model again; a part of one (a delta) is refused by the owner.

The digests of changed chunks are computed anew and those of the others are carried over; the owner hashes all of it
itself before it says that the version is sealed. So whatever instruction a writer dies at, a reader gets the last
version whole, the next one whole, or a refusal (promise R4). ``POINTS`` names the places between two effects, and a
test kills a writer at each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from belayer.errors import Refused, WeightsBroken
from belayer.messages import owner as m
from gpuowner.attach import OwnerClient, layout_from
from gpuowner.copying import (
    Files,
    Job,
    Sink,
    all_chunks,
    array_jobs,
    base_jobs,
    default_threads,
    file_jobs,
    run_jobs,
    sink_for,
    widened,
)
from gpuowner.digest import CHUNK, digests_of, root_digest
from gpuowner.parts import Parts, complement
from gpuowner.safetensors_file import ITEM_BYTES, read_model
from gpuowner.tensors import HostTensor, Sparse, host_tensor
from gpuowner.vmem import MAP_NORESERVE, MAP_SHARED, PROT_READ, PROT_WRITE
from gpuowner.vmem import Mapping as Memory

# Where a writer can die, in order. "torn": inside the bytes of one tensor. Not every update passes every point.
POINTS = ("begun", "torn", "written", "rest_copied", "hashed", "unmapped", "commit_sent", "committed")

At = Callable[[str], None]


def _on(point: str) -> None:
    """Nobody waits at the points outside the tests."""


def begin_update(
    client: OwnerClient,
    model: str,
    *,
    mode: str = "",
    whole: bool = False,
    version: int | None = None,
    at: At = _on,
    threads: int | None = None,
) -> Update:
    """Become the one writer of ``model``'s next version. ``client`` has role loader and a time limit that is longer
    than hashing the model takes.

    ``mode``: "swap", "in_place", or "" for what the model is configured for. ``whole``: every tensor will be written.
    ``version``: the version to be made (the last plus one), None: whatever comes next. ``at`` is called at ``POINTS``.
    Raises Fenced (another version is the last one), Refused (there is a writer), WeightsTorn (only a whole rewrite).
    """
    last = version - 1 if version is not None else _last(client, model)
    asked = m.BeginUpdate(
        model=model,
        from_version=last,
        owner_generation=client.welcome.owner_generation,
        mode=mode,
        whole=whole,
    )
    grant, fds = client.call(asked, m.UpdateGrant)
    update = Update(client, grant, fds, whole=whole, at=at, threads=threads or default_threads())
    at("begun")
    return update


def _last(client: OwnerClient, model: str) -> int:
    status, _ = client.call(m.OwnerStatus(), m.OwnerStatusReply)
    row = next((row for row in status.weights if row.model == model), None)
    if row is None:
        raise WeightsBroken(
            f"no model named {model!r} here", remedy=f"one of {sorted(r.model for r in status.weights)}"
        )
    return row.version


class Update:
    """An update that has begun. As a context manager it aborts on an exception."""

    def __init__(
        self, client: OwnerClient, grant: m.UpdateGrant, fds: tuple[int, ...], *, whole: bool, at: At, threads: int
    ) -> None:
        self._client, self.grant, self._whole, self._at, self._threads = client, grant, whole, at, threads
        self._fd, rest = fds[0], list(fds[1:])
        self._base_fd = rest.pop(0) if grant.has_base else -1
        layout = grant.layout or layout_from(rest[0])
        for fd in rest:
            os.close(fd)
        self.parts = Parts(layout)
        self._mapping: Memory | None = None
        self._sink = self._make_sink()
        self._written: list[tuple[int, int]] = []  # byte ranges that are of the new version
        self._sources: set[str] = set()
        self._primed: set[str] = set()
        self._open = True

    @property
    def version(self) -> int:
        return self.grant.version

    # --- writing ---

    def write(self, tensors: Mapping[str, Any]) -> None:
        """Tensors by the names of the model's files: numpy arrays, torch tensors on the CPU, ``HostTensor``. Raises
        WeightsBroken naming the tensor that does not fit, before any byte of this call is written."""
        held = {name: host_tensor(name, value) for name, value in tensors.items()}
        self._same_where_tied(held)
        jobs: list[Job] = []
        for name, tensor in held.items():
            specs = self.parts.of(name, tensor.dtype, tensor.shape)
            self._prime(specs)
            for spec in specs:
                jobs.extend(array_jobs(spec, tensor.flat, tensor.dtype))
        self._run(jobs, held)

    def write_folder(self, folder: Path) -> None:
        """All tensors of a safetensors folder (one file, or shards with their index). Raises WeightsBroken before any
        byte is written when a file is broken or a tensor does not fit."""
        held = read_model(folder)
        # vLLM, too, ignores a second copy of a tied matrix.
        tensors = {name: raw for name, raw in held.items() if self.parts.tied.get(name) not in held}
        specs = []
        for name, raw in tensors.items():
            specs.extend(self.parts.of(name, raw.dtype, raw.shape))
        self._prime(specs)
        files = Files()
        try:
            renamed = {spec.source: tensors[name] for name in tensors for spec in self.parts.parts(name)}
            self._run(list(file_jobs(specs, renamed, files)), tensors)
        finally:
            files.close()

    def write_sparse(self, deltas: Mapping[str, Sparse]) -> None:
        """Single items of tensors; the others keep the last version's values. Raises as ``write``, and Refused where
        there is no last version to keep them from."""
        if self._whole:
            raise Refused("a whole rewrite takes whole tensors", remedy="begin the update with whole=False")
        for name, delta in deltas.items():
            self._write_items(name, delta)
        self._at("written")

    def _write_items(self, name: str, delta: Sparse) -> None:
        values = host_tensor(name, delta.values)
        indices = np.asarray(delta.indices, dtype=np.int64).reshape(-1)
        specs = self.parts.items_of(name, values.dtype)
        total = self.parts.elements_of(name)
        if indices.size != values.flat.size or (indices.size and not 0 <= indices.min() <= indices.max() < total):
            raise WeightsBroken(
                f"{name} has {total} items; {indices.size} indices for {values.flat.size} values do not fit"
            )
        self._prime(specs, always=True)
        view = np.frombuffer(self._writable().buffer(), dtype=np.uint8)
        for spec in specs:
            item = ITEM_BYTES[spec.dtype]
            at, which = self.parts.place_items(name, spec, indices)
            bits = widened(values.flat[which], values.dtype, spec.dtype)
            end = spec.offset + item * (int(at.max()) + 1) if at.size else spec.offset
            view[spec.offset : end].view(bits.dtype)[at] = bits
            self._mark(spec)

    def _run(self, jobs: list[Job], given: Iterable[str]) -> None:
        run_jobs(jobs, self._sink, self._threads, lambda *_: None, None, ())
        for name in given:
            for spec in self.parts.parts(name):
                self._mark(spec)
                self._sources.add(spec.source)
        self._at("written")

    def _mark(self, spec: m.TensorSpec) -> None:
        if spec.strides:
            spec = self.parts.whole(spec)  # primed: its other items are the base's
        self._written.append((spec.offset, spec.offset + spec.nbytes))

    def _prime(self, specs: Iterable[m.TensorSpec], *, always: bool = False) -> None:
        """Before items are written with gaps between them: the rest of that tensor comes from the base."""
        for spec in specs:
            whole = self.parts.whole(spec)
            if not (spec.strides or always) or whole.name in self._primed or self._base_fd < 0:
                continue
            self._primed.add(whole.name)
            fresh = complement(self._written, whole.offset, whole.offset + whole.nbytes)
            self._copy_base(fresh)
            self._written.extend(fresh)

    def _copy_base(self, ranges: list[tuple[int, int]]) -> None:
        base = Memory(self._base_fd, self.grant.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
        try:
            run_jobs(base_jobs(ranges, base), self._sink, self._threads, lambda *_: None, None, ())
        finally:
            base.close()

    def _same_where_tied(self, held: Mapping[str, HostTensor]) -> None:
        for name, tensor in held.items():
            first = self.parts.tied.get(name)
            other = held.get(first) if first else None
            if other is not None and not (other.dtype == tensor.dtype and np.array_equal(other.flat, tensor.flat)):
                raise WeightsBroken(
                    f"{name} and {first} are one tensor in the engine, and the update gives them different values",
                    kept="nothing of this call was written",
                    remedy="give one of the two, or untie them in the model's configuration",
                )

    # --- the end ---

    def commit(self) -> m.WeightsInfo:
        """Copy what was not written, hash what changed, and publish. Raises Refused (whole, and a tensor is missing)
        with the update open, WeightsBroken (the owner read other bytes than we wrote) with it over."""
        if self._whole:
            missing = sorted(self.parts.sources - self._sources)
            if missing:
                raise Refused(f"{len(missing)} tensors were not written, {missing[0]} first", kept="the update is open")
        if self._base_fd >= 0:
            self._copy_base(complement(self._written, 0, self.grant.nbytes))
            self._at("rest_copied")
        chunks = self._digests()
        self._at("hashed")
        self._let_go()
        self._at("unmapped")
        asked = m.CommitUpdate(
            model=self.grant.model,
            version=self.grant.version,
            owner_generation=self.grant.owner_generation,
            chunk_digests=chunks,
            digest=root_digest(chunks, self.grant.nbytes),
        )
        info, _ = self._client.call(asked, m.WeightsInfo, sent=lambda: self._at("commit_sent"))
        self._open = False
        self._at("committed")
        return info

    def abort(self) -> m.WeightsInfo:
        """Give up. swap: the last version stays. in_place: TORN if a byte was written."""
        self._let_go()
        self._open = False
        asked = m.AbortUpdate(
            model=self.grant.model,
            version=self.grant.version,
            owner_generation=self.grant.owner_generation,
            touched=bool(self._written),
        )
        info, _ = self._client.call(asked, m.WeightsInfo)
        return info

    def _digests(self) -> tuple[bytes, ...]:
        """Of all chunks: computed where something was written, carried from the last version elsewhere."""
        known = self.grant.chunk_digests
        touched = {chunk for start, end in self._written for chunk in range(start // CHUNK, -(-end // CHUNK))}
        todo = [chunk for chunk in all_chunks(self.grant.nbytes) if chunk in touched or not known]
        memory = Memory(self._fd, self.grant.nbytes, PROT_READ, MAP_SHARED | MAP_NORESERVE)
        try:
            view = memoryview(memory.buffer()).cast("B")
            fresh = dict(zip(todo, digests_of(view, todo, self._threads), strict=True))
        finally:
            memory.close()
        return tuple(fresh[chunk] if chunk in fresh else known[chunk] for chunk in all_chunks(self.grant.nbytes))

    def _make_sink(self) -> Sink:
        sink = sink_for(self._fd, self._writable)
        return sink if self._at is _on else _Torn(sink, self._at)

    def _writable(self) -> Memory:
        if self._mapping is None:
            flags = MAP_SHARED | MAP_NORESERVE
            self._mapping = Memory(self._fd, self.grant.nbytes, PROT_READ | PROT_WRITE, flags)
        return self._mapping

    def _let_go(self) -> None:
        """A writable mapping that is left would keep the owner from sealing."""
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
        for fd in (self._fd, self._base_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._base_fd = -1

    def __enter__(self) -> Update:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._open:
            self.abort()


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
