"""vLLM's own HTTP front end, served by the router: all its routes, no route of ours in their place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from belayer.config import Config
from belayer.errors import ConfigInvalid, ErrorCode, HostUnfit
from belayer.fleet_keys import Pair
from belayer.messages.fleet import Life
from belayerd.router import journal
from belayerd.router import vllm_seam as seam
from belayerd.router.client import LEAVING, BelayerClient, RouterFault
from belayerd.router.core import Core, Limits
from belayerd.router.events import OnDeath, SameId
from belayerd.router.fleet import Fleet, fingerprint
from belayerd.router.fleet_metrics import FleetMetrics
from belayerd.router.guard import RETRY_AFTER_S, Bounds, Guard
from belayerd.router.journal_reader import read
from belayerd.router.metrics import Metrics
from belayerd.router.patience import patient
from belayerd.router.preflight import is_loopback, one_model
from belayerd.router.shell import Shell, Sink, to_record
from belayerd.router.ticket import TICKET

GRACE_S = 5.0  # after SIGTERM: streams get their error chunk, then connections are closed


def server_args(config: Config) -> Namespace:
    """vLLM's server arguments from our configuration. Its admin routes (weights, pause, collective_rpc) have no
    guard of their own, so they exist only where nobody but this host can reach them."""
    model, router = one_model(config), config.router
    os.environ["VLLM_SERVER_DEV_MODE"] = "1" if is_loopback(router.host) else "0"
    length = min(slot.max_model_len for slot in config.slot)
    argv = f"--host {router.host} --port {router.port} --dtype {model.dtype} --max-model-len {length}".split()
    argv += ["--model", model.path, "--served-model-name", model.name, model.path]
    argv += ["--enable-scale-out", "--enforce-eager", "--disable-uvicorn-access-log"]
    argv += ["--allowed-origins", "[]"]  # no page in a browser of this host may reach the admin routes
    argv += ["--max-num-seqs", str(sum(slot.max_num_seqs for slot in config.slot))]
    if router.tool_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", router.tool_parser]
    if router.reasoning_parser:
        argv += ["--reasoning-parser", router.reasoning_parser]
    if router.reasoning_start or router.reasoning_end:
        words = {"reasoning_start_str": router.reasoning_start, "reasoning_end_str": router.reasoning_end}
        argv += ["--reasoning-config", json.dumps(words)]
    try:
        return seam.parse_args(argv)
    except (KeyError, TypeError, ValueError) as why:  # what vLLM raises for a parser that it does not know
        raise ConfigInvalid(f"router: {str(why).strip(chr(39))}") from why


def limits(config: Config) -> Limits:
    router = config.router
    wishes = {slot.name: OnDeath(slot.on_death or router.on_death) for slot in config.slot}
    return Limits(
        deaths=router.deaths_per_request,
        home_s=router.request_deadline_s / 4,
        waiting_s=router.request_deadline_s,
        silence_s=router.silence_s,
        journal_every=router.journal_every,
        keep_bytes=router.keep_finished_mb << 20,
        same_id=SameId(router.same_id),
        on_death=wishes,
        capacity={slot.name: slot.max_num_seqs for slot in config.slot} if config.fleet.listen else {},
    )


class Front:
    """Engine, shell and HTTP server of one router. Make it inside the running event loop."""

    def __init__(
        self, config: Config, folder: Any, instance: str, log: Any, pair: Pair | None = None, life: Life | None = None
    ) -> None:
        """``pair`` and ``life``: with both, this router is one of a fleet."""
        seam.check()
        self._args = server_args(config)
        router = config.router
        self.core = Core(limits(config))
        ports = {slot.url_port: slot.name for slot in config.slot if slot.url_port}
        self._bounds = Bounds(
            router.max_body_mb << 20, router.read_deadline_s, router.max_requests, ports, router.thinks()
        )
        self._declined: Counter[str] = Counter()
        self._mistakes: Counter[int] = Counter()
        codec = seam.Codec()
        client: list[BelayerClient] = []

        def make_client(vllm_config: Any, renderer: Any, log_stats: bool) -> BelayerClient:
            client.append(BelayerClient(vllm_config, renderer, [slot.name for slot in config.slot], codec))
            return client[0]

        try:
            self._engine = seam.make_engine(self._args, make_client, self._healthy, LEAVING)
        except (OSError, RuntimeError, ValueError) as why:  # what vLLM and transformers raise for an unreadable model
            first = str(why).strip().splitlines()[0]
            raise HostUnfit(f"model {self._args.model} cannot be served: {first}") from why
        earlier = read(folder, named_only=True)
        for damage in earlier.damage:
            log.warning("journal_damaged", where=damage)
        book = journal.Journal(folder, instance, router.journal_max_mb << 20, self._live, router.journal_sync)
        self.fleet = None
        sink: Sink = client[0]
        if pair is not None and life is not None:
            model = one_model(config)
            self.fleet = Fleet(config, pair, life, model, fingerprint(model, router, seam.VERSION), codec, log)
            sink = self.fleet.sink(sink)
        self.shell = Shell(self.core, book, codec, sink, client[0].client_index, log)
        self.shell.link_silence_s = router.link_silence_s
        if self.fleet is not None:
            self.fleet.attach(self.shell)
        self._client = client[0]
        self._client.attach(self.shell, self._engine.output_processor)
        self.shell.recover(story.past() for story in earlier.stories.values())
        self.metrics = Metrics(self.core, book, self._declined, self._mistakes)
        self.fleet_metrics = None if self.fleet is None else FleetMetrics(self.fleet.status)
        self.url = f"http://{router.host}:{router.port}"
        self.slot_urls = {name: f"http://{router.host}:{port}" for port, name in ports.items()}

    def _live(self) -> list[journal.Record]:
        return [record for effect in self.core.live_records() if (record := to_record(effect)) is not None]

    def _healthy(self) -> bool:
        """Of the slot whose URL was used, or of any."""
        ticket = TICKET.get()
        if ticket is None or not ticket.pin:
            return self.core.serving > 0
        return ticket.pin in self.shell.serving_slots()

    async def serve(self, sock: socket.socket, slots: dict[str, socket.socket], started: asyncio.Event) -> None:
        """Serve until SIGTERM or SIGINT (vLLM's server takes both); sets ``started`` when it begins. ``slots``: the
        sockets of slots with a URL of their own. Raises RuntimeError when the server ends unasked."""
        able = await self._engine.get_supported_tasks()
        app = seam.build_app(self._args, able, self._engine.model_config)
        await seam.init_app_state(self._engine, app.state, self._args, able)
        app.middleware_stack = None  # vLLM has built it; without that it is built again, with these two
        app.add_middleware(Guard, core=self.core, bounds=self._bounds, declined=self._declined, mistakes=self._mistakes)
        app.add_exception_handler(RouterFault, answer_fault)
        started.set()  # the socket listens since preflight: from here on what is queued there gets answers
        how = {
            "http": patient(self._bounds.body_s, self._declined),
            "log_level": "warning",
            "access_log": False,
            "timeout_graceful_shutdown": int(GRACE_S),
        }
        beside = [Beside(app, **how) for _ in slots]
        tasks = [asyncio.create_task(one.serve([own])) for one, own in zip(beside, slots.values(), strict=True)]
        try:
            ended = await seam.serve_http(app, sock=sock, host=self._args.host, port=self._args.port, **how)
            await ended
            for one in beside:
                one.should_exit = True
            await asyncio.gather(*tasks)
            if not self._client.stopping:
                raise RuntimeError("vLLM's front end ended by itself: its output handler broke")
        finally:
            self._engine.shutdown(timeout=0)
            self.shell.close()
            if self.fleet is not None and self.fleet_metrics is not None:
                self.fleet.close()
                self.fleet_metrics.close()
            self.metrics.close()
            for listening in (sock, *slots.values()):
                listening.close()


class Beside(uvicorn.Server):
    """Another port of the same application. Signals are taken by the server of the first one."""

    def __init__(self, app: Any, **how: Any) -> None:
        super().__init__(uvicorn.Config(app, lifespan="off", **how))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def answer_fault(request: Request, fault: Exception) -> JSONResponse:
    """A typed error before the first byte of an answer: vLLM's error shape, our code as its type."""
    assert isinstance(fault, RouterFault)
    status = int(fault.http_status)
    body = {"error": {"message": fault.message, "type": str(fault.code), "param": None, "code": status}}
    # Clients repeat a 5xx by themselves; a request that kills workers must not come back in that way.
    headers = {"x-should-retry": "false"} if fault.code is ErrorCode.POISON_REQUEST else {}
    if status == 503:
        headers = {"retry-after": str(RETRY_AFTER_S)}
    return JSONResponse(body, status_code=status, headers=headers)
