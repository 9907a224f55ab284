"""One front of several: vLLM's whole front end in a process of its own, its heart in the router's."""

from __future__ import annotations

import asyncio

from prometheus_client import values

from belayer import log
from belayerd.router import vllm_seam as seam
from belayerd.router.front import Front
from belayerd.router.front_zygote import Kit
from belayerd.router.remote_heart import RemoteHeart


def run(kit: Kit, number: int, identity: str) -> None:
    """Until SIGTERM. Raises HostUnfit for a model that cannot be served."""
    # Its files are those of its number, not of its pid: the next life counts on, and no life leaves files behind.
    values.ValueClass = values.MultiProcessValue(lambda: f"front{number}")
    asyncio.run(_serve(kit, number, identity))


async def _serve(kit: Kit, number: int, identity: str) -> None:
    log.setup(f"belayer-front{number}")
    codec = seam.Codec()
    front = Front(kit.config, codec, kit.args)
    heart = RemoteHeart(kit.paths.fronts_sock, identity.encode(), codec, front.client, front.abort)
    front.attach(heart)
    try:
        await heart.greet()
        async with asyncio.TaskGroup() as group:
            reads = group.create_task(heart.read())
            await front.serve(kit.sock, kit.slots, heart.serves, kit.loads.at(number))
            reads.cancel()
    finally:
        heart.close()
