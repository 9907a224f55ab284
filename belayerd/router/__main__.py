"""belayer-router: the data path of a host. ``python -m belayerd.router --config belayer.toml``"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from belayer import config, daemon, log
from belayer.errors import BelayerError
from belayer.messages.router import Request
from belayer.paths import Paths
from belayer.rpc import Server
from belayerd.router import preflight
from belayerd.router.fleet_life import keys_of, next_life
from belayerd.router.host_metrics import HostMetrics
from belayerd.router.service import Service


def main(argv: list[str] | None = None) -> int:
    """Exit 0 after SIGTERM, 2 for a configuration or host that cannot be (one sentence, nothing left)."""
    parser = argparse.ArgumentParser(prog="belayer-router", description="One URL before all workers of a host.")
    parser.add_argument("--config", type=Path, help="default: belayer.toml below BELAYER_ROOT, else /etc/belayer")
    chosen = parser.parse_args(argv)
    try:
        paths = Paths()
        loaded = config.load(chosen.config or paths.config)
        paths.make()
        only = daemon.OnlyOne(paths.run, "router")
    except BelayerError as error:
        return daemon.say(error)
    return daemon.run(lambda stop: _serve(loaded, paths, stop, only))


async def _serve(loaded: config.Config, paths: Paths, stop: asyncio.Event, only: daemon.OnlyOne) -> None:
    logger = log.setup("belayer-router")
    _quiet_vllm()
    preflight.one_model(loaded)
    pair = keys_of(loaded)
    sock = preflight.bind(loaded.router.host, loaded.router.port)
    slots = {slot.name: preflight.bind(loaded.router.host, slot.url_port) for slot in loaded.slot if slot.url_port}
    from belayerd.router.front import Front  # imports vLLM: seconds, so not before the host is known to be fit

    instance = daemon.new_instance()
    life = None if pair is None else next_life(paths.fleet_life, instance)
    front = Front(loaded, paths.journal, instance, logger, pair, life)
    HostMetrics(paths.status_file)
    service = Service(front.shell, frozenset(slot.name for slot in loaded.slot), instance, front.url, front.slot_urls)
    service.fleet, service.host = front.fleet, loaded.host.name
    if stop.is_set():
        return  # asked to stop while vLLM was being imported
    started = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        http = group.create_task(front.serve(sock, slots, started))
        ready = group.create_task(started.wait())
        watch = group.create_task(front.shell.watch())
        await asyncio.wait((http, ready), return_when=asyncio.FIRST_COMPLETED)
        if started.is_set():
            server = Server(paths.router_sock, Request, service.handle)
            control = group.create_task(server.serve())
            fleet = None if front.fleet is None else group.create_task(front.fleet.serve())
            daemon.notify("READY=1")
            logger.info("serving", url=front.url, instance=instance)
            await asyncio.wait((http,))
            control.cancel()
            if fleet is not None:
                fleet.cancel()
        ready.cancel()
        watch.cancel()


def _quiet_vllm() -> None:
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
