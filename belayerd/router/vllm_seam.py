"""The one module of the router that touches vLLM: every name taken from it, checked at start and refused by name.

vLLM's front end talks to its engine through one object, made by ``EngineCoreClient.make_async_mp_client`` and held as
``AsyncLLM.engine_core``. ``make_engine`` puts a client of ours there; everything above it runs unmodified. Internal
API: pinned to one minor version, and ``check`` proves at start that what the client inherits and fills in is there.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import vllm.v1.engine.async_llm as async_llm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import NoSignalServer, serve_http
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMServerError
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.version import __version__ as VERSION

from belayer.errors import HostUnfit
from belayerd.router import fidelity, vllm_apis
from belayerd.router.ticket import TICKET, Ticket
from belayerd.router.vllm_codec import Codec

PINNED = "0.32."

__all__ = [
    "VERSION",
    "AsyncMPClient",
    "BackgroundResources",
    "Codec",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "GenerationError",
    "GracefulHTTPError",
    "NoSignalServer",
    "build_app",
    "check",
    "init_app_state",
    "make_engine",
    "parse_args",
    "serve_http",
    "utility_failed",
]

_FACTORY = "vllm_config executor_class log_stats client_addresses client_count client_index renderer"  # in this order
_INHERITED = (
    "call_utility_all_async call_utility_consensus_async collective_rpc_async dp_engines_running "
    "get_kv_event_sources is_sleeping_async pause_scheduler_async reset_prefix_cache_async resume_scheduler_async "
    "set_weight_version_async get_weight_version_async wake_up_async sleep_async _apply_ready_response"
)
_OVERRIDDEN = (
    "add_request_async abort_requests_async get_output_async get_supported_tasks_async call_utility_async "
    "_call_utility_async _ensure_output_queue_task ensure_alive shutdown"
)
_OUTPUTS = "engine_index outputs scheduler_stats utility_output weight_version"
_OUTPUT = "request_id new_token_ids finish_reason prefill_stats events"
_REQUEST = "request_id external_req_id sampling_params client_index resumable session_id"


def check() -> None:
    """Raise HostUnfit naming the first thing of this vLLM that is not as the router needs it."""
    problem = next(problems(), None)
    if problem is not None:
        raise HostUnfit(
            f"vLLM {VERSION} does not fit belayer-router: {problem}", remedy=f"install vLLM {PINNED}x (make setup)"
        )


def problems(
    version: str = VERSION,
    owner: Any = async_llm.EngineCoreClient,
    client: Any = AsyncMPClient,
    resources: Any = BackgroundResources,
    structs: Sequence[Any] = (EngineCoreOutputs, EngineCoreOutput, EngineCoreRequest),
    sampling: Any = SamplingParams,
) -> Iterator[str]:
    """Each thing that is not as needed, in words. The arguments are this vLLM's own; a test gives others."""
    if not version.startswith(PINNED):
        yield f"{version} is not the pinned {PINNED}x"
    factory = inspect.signature(owner.make_async_mp_client)
    if list(factory.parameters) != _FACTORY.split():
        yield f"make_async_mp_client takes {list(factory.parameters)}"
    for name in (*_INHERITED.split(), *_OVERRIDDEN.split()):
        if not callable(getattr(client, name, None)):
            yield f"{client.__name__}.{name} is missing"
    for kind, wanted in zip(structs, (_OUTPUTS, _OUTPUT, _REQUEST), strict=True):
        missing = set(wanted.split()) - set(kind.__struct_fields__)
        if missing:
            yield f"{kind.__name__} lacks {', '.join(sorted(missing))}"
    if new := fidelity.unknown(sampling.__struct_fields__, structs[-1].__struct_fields__):
        yield f"its requests have {', '.join(new)}, of which nobody has said what becomes of it when a worker dies"
    yield from vllm_apis.problems()
    if "engine_dead" not in resources.__dataclass_fields__:
        yield f"{resources.__name__}.engine_dead is missing"


def parse_args(argv: Sequence[str]) -> Namespace:
    """vLLM's own server arguments, checked by vLLM. Raises what argparse and vLLM raise."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv))
    validate_parsed_serve_args(args)
    return args


def make_engine(
    args: Namespace,
    make_client: Callable[..., Any],
    healthy: Callable[[], Awaitable[bool]],
    leaving: ContextVar[bool],
    cut_short: Callable[[Ticket], Exception],
) -> Any:
    """vLLM's AsyncLLM over the client that ``make_client(vllm_config, renderer, log_stats)`` returns.

    ``healthy``: /health and /ping answer 503 while it says False. ``leaving`` is True inside the aborts of requests
    whose client went away. ``cut_short``: what ends an answer that was aborted, where its API would tell it as a whole
    one. Call it inside the running event loop.
    """

    class Factory:
        @staticmethod
        def make_async_mp_client(vllm_config: Any, log_stats: bool, renderer: Any = None, **_: Any) -> Any:
            return make_client(vllm_config, renderer, log_stats)

    class FrontEngine(async_llm.AsyncLLM):
        async def generate(self, *args: Any, **named: Any) -> AsyncGenerator[Any, None]:
            """As it is, and counted on the ticket of the HTTP request."""
            ticket = TICKET.get()
            if ticket is not None:
                ticket.prompts += 1
            async with aclosing(super().generate(*args, **named)) as outputs:
                async for output in outputs:
                    if ticket is not None:
                        for choice in output.outputs:
                            ticket.took(choice.index, len(choice.token_ids), whole=False)
                            if ticket.whole and choice.finish_reason == "abort":
                                raise cut_short(ticket)
                    yield output
                    if ticket is not None:
                        ticket.asks_on()

        async def abort(self, request_id: Any, internal: bool = False) -> None:
            before = leaving.set(True)
            try:
                await super().abort(request_id, internal)
            finally:
                leaving.reset(before)

        async def check_health(self) -> None:
            await super().check_health()
            if not await healthy():
                raise EngineDeadError()  # vLLM's routes know this one: 503

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    original = async_llm.EngineCoreClient
    async_llm.EngineCoreClient = Factory  # AsyncLLM has no parameter for its client; restored below
    try:
        return FrontEngine.from_vllm_config(config, usage_context=UsageContext.OPENAI_API_SERVER)
    finally:
        async_llm.EngineCoreClient = original


def utility_failed(message: str) -> Exception:
    """What an engine says when an admin call fails: 500 with its words."""
    error: Exception = VLLMServerError(message)
    return error
