"""vLLM's own HTTP front end, served by the router: all its routes, no route of ours in their place."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from belayer.config import Config
from belayer.errors import ConfigInvalid, HostUnfit
from belayerd import vllm_words
from belayerd.router import vllm_apis
from belayerd.router import vllm_seam as seam
from belayerd.router.answer import hints
from belayerd.router.client import LEAVING, BelayerClient, RouterFault, cut_short
from belayerd.router.events import SameId
from belayerd.router.front_loads import Loads
from belayerd.router.guard import Bounds, Guard
from belayerd.router.heart import Heart
from belayerd.router.one_of_many import OneOfMany
from belayerd.router.patience import patient
from belayerd.router.preflight import is_loopback, one_model
from belayerd.router.remote_heart import RemoteHeart
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


class Front:
    """vLLM's engine object over our client, and its HTTP server. Make it inside the running event loop, attach the
    heart, then ``serve``."""

    def __init__(self, config: Config, codec: seam.Codec, args: Namespace | None = None) -> None:
        """``args``: what ``server_args`` says of this configuration, if it was asked already. Raises HostUnfit."""
        seam.check()
        self._args = args or server_args(config)
        router = config.router
        self._unread_s = router.write_deadline_s
        ports = {slot.url_port: slot.name for slot in config.slot if slot.url_port}
        self._bounds = Bounds(
            body_bytes=router.max_body_mb << 20,
            body_s=router.read_deadline_s,
            requests=router.max_requests,
            ports=ports,
            thinks=router.thinks(),
            same_id=SameId(router.same_id),
        )
        client: list[BelayerClient] = []

        def make_client(vllm_config: Any, renderer: Any, log_stats: bool) -> BelayerClient:
            client.append(BelayerClient(vllm_config, renderer, [slot.name for slot in config.slot], codec))
            return client[0]

        try:
            self._engine = seam.make_engine(self._args, make_client, self._healthy, LEAVING, cut_short)
        except (OSError, RuntimeError, ValueError) as why:  # what vLLM and transformers raise for such a model
            said = f"model {self._args.model} cannot be served: {vllm_words.reason(why)}"
            raise HostUnfit(said, remedy=vllm_words.remedy(why)) from why
        self.client = client[0]
        self._heart: Heart

    def attach(self, heart: Heart) -> None:
        self._heart = heart
        self.client.attach(heart, self._engine.output_processor)

    async def _healthy(self) -> bool:
        """Of the slot whose URL was used, or of any."""
        ticket = TICKET.get()
        return await self._heart.serving(ticket.pin if ticket else "")

    async def abort(self, names: Sequence[str] | None) -> int:
        """End requests of this front, by the ids of their clients; None: all. How many."""
        processor = self._engine.output_processor
        if names is None:
            every = [*processor.request_states, *processor.parent_requests]
            await self._engine.abort(every, internal=True)
            return len(every)
        known = sum(len(processor.external_req_ids.get(name, ())) for name in names)
        await self._engine.abort(list(names))
        return known

    async def serve(
        self,
        sock: socket.socket,
        slots: dict[str, socket.socket],
        started: Callable[[], None],
        loads: Loads | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT (vLLM's server takes both); calls ``started`` when it begins. ``slots``: the
        sockets of slots with a URL of their own. ``loads``: of several fronts that accept from these sockets. Raises
        RuntimeError when the server ends unasked."""
        able = await self._engine.get_supported_tasks()
        app = seam.build_app(self._args, able, self._engine.model_config)
        await seam.init_app_state(self._engine, app.state, self._args, able)
        vllm_apis.end_by_error(app.state)
        app.middleware_stack = None  # vLLM has built it; without that it is built again, with these
        if isinstance(self._heart, RemoteHeart):
            app.add_middleware(OneOfMany, heart=self._heart)
        app.add_middleware(Guard, heart=self._heart, bounds=self._bounds)
        app.add_exception_handler(RouterFault, answer_fault)
        started()  # the socket listens since preflight: from here on what is queued there gets answers
        how = {
            "http": patient(self._bounds.body_s, self._heart.declined, self._unread_s),
            "log_level": "warning",
            "access_log": False,
            "timeout_graceful_shutdown": int(GRACE_S),
        }
        mine = [loads.of(port) if loads else None for port in range(1 + len(slots))]
        beside = [seam.NoSignalServer(uvicorn.Config(app, lifespan="off", **how), peer_loads=load) for load in mine[1:]]
        tasks = [asyncio.create_task(one.serve([own])) for one, own in zip(beside, slots.values(), strict=True)]
        try:
            where = {"sock": sock, "host": self._args.host, "port": self._args.port}
            ended = await seam.serve_http(app, peer_loads=mine[0], **where, **how)
            await ended
            for one in beside:
                one.should_exit = True
            await asyncio.gather(*tasks)
            if not self.client.stopping:
                raise RuntimeError("vLLM's front end ended by itself: its output handler broke")
        finally:
            self._engine.shutdown(timeout=0)
            for listening in (sock, *slots.values()):
                listening.close()


async def answer_fault(request: Request, fault: Exception) -> JSONResponse:
    """A typed error before the first byte of an answer: vLLM's error shape, our code as its type."""
    assert isinstance(fault, RouterFault)
    status = int(fault.http_status)
    body = {"error": {"message": fault.message, "type": str(fault.code), "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=hints(status, fault.code))
