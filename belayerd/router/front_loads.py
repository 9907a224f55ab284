"""How many connections each front has on each port, in memory that all fronts share.

All fronts accept from one listening socket per port, and vLLM's server leaves a connection to the front with the
fewest (``NoSignalServer``, ``peer_loads``). A front that is stopped or dead takes no connection along, as it would with
a listening socket of its own (ADR 0020).
"""

from __future__ import annotations

import mmap

AWAY = 2**31 - 1  # vLLM's own word for a front that accepts nothing


class Loads:
    """Made by the router before it forks; ``number`` is this front's."""

    def __init__(self, fronts: int, ports: int, shared: mmap.mmap | None = None, number: int = 0) -> None:
        self._fronts, self._ports, self._number = fronts, ports, number
        self._shared = shared or mmap.mmap(-1, 4 * fronts * ports)  # MAP_SHARED | MAP_ANONYMOUS
        self._rows = memoryview(self._shared).cast("i")
        if shared is None:
            for front in range(fronts):
                self.away(front)

    def at(self, number: int) -> Loads:
        """The same memory, as the front of this number has it."""
        return Loads(self._fronts, self._ports, self._shared, number)

    def of(self, port: int) -> tuple[memoryview, int]:
        """What vLLM's server wants for its port: the row of all fronts, and which is its own."""
        return self._rows[port * self._fronts : (port + 1) * self._fronts], self._number

    def away(self, front: int) -> None:
        """A front that has died left its last numbers behind: the others would wait for it at each connection."""
        for port in range(self._ports):
            self._rows[port * self._fronts + front] = AWAY
