"""A router with several fronts: what is made before its event loop, and how its parts hang together (ADR 0020)."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn

from belayer.config import Config
from belayer.daemon import OnlyOne
from belayer.fleet_keys import Pair
from belayer.messages.fleet import Life
from belayer.paths import Paths
from belayerd.router import front_zygote, preflight
from belayerd.router.fleet_life import keys_of
from belayerd.router.front_loads import Loads


@dataclass(frozen=True)
class Prepared:
    """``zygote``: the router's end of its socket. ``lock``: shared with all fronts, never closed."""

    zygote: socket.socket
    loads: Loads
    lock: int


def prepare(config: Config, paths: Paths, only: OnlyOne) -> Prepared:
    """Ports, then vLLM, then the zygote: while this process has one thread. Raises ConfigInvalid or HostUnfit."""
    preflight.one_model(config)
    keys_of(config)
    lock = front_zygote.take_lock(paths.run)
    sock, slots = preflight.bind_all(config)
    shutil.rmtree(paths.fronts_metrics, ignore_errors=True)  # counts of an earlier life
    paths.fronts_metrics.mkdir(mode=0o700)
    assert "prometheus_client" not in sys.modules, "it chooses at its import between one process and several"
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(paths.fronts_metrics)
    from belayerd.router import front, front_process  # import vLLM: seconds
    from belayerd.router import vllm_seam as seam

    seam.check()
    loads = Loads(config.router.fronts, 1 + len(slots))
    kit = front_zygote.Kit(config, paths, front.server_args(config), sock, slots, loads)
    return Prepared(front_zygote.start(kit, front_process.run, only.fileno()), loads, lock)


def leave(run: Callable[[], int]) -> NoReturn:
    """End this process with the exit code of ``run``, without taking the interpreter apart: all is closed by then, and
    to free every object of vLLM one by one takes many seconds, in which no next life of the router could begin."""
    code = 1
    try:
        code = run()
    except BaseException:  # noqa: BLE001 as the interpreter itself would: the traceback, and 1
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Many:
    """Make it inside the running event loop."""

    def __init__(
        self,
        config: Config,
        paths: Paths,
        instance: str,
        log: Any,
        made: Prepared,
        pair: Pair | None = None,
        life: Life | None = None,
    ) -> None:
        from prometheus_client import REGISTRY, generate_latest

        from belayerd.router.front_door import MOST_UNREAD, FrontDoor
        from belayerd.router.front_metrics import FrontMetrics
        from belayerd.router.fronts import Fronts
        from belayerd.router.host_metrics import HostMetrics
        from belayerd.router.house import House
        from belayerd.router.vllm_codec import Codec

        router = config.router
        codec = Codec()
        self.house = House(config, paths.journal, instance, log, codec, pair, life)
        unread = MOST_UNREAD + 2 * (router.keep_finished_mb << 20)
        self.door = FrontDoor(paths.fronts_sock, self.house.heart, codec, router.link_silence_s, log, unread)
        self.door.scrape = lambda: generate_latest(REGISTRY)
        self.house.open(self.door)
        self.fronts = Fronts(made.zygote, self.door, made.loads, router.fronts, log)
        HostMetrics(paths.status_file)
        self._metrics = FrontMetrics(self.fronts, self.door)
        self.fronts.start()

    def services(self) -> list[Coroutine[Any, Any, None]]:
        return [self.door.serve(), self.fronts.watch(), self.house.shell.watch()]

    def close(self) -> None:
        self._metrics.close()
        self.fronts.close()
        self.door.close()
        self.house.close()
