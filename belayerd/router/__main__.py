"""belayer-router: the data path of a host. ``python -m belayerd.router --config belayer.toml``"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from belayer import config, daemon, log
from belayer.errors import BelayerError
from belayer.messages.router import Request
from belayer.paths import Paths
from belayer.rpc import Server
from belayerd.router import many, preflight
from belayerd.router.fleet_life import keys_of, next_life
from belayerd.router.service import Service


def main(argv: list[str] | None = None) -> int:
    """Exit 0 after SIGTERM, 2 for a configuration or host that cannot be (one sentence, nothing left)."""
    parser = argparse.ArgumentParser(prog="belayer-router", description="One URL before all workers of a host.")
    parser.add_argument("--config", type=Path, help="default: belayer.toml below BELAYER_ROOT, else /etc/belayer")
    chosen = parser.parse_args(argv)
    try:
        paths = Paths()
    except BelayerError as error:
        return daemon.say(error)
    told = daemon.Told(paths.run, "router")
    try:
        loaded = config.load(chosen.config or paths.config)
        paths.make()
        only = daemon.OnlyOne(paths.run, "router")
        quiet_vllm()
        if loaded.router.fronts > 1:
            asked: list[int] = []
            for number in (signal.SIGTERM, signal.SIGINT):  # until there is an event loop to take them
                signal.signal(number, lambda got, _: asked.append(got))
            fronts = many.prepare(loaded, paths, only)
            many.leave(lambda: daemon.run(lambda stop: _serve_many(loaded, paths, stop, fronts, asked), told))
    except BelayerError as error:
        return told.say(error)
    return daemon.run(lambda stop: _serve(loaded, paths, stop, only), told)


async def _serve(loaded: config.Config, paths: Paths, stop: asyncio.Event, only: daemon.OnlyOne) -> None:
    """The one front is here, in the router's own process."""
    logger = log.setup("belayer-router")
    preflight.one_model(loaded)
    pair = keys_of(loaded)
    sock, slots = preflight.bind_all(loaded)
    from belayerd.router import house as houses  # import vLLM: seconds, so not before the host is known to be fit
    from belayerd.router import vllm_seam as seam
    from belayerd.router.front import Front
    from belayerd.router.host_metrics import HostMetrics

    instance = daemon.new_instance()
    life = None if pair is None else next_life(paths.fleet_life, instance)
    codec = seam.Codec()
    front = Front(loaded, codec)
    house = houses.House(loaded, paths.journal, instance, logger, codec, pair, life)
    try:
        front.attach(house.heart)
        house.open(front.client)
        HostMetrics(paths.status_file)
        if stop.is_set():
            return  # asked to stop while vLLM was being imported
        started = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            http = group.create_task(front.serve(sock, slots, started.set))
            beside = [group.create_task(started.wait()), group.create_task(house.shell.watch())]
            await asyncio.wait((http, beside[0]), return_when=asyncio.FIRST_COMPLETED)
            if started.is_set():
                beside += [group.create_task(one) for one in _control(loaded, paths, house, instance)]
                daemon.notify("READY=1")
                logger.info("serving", url=house.url, instance=instance)
                await asyncio.wait((http,))
            for task in beside:
                task.cancel()
    finally:
        house.close()


async def _serve_many(
    loaded: config.Config, paths: Paths, stop: asyncio.Event, made: many.Prepared, asked: list[int]
) -> None:
    """The fronts are processes of their own; all else is here. ``asked``: signals from before the event loop."""
    if asked:
        return  # asked to stop while vLLM was being imported: the zygote has forked nothing, and goes with us
    logger = log.setup("belayer-router")
    instance = daemon.new_instance()
    pair = keys_of(loaded)
    life = None if pair is None else next_life(paths.fleet_life, instance)
    router = many.Many(loaded, paths, instance, logger, made, pair, life)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in router.services()]
            up = group.create_task(router.fronts.until_serving())
            halt = group.create_task(stop.wait())
            await asyncio.wait((up, halt), return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                beside = _control(loaded, paths, router.house, instance, router.fronts)
                tasks += [group.create_task(one) for one in beside]
                daemon.notify("READY=1")
                logger.info("serving", url=router.house.url, instance=instance, fronts=loaded.router.fronts)
                await halt
            await router.fronts.stop()
            for task in (*tasks, up, halt):
                task.cancel()
    finally:
        router.close()


def _control(
    loaded: config.Config, paths: Paths, house: Any, instance: str, fronts: Any = None
) -> list[Coroutine[Any, Any, None]]:
    """What runs beside HTTP: the socket of belayerd and belayerctl, and the fleet."""
    names = frozenset(slot.name for slot in loaded.slot)
    service = Service(house.shell, names, instance, house.url, house.slot_urls)
    service.fleet, service.host, service.fronts = house.fleet, loaded.host.name, fronts
    server = Server(paths.router_sock, Request, service.handle)
    return [server.serve()] if house.fleet is None else [server.serve(), house.fleet.serve()]


def quiet_vllm() -> None:
    """The router holds no engine: no metrics of use are sent, nothing is fetched, one line of log per event."""
    for name, value in {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    raise SystemExit(main())
