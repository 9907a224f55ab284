"""What a version in the making needs, part by part: memory to write to, what its writer says, what the owner reads.

Functions of one request each; the states, and who may do what, are in ``models``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from belayer.errors import BelayerError, HostNotReady, HostUnfit, Refused, WeightsTorn
from belayer.messages import owner as m
from gpuowner.backends.port import WeightsMemory
from gpuowner.digest import Told, nobody, root_digest
from gpuowner.loader import Loaded, Progress
from gpuowner.version import IN_PLACE, SWAP, ModelEntry, Version


def tried(work: Callable[[], object]) -> Callable[[], object]:
    """What fails in the thread for want of memory, or of a device that answers, is a result like another: the update
    must come to an end."""

    def result() -> object:
        try:
            return work()
        except (OSError, BelayerError) as why:  # the latter: whoever reads GPU memory for us cannot
            return why

    return result


def held(entry: ModelEntry) -> Version:
    if entry.version is None:
        raise WeightsTorn(
            f"weights of {entry.weights.model}: no memory of theirs is left to say how they lie",
            remedy="republish them from their files first",
        )
    return entry.version


def open_or_refuse(parts: Sequence[ModelEntry], mode: str) -> None:
    """Raises Refused for a mode that these weights do not take, HostUnfit where all parts have no room twice."""
    model = parts[0].weights.model
    if mode == IN_PLACE and parts[0].source.update != IN_PLACE:
        raise Refused(
            f"weights of {model} are sealed against writing for ever",
            remedy='use mode "swap", or configure the model with update = "in_place"',
        )
    if mode == IN_PLACE and any(held(part).memory.sealed_for_ever() for part in parts):
        raise Refused(
            f"weights of {model} came by a swap, which sealed their memory against writing for ever",
            kept=kept(parts[0]),
            remedy='use mode "swap"',
        )
    if mode not in (IN_PLACE, SWAP):
        raise Refused(f"no update mode {mode[:32]!r}", remedy="swap or in_place")
    if mode == SWAP:
        parts[0].source.room_or_refuse(model, sum(held(part).memory.nbytes for part in parts))


def to_write(entry: ModelEntry) -> tuple[int, ...]:
    """Descriptors of a grant, the receiver's from now on."""
    version, staged = held(entry), entry.next
    mine = os.dup((staged or version).memory.fd)
    if staged is None or not entry.weights.whole:
        return (mine,)
    try:
        return mine, version.memory.reader_fd()
    except OSError:
        os.close(mine)
        raise


def told(parts: Sequence[ModelEntry], asked: m.CommitUpdate) -> list[Version]:
    """The versions that the writer says it has written. Raises Refused."""
    said = [m.PartDigests(chunk_digests=asked.chunk_digests, digest=asked.digest), *asked.others]
    if len(said) != len(parts):
        raise Refused(
            f"the commit tells of {len(said)} part(s), {asked.model} lies in {len(parts)}",
            kept="the update is still open",
        )
    new = []
    for part, one in zip(parts, said, strict=True):
        target = part.next or held(part)
        if one.digest != root_digest(one.chunk_digests, target.memory.nbytes):
            raise Refused("the digest of the commit is not that of its chunk digests", kept="the update is still open")
        new.append(
            Version(
                memory=target.memory,
                name=target.name,
                layout=target.layout,
                chunks=one.chunk_digests,
                digest=one.digest,
            )
        )
    return new


def intact(version: Version, told: Told = nobody) -> tuple[bool, str]:
    """Whether adopted bytes are what they were sealed as, and why not, where that is more than a difference. Raises
    HostNotReady when nobody can look now: this life must not begin then. Its copies are kept for one that can, which
    systemd begins again and again (another exit code would end the unit, and with it what it keeps)."""
    try:
        return version.difference(told) is None, ""
    except HostUnfit as why:
        raise HostNotReady(why.message, kept=f"{version.name}, with who keeps its copy", remedy=why.remedy) from why
    except BelayerError as why:
        return False, f"they are not there any more: {why.message}"


def different(versions: Sequence[Version]) -> tuple[int, int] | None:
    """(rank, chunk) of the first byte that is not what its digest says. Slow: for a thread."""
    for rank, version in enumerate(versions):
        chunk = version.difference()
        if chunk is not None:
            return rank, chunk
    return None


def how(bad: object, ranks: int) -> str:
    if not isinstance(bad, tuple):
        return f"it could not be hashed: {bad}"
    rank, chunk = bad
    return (f"rank {rank}: " if ranks > 1 else "") + f"chunk {chunk} differs from its digest"


def loaded(parts: Sequence[ModelEntry], model: str, progress: Progress) -> list[Loaded] | BelayerError | OSError:
    """All parts from the files, or why not, with nothing kept."""
    made: list[Loaded] = []
    try:
        for part in parts:
            made.append(part.source.load(model, progress, part.rank))
    except (BelayerError, OSError) as why:
        for one in made:
            one.drop()
        return why
    return made


def kept(entry: ModelEntry) -> str:
    return f"version {entry.weights.version}, {entry.weights.state.value}"


def seal_or_refuse(memory: WeightsMemory, model: str) -> None:
    try:
        memory.seal_for_ever()
    except OSError as why:
        raise Refused(
            f"the next version of {model} cannot be sealed: a writable mapping of it is left ({why.strerror})",
            kept="the update is still open",
            remedy="unmap it and commit again",
        ) from why
