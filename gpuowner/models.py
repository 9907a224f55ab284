"""Models: the bytes of their versions, their readers and their one writer, by the states of ``core``.

An update writes the next version beside the last one and swaps them at the commit ("swap"), or overwrites it
("in_place"). Either way the owner hashes the bytes itself before a version is called sealed: a version is what was
read back, never what a writer says. Persist before tell: the memory is in the store before the ledger names it, the
ledger says UPDATING before a writer has the descriptor, and SEALED before anybody hears of the version.

A model of several tensor-parallel ranks has a part for each, and one version (``together``): whatever a writer does is
done to all parts, and one write of the ledger tells the outcome of all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from belayer.errors import BelayerError, Refused, WeightsBroken
from belayer.messages import owner as m
from gpuowner import core, making, together
from gpuowner.digest import Told, nobody
from gpuowner.keeping import Caller, Keeping, Key
from gpuowner.ledger import WeightsRow
from gpuowner.loader import Loaded, Progress
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
        lost = bool(last and not last.from_files and not same)
        self._built([(entry, loaded)], version if same else version + 1, lost=lost)
        self.level(model)
        return entry

    def _built(self, made: Sequence[tuple[ModelEntry, Loaded]], number: int, *, lost: bool = False) -> None:
        """The bytes of the files as version ``number``; ``lost``: they only show how the tensors of a lost one lie."""
        event: core.WeightsEvent = core.Built(version=number)
        if lost:
            event = core.BuildFailed(reason="their last version was lost, and the files hold other bytes than it had")
        before = [replace(entry.weights, nbytes=loaded.memory.nbytes) for entry, loaded in made]
        afters = together.step(before, event)
        try:
            for entry, loaded in made:
                loaded.unmap()
                if entry.source.update == SWAP:
                    loaded.memory.seal_for_ever()
            self._take([(e, self._from_files(e, files), a) for (e, files), a in zip(made, afters, strict=True)])
        except OSError:
            for _, loaded in made:
                loaded.memory.close()
            raise

    def _from_files(self, entry: ModelEntry, loaded: Loaded) -> Version:
        return Version(
            memory=loaded.memory, name=self._keeping.keep(_label(entry), loaded.memory.fd), layout=loaded.layout,
            chunks=loaded.chunks, digest=loaded.digest, from_files=True, load_ms=loaded.load_ms,
            mb_per_s=loaded.mb_per_s,
        )  # fmt: skip

    def _take(self, taken: Sequence[tuple[ModelEntry, Version, core.Weights]]) -> None:
        """The versions, kept in the store, are the model's from now on, and the last ones are let go. One write of the
        ledger says so for all of its parts: this is the commit. Raises OSError with the model as it was when that
        cannot be written down."""
        before = [(entry.weights, entry.version) for entry, _, _ in taken]
        for entry, version, after in taken:
            entry.weights, entry.version = after, version
        try:
            self._keeping.save()
        except OSError:
            for (entry, version, _), (weights, old) in zip(taken, before, strict=True):
                entry.weights, entry.version = weights, old
                if old is None or old.name != version.name:
                    self._keeping.drop(version.name)
            raise
        for (_, version, _), (_, old) in zip(taken, before, strict=True):
            if old is not None and old.memory is not version.memory:
                self._discard(old)

    def level(self, model: str) -> None:
        """Once all its parts are there: a model that came back in pieces is torn as a whole. A death before this is
        written down comes to the same in the next life."""
        parts = self.parts(model)
        states = tuple(part.weights for part in parts)
        if len(parts) < parts[0].source.ranks or any(one.state is core.WeightsState.BUILDING for one in states):
            return
        after = together.levelled(states)
        if after != states:
            _set(parts, after)
            self._keeping.note()

    def adopt(self, row: WeightsRow, fd: int, source: Source, told: Told = nobody) -> ModelEntry:
        """A part of the last life, all of it hashed; ``told`` hears how far. Raises OSError when the descriptor is not
        that memory, HostNotReady when nobody can read it now. Not persisted yet; ``level`` comes after all of them."""
        version = Version(
            memory=source.adopt(fd, row.nbytes),
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
        intact, why = making.intact(version, told) if row.whole else (False, "")
        after = core.weights_step(before, core.WeightsAdopted(owner=self._keeping.generation, intact=intact, why=why))
        entry = self.entries[row.model, row.rank] = ModelEntry(after, row.rank, source, version)
        return entry

    # --- readers ---

    def parts(self, model: str) -> list[ModelEntry]:
        """One for each tensor-parallel rank, in order. Raises WeightsBroken."""
        found = [self.entries[key] for key in sorted(self.entries) if key[0] == model]
        if not found:
            known = sorted({name for name, _ in self.entries})
            raise WeightsBroken(f"no model named {model[:64]!r} here", remedy=f"one of {known}")
        return found

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
            backend=entry.source.memory,
            memory=version.name,
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

    def _whole(self, entry: ModelEntry) -> Version:
        together.readable([part.weights for part in self.parts(entry.weights.model)])
        if entry.version is None:
            raise BelayerError(f"weights of {entry.weights.model} are sealed without memory")
        return entry.version

    # --- the writer ---

    def begin(self, asked: m.BeginUpdate, by: Caller) -> tuple[m.UpdateGrant, tuple[int, ...]]:
        """Of all parts: the grant of rank 0, with the descriptor to write, and of the last version where it is whole
        and elsewhere. Raises Fenced, WeightsTorn, HostUnfit (no room for a second copy) or Refused."""
        parts = self.parts(asked.model)
        mode = asked.mode or parts[0].source.update
        event = core.UpdateBegun(
            stamp=core.Stamp(asked.owner_generation, asked.from_version),
            peer=by.peer, in_place=mode == IN_PLACE, rewrite=asked.whole,
        )  # fmt: skip
        before = tuple(part.weights for part in parts)
        after = together.step(before, event)
        making.open_or_refuse(parts, mode)
        fds: tuple[int, ...] = ()
        try:
            for part in parts:
                self._stage(part, mode)
            fds = making.to_write(parts[0])
            _set(parts, after, writer=by.who)
            self._keeping.save()
        except (BelayerError, OSError):  # it was not written down, so it is not told: nobody writes
            _set(parts, before, writer="")
            self._unstage(parts)
            for fd in fds:
                os.close(fd)
            raise
        return self._grant(parts[0], len(parts), fds), fds

    def part(self, asked: m.UpdatePart, by: Caller) -> tuple[m.UpdateGrant, tuple[int, ...]]:
        """As ``begin``, of another rank in the update that this writer has begun. Raises Fenced or Refused."""
        entry = self.entry(asked.model, asked.rank)
        together.writing(entry.weights, core.Stamp(asked.owner_generation, asked.version), by.peer)
        fds = making.to_write(entry)
        return self._grant(entry, len(self.parts(asked.model)), fds), fds

    def _grant(self, entry: ModelEntry, ranks: int, fds: tuple[int, ...]) -> m.UpdateGrant:
        version = making.held(entry)
        return m.UpdateGrant(
            model=entry.weights.model,
            version=entry.weights.version + 1,
            owner_generation=self._keeping.generation,
            nbytes=version.memory.nbytes,
            layout=version.layout,
            chunk_digests=entry.carried,
            mode=SWAP if entry.next is not None else IN_PLACE,
            has_base=len(fds) == 2,
            rank=entry.rank,
            ranks=ranks,
            backend=entry.source.memory,
        )

    def _stage(self, entry: ModelEntry, mode: str) -> None:
        """The memory that the next version of this part is written to."""
        version = making.held(entry)
        if mode == SWAP:
            name = f"weights-{entry.weights.model}-next" + (f"-{entry.rank}" if entry.source.ranks > 1 else "")
            memory = entry.source.stage(name, version.memory.nbytes)
            entry.next = Version(memory=memory, name="", layout=version.layout, chunks=(), digest="")
            memory.prefault()
        entry.carried = version.chunks if entry.weights.whole else ()

    def _unstage(self, parts: Sequence[ModelEntry]) -> None:
        for part in parts:
            staged, part.next, part.carried = part.next, None, ()
            self._discard(staged)

    def commit(self, asked: m.CommitUpdate, by: Caller) -> Job:
        """Seal, then hash in a thread, then the next version holds: of all parts. Raises Fenced, or Refused (a writable
        mapping is left, or digests that cannot be of this memory) with the update still open."""
        parts = self.parts(asked.model)
        stamp = core.Stamp(asked.owner_generation, asked.version)
        asking = core.CommitAsked(stamp=stamp, peer=by.peer)
        after = together.step([part.weights for part in parts], asking)
        new = making.told(parts, asked)
        for part in parts:
            if part.next is not None:
                making.seal_or_refuse(part.next.memory, asked.model)
        for part, weights in zip(parts, after, strict=True):
            part.weights = weights
        hashing = making.tried(lambda: making.different(new))
        return Job(hashing, lambda bad: self._committed(parts, new, asked.version, bad))

    def _committed(
        self, parts: Sequence[ModelEntry], new: Sequence[Version], number: int, bad: object
    ) -> m.WeightsInfo:
        now = parts[0].weights
        if bad is not None:
            reason = f"version {number} of {now.model}: {making.how(bad, len(parts))}"
            self._give_up(parts, core.Mismatched(reason=reason))
            raise WeightsBroken(reason, kept=making.kept(parts[0]), remedy="write it again")
        after = together.step([part.weights for part in parts], core.Committed(version=number))
        named = [
            version if part.next is None else replace(version, name=self._keeping.keep(_label(part), version.memory.fd))
            for part, version in zip(parts, new, strict=True)
        ]
        try:
            self._take(list(zip(parts, named, after, strict=True)))
        except OSError as why:
            reason = f"version {number} of {now.model} could not be written down: {why}"
            self._give_up(parts, core.Mismatched(reason=reason))
            raise Refused(reason, kept=making.kept(parts[0])) from why
        for part in parts:
            part.next, part.writer, part.carried = None, "", ()
        return parts[0].info()

    def abort(self, asked: m.AbortUpdate, by: Caller) -> Job:
        """The writer gives up. That it touched nothing in place is believed only when the hash says so too."""
        parts = self.parts(asked.model)
        stamp = core.Stamp(asked.owner_generation, asked.version)
        event = core.Aborted(stamp=stamp, peer=by.peer, touched=True)
        together.step([part.weights for part in parts], event)  # raises before anything slow
        hashed = parts[0].weights.in_place and not asked.touched
        versions = [making.held(part) for part in parts] if hashed else []

        def finish(bad: object) -> m.WeightsInfo:
            self._give_up(parts, core.Aborted(stamp=stamp, peer=by.peer, touched=not hashed or bad is not None))
            return parts[0].info()

        return Job(making.tried(lambda: making.different(versions)), finish)

    def republish(self, asked: m.RepublishWeights, progress: Progress) -> Job:
        """Load a TORN model from its files again, in a thread; it is refused to readers until all of it is sealed."""
        parts = self.parts(asked.model)
        stamp = core.Stamp(asked.owner_generation, asked.version)
        # Not written down: the next life finds TORN, which is what a rebuild that was not finished leaves.
        after = together.step([part.weights for part in parts], core.RebuildBegun(stamp=stamp))
        for part, weights in zip(parts, after, strict=True):
            part.weights = weights

        def finish(loaded: object) -> m.WeightsInfo:
            try:
                if isinstance(loaded, BelayerError | OSError):
                    raise loaded
                assert isinstance(loaded, list)
                self._built(list(zip(parts, loaded, strict=True)), parts[0].weights.version + 1)
            except (BelayerError, OSError) as why:
                for part in parts:
                    part.weights = core.weights_step(part.weights, core.BuildFailed(reason=str(why)))
                raise
            return parts[0].info()

        return Job(lambda: making.loaded(parts, asked.model, progress), finish)

    def peer_gone(self, peer: int) -> list[ModelEntry]:
        """A connection ended: it reads no more, and an update that it had not committed is over. Returns the first part
        of each model whose update it was."""
        changed = []
        event = core.WriterDied(peer=peer)
        for model in dict.fromkeys(name for name, _ in self.entries):
            parts = self.parts(model)
            for part in parts:
                part.readers.pop(peer, None)
            if any(core.weights_step(part.weights, event) is not part.weights for part in parts):
                self._give_up(parts, event)
                changed.append(parts[0])
        return changed

    def _give_up(self, parts: Sequence[ModelEntry], event: core.WeightsEvent) -> None:
        _set(parts, together.step([part.weights for part in parts], event), writer="")
        self._keeping.note()  # the next life gives the same update up by itself
        self._unstage(parts)

    def _discard(self, version: Version | None) -> None:
        """After the ledger names it no more: readers that still map it keep its pages."""
        if version is None:
            return
        if version.name:
            self._keeping.drop(version.name)
        version.memory.close()


def _set(parts: Sequence[ModelEntry], states: Sequence[core.Weights], writer: str = "") -> None:
    for part, weights in zip(parts, states, strict=True):
        part.weights, part.writer = weights, writer


def _label(entry: ModelEntry) -> str:
    return f"weights.{entry.weights.model}.{entry.rank}"
