"""A model whose ``tensor_parallel`` was changed lies in other parts.

They are the same weights as long as its files hold the bytes of the last version: then the version keeps its number,
since nothing that anybody computes has changed. All parts have one number either way.

A life that ends before all parts are there has told nobody of any. The files may change before the next one, so the
parts that it left are loaded again with the others: two parts of different files must not bear one number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from belayer.errors import BelayerError
from gpuowner.ledger import WeightsRow
from gpuowner.version import Source


def other_parts(row: WeightsRow, source: Source) -> bool:
    """Whether ``row`` is a part of what ``source`` asks for in other parts."""
    return row.source.startswith(f"{source.folder} {source.dtype} ") and _parts(row) != source.ranks


def never_whole(rows: Sequence[WeightsRow], source: Source) -> bool:
    """``rows``: of one model in the parts that ``source`` asks for."""
    built = {row.rank for row in rows if row.digest}
    return bool(built) and built != set(range(source.ranks))


def anew(row: WeightsRow) -> WeightsRow:
    """The part of a model that was never whole, to be loaded under the number that it had."""
    number = row.version - 1 if row.digest else row.version
    return msgspec.structs.replace(
        row, memory="", version=number, whole=True, from_files=True, digest="", layout=(), chunks=()
    )


def _parts(row: WeightsRow) -> int:
    _, _, ranks = row.source.rpartition(" tp")
    return int(ranks) if ranks.isdigit() else 1


def rows_to_load(last: Sequence[WeightsRow], source: Source) -> list[WeightsRow]:
    """One for each new part; ``last``: the old ones, whose memory may be gone. Loading one gives the number after
    its version, as it does for all whose bytes differ."""
    number = max(row.version for row in last)
    before = number - 1 if _unchanged(last, source) else number
    one = msgspec.structs.replace(
        last[0], memory="", version=before, whole=True, from_files=True, digest="", layout=(), chunks=(),
        source=source.text(),
    )  # fmt: skip
    return [msgspec.structs.replace(one, rank=rank) for rank in range(source.ranks)]


def _unchanged(last: Sequence[WeightsRow], source: Source) -> bool:
    """Lays the files out as they lay before and hashes them, part by part: only bytes prove that they are the same."""
    parts = {row.rank: row for row in last}
    whole = all(row.whole and row.digest for row in last)
    if not whole or len({row.version for row in last}) > 1 or sorted(parts) != list(range(_parts(last[0]))):
        return False
    before = replace(source, ranks=len(parts))
    return all(_digest(before, row) == row.digest for row in last)


def _digest(source: Source, row: WeightsRow) -> str:
    try:
        loaded = source.load(row.model, lambda *_: None, row.rank)
    except BelayerError:  # they cannot be laid out so any more, so they are not the same
        return ""
    loaded.drop()
    return loaded.digest
