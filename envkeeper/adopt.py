"""At start: take up what a former life of envkeeper left (promise O1).

What runs is served again when the agent's own count of finished actions agrees with the record; anything in doubt is
LOST, which a restore answers. Half-made containers and half-written checkpoints go; a frozen sandbox is thawed.
"""

from __future__ import annotations

import os

import msgspec

from belayer.errors import BelayerError, HostUnfit, WorkerGone
from belayer.procs import boot_id, open_pidfd
from envkeeper import freezer, marks, strays
from envkeeper.agentlink import AgentLink, AgentStatus
from envkeeper.backend import Backend
from envkeeper.core import State, after_restart
from envkeeper.docker_port import EngineFault
from envkeeper.engine import Life
from envkeeper.host import owner_of
from envkeeper.keeper import Box, Keeper
from envkeeper.records import SandboxRecord

_ASK_S = 30.0  # a CRIU that outlived us may hold the tasks for a moment longer, and the host be busy


async def adopt(keeper: Keeper, backend: Backend) -> None:
    """Fill ``keeper.boxes``. Raises StateDamaged when a record cannot be read, HostUnfit without Docker."""
    await keeper.thread(backend.sweep)
    for record in await keeper.thread(keeper.records.load_all):
        await _one(keeper, Box(record, keeper.store_of(record.sandbox_id)))
    try:
        await strays.sweep(keeper)
    except EngineFault as why:  # one that Docker cannot remove now keeps nobody else's sandbox waiting
        keeper.log.error("not removed yet", why=str(why))
    marks.sweep(owner_of(keeper.paths), set(await keeper.thread(keeper.host.engine.ours)))
    keeper.lives.sweep({box.record.incarnation for box in keeper.boxes.values()})


async def _one(keeper: Keeper, box: Box) -> None:
    record = box.record
    gone = await keeper.thread(box.store.recover)
    try:
        pointer = box.store.ready()
        if pointer is not None:
            box.ready, box.ready_digest = box.store.load(pointer.checkpoint_id)
    except BelayerError as why:
        keeper.log.error("READY cannot be read", sandbox=record.sandbox_id, why=str(why))
    found = await keeper.thread(_look, keeper, record)
    status = found[3] if found else None
    state, reason = after_restart(
        record.state,
        alive=found is not None,
        agent_busy=bool(status and status.busy),
        agent_last=status.last_action if status else -1,
        boundary=record.boundary,
    )
    await keeper.thread(box.store.claims.settle, record.incarnation)
    box.record = msgspec.structs.replace(
        record, state=state, reason=record.reason if record.state is State.LOST else reason
    )
    keeper.boxes[record.sandbox_id] = box
    if state is State.DESTROYED:
        await keeper.finish(box)  # what Docker cannot remove now stays listed, and is tried again
        return
    await keeper.unmake(box)
    if found is not None:
        keeper.live(box, found[0], found[1], found[2])
    keeper.story.adopted(box.record, record.state)
    keeper.records.save(box.record, durable=True)
    keeper.log.info(
        "adopted", sandbox=record.sandbox_id, before=str(record.state), after=str(state), reason=reason, discarded=gone
    )


def _look(keeper: Keeper, record: SandboxRecord) -> tuple[Life, int, AgentLink, AgentStatus] | None:
    """The recorded life if it is still the very same process and its agent answers; None otherwise."""
    if not record.container_id or record.boot_id != boot_id():
        return None
    try:
        life = keeper.host.engine.life(record.container_id)
        pidfd = open_pidfd(record.pid, record.start_time)
    except (HostUnfit, EngineFault):
        raise  # Docker does not say: that is no reason to give up what may live. The next start asks again.
    except (BelayerError, WorkerGone):
        return None
    try:
        group = freezer.of_process(life.pid)
        if group.wants_frozen():
            group.thaw()
        link = AgentLink(life.pid, pidfd)
        return life, pidfd, link, link.status(_ASK_S)
    except (BelayerError, OSError):
        os.close(pidfd)
        return None
