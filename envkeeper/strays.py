"""Containers of this root that no record knows: Docker answered nothing when it made them, or would not remove them.

Found by their label, at start and now and then. One that is listed, then unknown, and of no sandbox that is in the
making by then will never become known: the listing comes first, so nothing that is being made is taken for a stray.
"""

from __future__ import annotations

from envkeeper.core import State
from envkeeper.keeper import Keeper

_MAKING = (State.CREATING, State.RESTORING)


async def sweep(keeper: Keeper) -> None:
    """Remove them. Raises EngineAway, EngineFault: then the rest is for the next time."""
    listed = await keeper.thread(keeper.host.engine.ours)
    for container_id in [one for one, name in listed.items() if _stray(keeper, one, name)]:
        keeper.log.info("removing a container of no record", container=container_id[:12])
        await keeper.thread(keeper.host.engine.remove, container_id)


def _stray(keeper: Keeper, container_id: str, name: str) -> bool:
    boxes = keeper.boxes
    if any(container_id in (box.record.container_id, box.record.making) for box in boxes.values()):
        return False
    if name.startswith("+"):  # the holder of a sandbox that still is
        box = boxes.get(name[1:])
        return box is None or not box.record.recipe.allow
    if name in boxes and boxes[name].record.state in _MAKING:
        return False
    if keeper.pool.made(name):  # one of the pool keeps that name when it becomes a sandbox
        making = any(box.record.state is State.CREATING for box in boxes.values())
        return not making and not keeper.pool.knows(container_id, name)
    return True
