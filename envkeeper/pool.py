"""Sandboxes made before they are asked for, all of the configured image and limits.

One waits in its container with its agent running; to be asked for is to be given a name. Refilled one at a time, never
while a checkpoint or a restore waits for the same disk and Docker. They are in no record: what a crash leaves behind is
removed by its label at the next start, and a daemon that ends takes them along.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from belayer.errors import BelayerError
from belayer.ids import new_sandbox_id
from belayer.procs import is_dead
from envkeeper.agentlink import AgentLink
from envkeeper.engine import Life
from envkeeper.recipe import Recipe

_PAUSE_S = 0.25  # how often a refill that holds back looks again
_AFTER_FAILURE_S = 10.0
_PREFIX = "pool-"


@dataclass(frozen=True, slots=True)
class Waiting:
    """``born`` names the folder of envkeeper.lives that is mounted in it, until it has a name of its own."""

    born: str
    life: Life
    pidfd: int
    link: AgentLink


Make = Callable[[Recipe, str, str], tuple[Life, int, AgentLink]]


class Pool:
    """``make(recipe, sandbox id, incarnation)`` and ``drop(waiting)`` block and are run in threads by ``thread``;
    ``hurried`` says whether somebody waits for a checkpoint or a restore."""

    def __init__(self, size: int, thread: Any, make: Make, drop: Callable[[Waiting], None], log: Any) -> None:
        self._size, self._thread, self._make, self._drop, self._log = size, thread, make, drop, log
        self._waiting: deque[Waiting] = deque()
        self._wanted = asyncio.Event()
        self._ends: set[asyncio.Future[None]] = set()  # of those that had died
        self._task: asyncio.Task[None] | None = None
        self._recipe: Recipe | None = None
        self._making = ""  # name of the one that is being made

    def __len__(self) -> int:
        return len(self._waiting)

    @staticmethod
    def made(name: str) -> bool:
        return name.startswith(_PREFIX)

    def knows(self, container_id: str, name: str) -> bool:
        """Whether it waits here, or is being made."""
        return name == self._making or any(one.life.container_id == container_id for one in self._waiting)

    def start(self, recipe: Recipe, hurried: Callable[[], bool]) -> None:
        if self._size:
            self._recipe = recipe
            self._task = asyncio.get_running_loop().create_task(self._refill(hurried))

    def take(self, recipe: Recipe) -> Waiting | None:
        """One that is exactly of ``recipe`` and alive, or None."""
        found = None
        while recipe == self._recipe and self._waiting and found is None:
            found = self._waiting.popleft()
            if is_dead(found.pidfd):
                self._log.warning("a waiting sandbox had died", container=found.life.container_id[:12])
                self._ends.add(asyncio.ensure_future(self._end(found)))
                found = None
        self._wanted.set()
        return found

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            await self._end(self._waiting.popleft())
        await asyncio.gather(*self._ends)

    async def _end(self, waiting: Waiting) -> None:
        """One that Docker does not remove is a container of no record, and removed as such."""
        try:
            await self._thread(self._drop, waiting)
        except (BelayerError, OSError) as why:
            self._log.warning("a waiting sandbox is not removed yet", why=str(why))

    async def _refill(self, hurried: Callable[[], bool]) -> None:
        assert self._recipe is not None
        while True:
            self._wanted.clear()
            while len(self._waiting) < self._size:
                if hurried():
                    await asyncio.sleep(_PAUSE_S)
                    continue
                born = self._making = f"{_PREFIX}{new_sandbox_id()}"
                making = asyncio.ensure_future(self._thread(self._make, self._recipe, born, born))
                try:
                    life, pidfd, link = await asyncio.shield(making)
                except asyncio.CancelledError:
                    # A container half made must not outlive us: its maker ends first.
                    for made in await asyncio.gather(making, return_exceptions=True):
                        if isinstance(made, tuple):
                            await self._end(Waiting(born, *made))
                    raise
                except (BelayerError, OSError) as why:  # tried again: a pool is a help, and nobody waits for it
                    self._log.warning("the pool is not refilled", why=str(why))
                    await asyncio.sleep(_AFTER_FAILURE_S)
                    continue
                self._waiting.append(Waiting(born, life, pidfd, link))
                self._making = ""
            await self._wanted.wait()
