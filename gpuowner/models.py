"""Models: the bytes of their versions, their readers and their one writer, by the states of ``core``.

An update writes the next version beside the last one and swaps them at the commit ("swap"), or overwrites it
("in_place"). Either way the owner hashes the bytes itself before a version is called sealed: a version is what was
read back, never what a writer says. Persist before tell: the memory is in the store before the ledger names it, the
ledger says UPDATING before a writer has the descriptor, and SEALED before anybody hears of the version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from belayer.errors import BelayerError, HostUnfit, Refused, WeightsBroken, WeightsTorn
from belayer.messages import owner as m
from gpuowner import core
from gpuowner.backends.memfd import Memfd
from gpuowner.digest import root_digest
from gpuowner.keeping import Caller, Keeping, Key
from gpuowner.ledger import WeightsRow
from gpuowner.loader import Loaded, Progress, room_or_refuse
from gpuowner.version import IN_PLACE, SWAP, Job, ModelEntry, Source, Version


class Models:
    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping
        self.entries: dict[Key, ModelEntry] = {}

    # --- loading ---

    def load(
        self, model: str, rank: int, source: Source, progress: Progress, last: WeightsRow | None = None
    ) -> ModelEntry:
        """BUILDING to SEALED. ``last``: the row of an earlier life whose memory is lost. Where its version came from an
        update and the files hold other bytes, the model ends TORN, under the lost version's number: old bytes must not
        pass for it. Raises WeightsBroken with the model left TORN and nothing allocated."""
        version = last.version if last else 0
        weights = core.Weights(model=model, nbytes=0, version=version, owner=self._keeping.generation)
        entry = self.entries[model, rank] = ModelEntry(weights, rank, source)
        try:
            loaded = source.load(model, progress, rank)
        except BelayerError as why:
            entry.weights = core.weights_step(entry.weights, core.BuildFailed(reason=why.message))
            raise
        same = last is not None and last.whole and last.digest == loaded.digest
        self._built(
            entry, loaded, version if same else version + 1, lost=bool(last and not last.from_files and not same)
        )
        return entry

    def _built(self, entry: ModelEntry, loaded: Loaded, number: int, *, lost: bool = False) -> None:
        """The bytes of the files as version ``number``; ``lost``: they only show how the tensors of a lost one lie."""
        loaded.mapping.close()
        if entry.source.update == SWAP:
            loaded.memory.seal_for_ever()
        event: core.WeightsEvent = core.Built(version=number)
        if lost:
            event = core.BuildFailed(reason="their last version was lost, and the files hold other bytes than it had")
        after = core.weights_step(replace(entry.weights, nbytes=loaded.memory.nbytes), event)
        name = self._keeping.keep(_label(entry), loaded.memory.fd)
        version = Version(
            memory=loaded.memory, name=name, layout=loaded.layout, chunks=loaded.chunks, digest=loaded.digest,
            from_files=True, load_ms=loaded.load_ms, mb_per_s=loaded.mb_per_s,
        )  # fmt: skip
        try:
            self._take(entry, version, after)
        except OSError:
            loaded.memory.close()
            raise

    def _take(self, entry: ModelEntry, version: Version, after: core.Weights) -> None:
        """``version``, kept in the store, is the model's from now on, and the last one is let go. Raises OSError with
        the model as it was when that cannot be written down."""
        before, old = entry.weights, entry.version
        entry.weights, entry.version = after, version
        try:
            self._keeping.save()
        except OSError:
            entry.weights, entry.version = before, old
            if old is None or old.name != version.name:
                self._keeping.drop(version.name)
            raise
        if old is not None and old.memory is not version.memory:
            self._discard(old)

    def adopt(self, row: WeightsRow, fd: int, source: Source) -> ModelEntry:
        """A model of the last life, all of it hashed. Raises OSError when the descriptor is not that memory. Not
        persisted yet."""
        version = Version(
            memory=Memfd.adopt(fd, row.nbytes),
            name=row.memory,
            layout=row.layout,
            chunks=row.chunks,
            digest=row.digest,
            from_files=row.from_files,
            load_ms=row.load_ms,
            mb_per_s=row.mb_per_s,
        )
        before = core.Weights(
            model=row.model, nbytes=row.nbytes, state=row.state, version=row.version, whole=row.whole,
            in_place=row.in_place, reason=row.reason,
        )  # fmt: skip
        intact = row.whole and version.difference() is None
        after = core.weights_step(before, core.WeightsAdopted(owner=self._keeping.generation, intact=intact))
        entry = self.entries[row.model, row.rank] = ModelEntry(after, row.rank, source, version)
        return entry

    # --- readers ---

    def entry(self, model: str, rank: int) -> ModelEntry:
        if (model, rank) not in self.entries:
            known = sorted({name for name, _ in self.entries})
            raise WeightsBroken(f"no model named {model[:64]!r} rank {rank} here", remedy=f"one of {known}")
        return self.entries[model, rank]

    def attach(self, model: str, rank: int, by: Caller) -> tuple[m.WeightsGrant, int]:
        """Grant and a read-only descriptor. Raises WeightsBroken (unknown model) or WeightsTorn."""
        entry = self.entry(model, rank)
        version = self._whole(entry)
        fd = version.memory.reader_fd()
        entry.readers[by.peer] = m.ReaderInfo(who=by.who, pid=by.pid, version=entry.weights.version)
        grant = m.WeightsGrant(
            model=model,
            version=entry.weights.version,
            owner_generation=self._keeping.generation,
            nbytes=version.memory.nbytes,
            layout=version.layout,
            chunk_digests=version.chunks,
            digest=version.digest,
            rank=rank,
        )
        return grant, fd

    def rejoin(self, asked: m.RejoinWeights, by: Caller) -> m.WeightsInfo:
        """Count a reader again that has mapped ``asked.version`` since before this life."""
        entry = self.entry(asked.model, asked.rank)
        holds = core.Stamp(self._keeping.generation, asked.version)
        core.gate(f"version of {asked.model}", holds, core.Stamp(asked.owner_generation, asked.version))
        version = self._whole(entry)
        known = asked.version < entry.weights.version  # an older one, left behind by a swap
        if not known and (asked.version, asked.digest) != (entry.weights.version, version.digest):
            raise WeightsBroken(
                f"{asked.model} v{asked.version} has digest {version.digest[:12]} here, {asked.digest[:12]} there",
                kept="the reader's mapping, which is that of a lost life",
                remedy="fence that worker; a new one attaches to what is here",
            )
        entry.readers[by.peer] = m.ReaderInfo(who=by.who, pid=by.pid, version=asked.version)
        return entry.info()

    @staticmethod
    def _whole(entry: ModelEntry) -> Version:
        core.readable(entry.weights)
        if entry.version is None:
            raise BelayerError(f"weights of {entry.weights.model} are sealed without memory")
        return entry.version

    # --- the writer ---

    def begin(self, asked: m.BeginUpdate, by: Caller) -> tuple[m.UpdateGrant, tuple[int, ...]]:
        """The descriptor to write, and of the last version where it is whole and elsewhere. Raises Fenced,
        WeightsTorn, HostUnfit (no room for a second copy) or Refused."""
        entry = self.entry(asked.model, asked.rank)
        _one_rank_or_refuse(entry)
        mode = asked.mode or entry.source.update
        event = core.UpdateBegun(
            stamp=core.Stamp(asked.owner_generation, asked.from_version),
            peer=by.peer, in_place=mode == IN_PLACE, rewrite=asked.whole,
        )  # fmt: skip
        after = core.weights_step(entry.weights, event)
        version = entry.version
        if version is None:
            raise WeightsTorn(
                f"weights of {asked.model}: no memory of theirs is left to say how they lie",
                remedy="republish them from their files first",
            )
        fds = self._to_write(entry, version, mode, with_base=after.whole)
        digests = version.chunks if entry.weights.whole else ()
        before, entry.weights, entry.writer = entry.weights, after, by.who
        try:
            self._keeping.save()
        except OSError:  # it was not written down, so it is not told: nobody writes
            entry.weights, entry.writer = before, ""
            staged, entry.next = entry.next, None
            self._discard(staged)
            for fd in fds:
                os.close(fd)
            raise
        grant = m.UpdateGrant(
            model=asked.model,
            version=after.version + 1,
            owner_generation=self._keeping.generation,
            nbytes=version.memory.nbytes,
            layout=version.layout,
            chunk_digests=digests,
            mode=mode,
            has_base=len(fds) == 2,
            rank=asked.rank,
        )
        return grant, fds

    def _to_write(self, entry: ModelEntry, version: Version, mode: str, *, with_base: bool) -> tuple[int, ...]:
        if mode == IN_PLACE:
            if entry.source.update != IN_PLACE:
                raise Refused(
                    f"weights of {entry.weights.model} are sealed against writing for ever",
                    remedy='use mode "swap", or configure the model with update = "in_place"',
                )
            return (os.dup(version.memory.fd),)
        if mode != SWAP:
            raise Refused(f"no update mode {mode[:32]!r}", remedy="swap or in_place")
        room_or_refuse(entry.weights.model, version.memory.nbytes)
        name = f"weights-{entry.weights.model}-next"
        memory = Memfd(name, version.memory.nbytes, entry.source.huge_pages)
        try:
            memory.prefault()
        except HostUnfit:
            memory.close()
            raise
        entry.next = Version(memory=memory, name="", layout=version.layout, chunks=(), digest="")
        mine = os.dup(memory.fd)
        return (mine, version.memory.reader_fd()) if with_base else (mine,)

    def commit(self, asked: m.CommitUpdate, by: Caller) -> Job:
        """Seal, then hash in a thread, then the next version holds. Raises Fenced, or Refused (a writable mapping is
        left, or digests that cannot be of this memory) with the update still open."""
        entry = self.entry(asked.model, asked.rank)
        stamp = core.Stamp(asked.owner_generation, asked.version)
        after = core.weights_step(entry.weights, core.CommitAsked(stamp=stamp, peer=by.peer))
        target = entry.next or entry.version
        assert target is not None  # UPDATING is entered with memory only
        if asked.digest != root_digest(asked.chunk_digests, target.memory.nbytes):
            raise Refused("the digest of the commit is not that of its chunk digests", kept="the update is still open")
        if entry.next is not None:
            _seal_or_refuse(entry.next.memory, asked.model)
        entry.weights = after
        new = Version(
            memory=target.memory,
            name=target.name,
            layout=target.layout,
            chunks=asked.chunk_digests,
            digest=asked.digest,
        )
        return Job(_tried(new.difference), lambda bad: self._committed(entry, new, asked.version, bad))

    def _committed(self, entry: ModelEntry, new: Version, number: int, bad: object) -> m.WeightsInfo:
        if bad is not None:
            said = (
                f"it could not be hashed: {bad}" if isinstance(bad, OSError) else f"chunk {bad} differs from its digest"
            )
            reason = f"version {number} of {entry.weights.model}: {said}"
            self._give_up(entry, core.Mismatched(reason=reason))
            raise WeightsBroken(
                reason, kept=f"version {entry.weights.version}, {entry.weights.state.value}", remedy="write it again"
            )
        after = core.weights_step(entry.weights, core.Committed(version=number))
        if entry.next is not None:
            new = replace(new, name=self._keeping.keep(_label(entry), new.memory.fd))
        try:
            self._take(entry, new, after)
        except OSError as why:
            reason = f"version {number} of {entry.weights.model} could not be written down: {why}"
            self._give_up(entry, core.Mismatched(reason=reason))
            raise Refused(reason, kept=f"version {entry.weights.version}, {entry.weights.state.value}") from why
        entry.next, entry.writer = None, ""
        return entry.info()

    def abort(self, asked: m.AbortUpdate, by: Caller) -> Job:
        """The writer gives up. That it touched nothing in place is believed only when the hash says so too."""
        entry = self.entry(asked.model, asked.rank)
        stamp = core.Stamp(asked.owner_generation, asked.version)
        event = core.Aborted(stamp=stamp, peer=by.peer, touched=True)
        core.weights_step(entry.weights, event)  # raises before anything slow
        version = entry.version
        hashed = entry.weights.in_place and not asked.touched and version is not None

        def finish(bad: object) -> m.WeightsInfo:
            self._give_up(entry, core.Aborted(stamp=stamp, peer=by.peer, touched=not hashed or bad is not None))
            return entry.info()

        return Job(_tried(version.difference) if hashed and version else lambda: None, finish)

    def republish(self, asked: m.RepublishWeights, progress: Progress) -> Job:
        """Load a TORN model from its files again, in a thread; it is refused to readers until it is sealed."""
        entry = self.entry(asked.model, asked.rank)
        stamp = core.Stamp(asked.owner_generation, asked.version)
        # Not written down: the next life finds TORN, which is what a rebuild that was not finished leaves.
        entry.weights = core.weights_step(entry.weights, core.RebuildBegun(stamp=stamp))

        def work() -> Loaded | BelayerError | OSError:
            try:
                return entry.source.load(asked.model, progress, entry.rank)
            except (BelayerError, OSError) as why:
                return why

        def finish(loaded: object) -> m.WeightsInfo:
            try:
                if isinstance(loaded, BelayerError | OSError):
                    raise loaded
                assert isinstance(loaded, Loaded)
                self._built(entry, loaded, entry.weights.version + 1)
            except (BelayerError, OSError) as why:
                entry.weights = core.weights_step(entry.weights, core.BuildFailed(reason=str(why)))
                raise
            return entry.info()

        return Job(work, finish)

    def peer_gone(self, peer: int) -> list[ModelEntry]:
        """A connection ended: it reads no more, and an update that it had not committed is over. Returns the models
        whose update it was."""
        changed = []
        for entry in self.entries.values():
            entry.readers.pop(peer, None)
            if core.weights_step(entry.weights, core.WriterDied(peer=peer)) is not entry.weights:
                self._give_up(entry, core.WriterDied(peer=peer))
                changed.append(entry)
        return changed

    def _give_up(self, entry: ModelEntry, event: core.WeightsEvent) -> None:
        entry.weights = core.weights_step(entry.weights, event)
        staged, entry.next, entry.writer = entry.next, None, ""
        self._keeping.note()  # the next life gives the same update up by itself
        self._discard(staged)

    def _discard(self, version: Version | None) -> None:
        """After the ledger names it no more: readers that still map it keep its pages."""
        if version is None:
            return
        if version.name:
            self._keeping.drop(version.name)
        version.memory.close()


def _tried(work: Callable[[], object]) -> Callable[[], object]:
    """What fails for want of memory in the thread is a result like another: the update must come to an end."""

    def result() -> object:
        try:
            return work()
        except OSError as why:
            return why

    return result


def _one_rank_or_refuse(entry: ModelEntry) -> None:
    """A version is one of all ranks, and the ledger seals each by itself: half an update could be served."""
    if entry.source.ranks > 1:
        raise Refused(
            f"weights of {entry.weights.model} lie in {entry.source.ranks} parts (tensor_parallel) and take no update",
            kept=f"version {entry.weights.version}, {entry.weights.state.value}",
            remedy="set tensor_parallel = 1, or change the files and restart the slots and gpuowner",
        )


def _label(entry: ModelEntry) -> str:
    return f"weights.{entry.weights.model}.{entry.rank}"


def _seal_or_refuse(memory: Memfd, model: str) -> None:
    try:
        memory.seal_for_ever()
    except OSError as why:
        raise Refused(
            f"the next version of {model} cannot be sealed: a writable mapping of it is left ({why.strerror})",
            kept="the update is still open",
            remedy="unmap it and commit again",
        ) from why
