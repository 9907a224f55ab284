"""The writer of a new weight version: begin, write, commit or abort; one at a time per model.

Tensors come by the names of the model's files and land where the layout says. In mode "swap" the next version is
written beside the last one, which stays whole and readable whatever happens here; what is not written is copied over.
In mode "in_place" the bytes of the last version are overwritten while nobody may attach; a writer that dies leaves
TORN. A whole rewrite publishes a TORN model again; a part of one (a delta) is refused by the owner.

A model of several tensor-parallel ranks lies in as many parts. A writer has all of them, writes each tensor to every
part that holds a piece of it, and commits them by one message: the version is of all ranks or of none.

The digests of changed chunks are computed anew and those of the others are carried over; the owner hashes all of it
itself before it says that the version is sealed. So whatever instruction a writer dies at, a reader gets the last
version whole, the next one whole, or a refusal (promise R4). ``points`` names the places between two effects, and a
test kills a writer at each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from belayer.errors import BelayerError, Refused, WeightsBroken
from belayer.messages import owner as m
from belayer.messages.owner import TensorSpec
from gpuowner.attach import OwnerClient
from gpuowner.backends.driver import REAL
from gpuowner.digest import default_threads
from gpuowner.safetensors_file import read_model
from gpuowner.tensors import HostTensor, Sparse, host_tensor
from gpuowner.update_part import At, UpdatePart

# Where a writer can die, in order. "torn": inside the bytes of one tensor. Not every update passes every point.
POINTS = ("begun", "torn", "written", "rest_copied", "hashed", "unmapped", "commit_sent", "committed")
_OF_ALL = ("commit_sent", "committed")  # the others are passed for each part


def points(ranks: int) -> tuple[str, ...]:
    """``POINTS`` of an update of ``ranks`` parts: "hashed" is that of rank 0, "hashed.1" that of rank 1."""
    each = [_point(rank, name) for name in POINTS if name not in _OF_ALL for rank in range(ranks)]
    return (*each, *_OF_ALL)


def _point(rank: int, name: str) -> str:
    return f"{name}.{rank}" if rank else name


def begin_update(
    client: OwnerClient,
    model: str,
    *,
    mode: str = "",
    whole: bool = False,
    version: int | None = None,
    at: At | None = None,
    threads: int | None = None,
    driver: str = REAL,
) -> Update:
    """Become the one writer of ``model``'s next version. ``client`` has role loader and a time limit that is longer
    than hashing the model takes.

    ``mode``: "swap", "in_place", or "" for what the model is configured for. ``whole``: every tensor will be written.
    ``version``: the version to be made (the last plus one), None: whatever comes next. ``at`` is called at ``points``.
    ``driver``: where the owner keeps its weights on a GPU, which this process then maps them on.
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
    try:
        update = Update(client, grant, fds, whole=whole, at=at, threads=threads or default_threads(), driver=driver)
    except BelayerError:  # this process cannot write to such memory, and has not
        _refrain(client, grant)
        raise
    try:
        update.open_others()
    except BelayerError:
        update.abort()
        raise
    return update


