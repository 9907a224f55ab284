"""Which addresses of this process are reserved and what is mapped where: the bookkeeping that backends share.

Strict as cuMemMap and cuMemUnmap are: a mapping lies inside one reservation and over free space only, and is removed as
the whole that it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from belayer.errors import Refused


@dataclass
class _Reservation:
    nbytes: int
    mapped: dict[int, tuple[int, ...]] = field(default_factory=dict)  # address -> sizes of its pieces, in order


class Ranges:
    """Every method raises Refused, with nothing changed, when the range is not what it must be."""

    def __init__(self) -> None:
        self._reserved: dict[int, _Reservation] = {}

    def reserved(self, va: int, nbytes: int) -> None:
        self._reserved[va] = _Reservation(nbytes)

    def check_free(self, va: int, nbytes: int) -> None:
        home = self._home(va, nbytes)
        for at, pieces in home.mapped.items():
            if at < va + nbytes and va < at + sum(pieces):
                raise Refused(f"{va:#x}: {nbytes} bytes there would overlap the mapping at {at:#x}")

    def mapped(self, va: int, pieces: tuple[int, ...]) -> None:
        self._home(va, sum(pieces)).mapped[va] = pieces

    def pieces(self, va: int) -> tuple[int, ...]:
        for home in self._reserved.values():
            if va in home.mapped:
                return home.mapped[va]
        raise Refused(f"nothing was mapped at {va:#x}", remedy="name the address that map was given")

    def unmapped(self, va: int) -> None:
        for home in self._reserved.values():
            home.mapped.pop(va, None)

    def freed(self, va: int) -> int:
        """Forget a reservation and return its size."""
        home = self._reserved.get(va)
        if home is None:
            raise Refused(f"nothing was reserved at {va:#x}")
        if home.mapped:
            raise Refused(f"the reservation at {va:#x} still holds {len(home.mapped)} mapping(s)", remedy="unmap first")
        del self._reserved[va]
        return home.nbytes

    def _home(self, va: int, nbytes: int) -> _Reservation:
        for at, home in self._reserved.items():
            if nbytes > 0 and at <= va and va + nbytes <= at + home.nbytes:
                return home
        raise Refused(f"{va:#x}: {nbytes} bytes there were not reserved", remedy="reserve the range first")