def _refrain(client: OwnerClient, grant: m.UpdateGrant) -> None:
    aborted = m.AbortUpdate(
        model=grant.model, version=grant.version, owner_generation=grant.owner_generation, touched=False
    )
    client.call(aborted, m.WeightsInfo)


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
        self,
        client: OwnerClient,
        grant: m.UpdateGrant,
        fds: tuple[int, ...],
        *,
        whole: bool,
        at: At | None,
        threads: int,
        driver: str = REAL,
    ) -> None:
        self._driver = driver
        self._client, self._grant, self._whole, self._at, self._threads = client, grant, whole, at, threads
        self._parts: list[UpdatePart] = []
        self._open = True
        self._add(grant, fds)

    @property
    def version(self) -> int:
        return self._grant.version

    def open_others(self) -> None:
        """The parts of ranks 1 and up. Raises as the owner does, with the update open."""
        for rank in range(1, self._grant.ranks):
            asked = m.UpdatePart(
                model=self._grant.model,
                version=self._grant.version,
                owner_generation=self._grant.owner_generation,
                rank=rank,
            )
            self._add(*self._client.call(asked, m.UpdateGrant))

    def _add(self, grant: m.UpdateGrant, fds: tuple[int, ...]) -> None:
        at = None if self._at is None else _at_rank(self._at, grant.rank)
        self._parts.append(UpdatePart(grant, fds, at, self._threads, self._driver))
        self._reach(_point(grant.rank, "begun"))

    def _reach(self, point: str) -> None:
        if self._at is not None:
            self._at(point)

    # --- writing ---

    def write(self, tensors: Mapping[str, Any]) -> None:
        """Tensors by the names of the model's files: numpy arrays, torch tensors on the CPU, ``HostTensor``. Raises
        WeightsBroken naming the tensor that does not fit, before any byte of this call is written."""
        held = {name: host_tensor(name, value) for name, value in tensors.items()}
        self._same_where_tied(held)
        placed = [
            {name: part.layout.of(name, tensor.dtype, tensor.shape) for name, tensor in held.items()}
            for part in self._parts
        ]
        for part, places in zip(self._parts, placed, strict=True):
            part.write(held, places)

    def write_folder(self, folder: Path) -> None:
        """All tensors of a safetensors folder (one file, or shards with their index). Raises WeightsBroken before any
        byte is written when a file is broken or a tensor does not fit."""
        held = read_model(folder)
        tied = self._parts[0].layout.tied
        # vLLM, too, ignores a second copy of a tied matrix.
        tensors = {name: raw for name, raw in held.items() if tied.get(name) not in held}
        placed: list[dict[str, list[TensorSpec]]] = [
            {name: part.layout.of(name, raw.dtype, raw.shape) for name, raw in tensors.items()} for part in self._parts
        ]
        for part, places in zip(self._parts, placed, strict=True):
            part.write_files(tensors, places)

    def write_sparse(self, deltas: Mapping[str, Sparse]) -> None:
        """Single items of tensors; the others keep the last version's values. Raises as ``write``, and Refused where
        there is no last version to keep them from."""
        if self._whole:
            raise Refused("a whole rewrite takes whole tensors", remedy="begin the update with whole=False")
        for name, delta in deltas.items():
            self._write_items(name, delta)
        for part in self._parts:
            part.items_written()

    def _write_items(self, name: str, delta: Sparse) -> None:
        values = host_tensor(name, delta.values)
        indices = np.asarray(delta.indices, dtype=np.int64).reshape(-1)
        for part in self._parts:
            part.layout.items_of(name, values.dtype)
        total = max(part.layout.elements_of(name) for part in self._parts)
        if indices.size != values.flat.size or (indices.size and not 0 <= indices.min() <= indices.max() < total):
            raise WeightsBroken(
                f"{name} has {total} items; {indices.size} indices for {values.flat.size} values do not fit"
            )
        for part in self._parts:
            part.write_items(name, values, indices)

    def _same_where_tied(self, held: Mapping[str, HostTensor]) -> None:
        tied = self._parts[0].layout.tied
        for name, tensor in held.items():
            first = tied.get(name)
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
            missing = sorted({name for part in self._parts for name in part.layout.sources - part.sources})
            if missing:
                raise Refused(f"{len(missing)} tensors were not written, {missing[0]} first", kept="the update is open")
        for part in self._parts:
            part.copy_rest()
        digests = [part.hashed() for part in self._parts]
        for part in self._parts:
            part.unmap()
        asked = m.CommitUpdate(
            model=self._grant.model,
            version=self._grant.version,
            owner_generation=self._grant.owner_generation,
            chunk_digests=digests[0].chunk_digests,
            digest=digests[0].digest,
            others=tuple(digests[1:]),
        )
        info, _ = self._client.call(asked, m.WeightsInfo, sent=lambda: self._reach("commit_sent"))
        self._open = False
        self._reach("committed")
        return info

    def abort(self) -> m.WeightsInfo:
        """Give up. swap: the last version stays. in_place: TORN if a byte was written."""
        for part in self._parts:
            part.let_go()
        self._open = False
        asked = m.AbortUpdate(
            model=self._grant.model,
            version=self._grant.version,
            owner_generation=self._grant.owner_generation,
            touched=any(part.touched for part in self._parts),
        )
        info, _ = self._client.call(asked, m.WeightsInfo)
        return info

    def __enter__(self) -> Update:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._open:
            self.abort()


def _at_rank(at: At, rank: int) -> Callable[[str], None]:
    return lambda name: at(_point(rank, name))
