"""vLLM's engine core without its threads and handshake: our loop calls it, our socket takes its outputs."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from vllm.config import VllmConfig
from vllm.config.reasoning import ReasoningConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from belayer.config import Model, Router, Slot
from belayer.errors import ConfigInvalid
from belayerd import vllm_words
from belayerd.worker.adapter import grammar, kernels, shortcuts
from belayerd.worker.adapter.seat import seat
from belayerd.worker.ranks import Mapped

logger = structlog.get_logger(daemon="worker")

# Outputs of our own requests (warm-up, oracle) go to this client, which is no front.
INTERNAL = 0xFFFF
_GROUP = "belayerd.worker.adapter.group.GroupExecutor"


def engine_args(model: Model, slot: Slot, router: Router | None = None) -> EngineArgs:
    """Settings of a slot's engine. Eager and with explicit KV bytes: no profiling run, no compilation to
    wait for. ``router``: its words for thinking, which the engine counts and behind which a grammar begins; the front
    end has the same, or it would let in what the engine does not do."""
    args = EngineArgs(
        model=model.path,
        served_model_name=[model.name],
        dtype=model.dtype,
        load_format="belayer",
        enforce_eager=True,
        tensor_parallel_size=slot.tensor_parallel,
        distributed_executor_backend=_GROUP if slot.tensor_parallel > 1 else "uni",
        worker_cls="belayerd.worker.adapter.arena.BelayerWorker",
        scheduler_cls="belayerd.worker.adapter.resume.ResumingScheduler",
        kv_cache_memory_bytes=slot.kv_bytes,
        block_size=slot.block_size,
        max_model_len=slot.max_model_len,
        max_num_batched_tokens=slot.max_num_batched_tokens,
        max_num_seqs=slot.max_num_seqs,
        enable_prefix_caching=True,
        disable_log_stats=True,
        seed=0,
    )
    if router is not None and router.thinks():
        args.reasoning_parser = router.reasoning_parser
        args.reasoning_config = ReasoningConfig(
            reasoning_start_str=router.reasoning_start, reasoning_end_str=router.reasoning_end
        )
    return args


def preload(model: Model, slot: Slot, router: Router, args: EngineArgs) -> None:
    """Before the fork: build the configuration and the tokenizer once, which fills vLLM's caches for every child
    (the first look at a model class costs vLLM a whole subprocess, some 8 s). Raises ConfigInvalid."""
    try:
        config = args.create_engine_config()
    except (KeyError, RuntimeError) as why:  # no parser of that name; or the tokenizer lacks its words
        raise ConfigInvalid(f"router.reasoning_parser {router.reasoning_parser!r}: {str(why).strip(chr(39))}") from why
    except ValueError as why:
        said = f"slot {slot.name}: model {model.path} cannot be served: {vllm_words.reason(why)}"
        raise ConfigInvalid(said, remedy=vllm_words.remedy(why)) from why
    grammar.prepare(config.model_config)
    kernels.prepare()
    shortcuts.prepare()


def _nothing() -> None:
    pass


class _Sink:
    """Stands where vLLM puts its output queue; hands each item on at once, in the loop's own thread."""

    def __init__(self, send: Callable[[int, EngineCoreOutputs], None]) -> None:
        self._send = send

    def put_nowait(self, item: tuple[int, EngineCoreOutputs]) -> None:
        self._send(*item)

    def empty(self) -> bool:
        return True


class Core(EngineCoreProc):
    """``send(client_index, outputs)`` gets every output message, in order, one per step and client."""

    def __init__(self, args: EngineArgs, send: Callable[[int, EngineCoreOutputs], None]) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue = _Sink(self._out)
        self._send_out = send
        self.engine_index = 0
        self.engines_running = False
        self.shutdown_state = EngineShutdownState.RUNNING
        self.tensor_ipc_receiver = None
        self.has_coordinator = False
        self.frontend_stats_publish_address = None
        self.publish_dp_lb_stats = False
        self.last_counts = (0, 0)
        self.process_input_queue_block = False
        self.enable_fault_tolerance = False
        self._resumed: set[str] = set()
        self.after_step: Callable[[], None] = _nothing
        self.idle: Callable[[], None] = _nothing  # called in each turn without a step
        self._internal: list[EngineCoreOutput] = []
        config = args.create_engine_config()
        EngineCore.__init__(self, config, Executor.get_class(config), log_stats=False)
        self._vocab = config.model_config.get_vocab_size()
        self._max_len = config.model_config.max_model_len

    def _initialize_kv_caches(self, vllm_config: VllmConfig) -> KVCacheConfig:
        try:
            return super()._initialize_kv_caches(vllm_config)
        except ValueError as why:
            given = vllm_config.cache_config.kv_cache_memory_bytes or 0
            known = vllm_words.too_little_kv(why, given, vllm_config.model_config.max_model_len)
            if known is None:
                raise
            raise known from why

    def add(self, request: EngineCoreRequest, prefix: list[int]) -> None:
        """Take in a request, continuing after the output tokens ``prefix``.

        A request that cannot be taken is answered by an error output and never reaches the model: an id
        outside the vocabulary would end the process in the forward pass, and then the next worker's.
        """
        try:
            self._add(request, prefix)
        # Whatever vLLM's constructors raise about a peer's request concerns that request alone.
        except Exception as why:  # noqa: BLE001
            logger.warning("request_refused", request=request.request_id, why=repr(why))
            self._resumed.discard(request.request_id)
            self._send_error_outputs_to_client([request.request_id], request.client_index)

    def _add(self, request: EngineCoreRequest, prefix: list[int]) -> None:
        if request.request_id in self.scheduler.requests:
            raise ValueError("its id is in use")
        for ids in (request.prompt_token_ids, prefix):
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab):
                raise ValueError(f"token ids {min(ids)} to {max(ids)} are not within the vocabulary of {self._vocab}")
        budget = request.sampling_params.thinking_token_budget if request.sampling_params else None
        known = self.vllm_config.reasoning_config
        if budget is not None and not (known and known.enabled):
            raise ValueError("this engine does not know where thinking ends, so a budget would be without effect")
        if self.mm_receiver_cache is not None and request.mm_features:
            request.mm_features = self.mm_receiver_cache.get_and_update_features(request.mm_features)
        if prefix:
            if request.sampling_params is None or request.resumable:
                raise ValueError("a pooling or streaming-input request cannot be continued")
            # Prompt logprobs went out with the first token; asking again would deliver them twice.
            request.sampling_params.prompt_logprobs = None
            request.sampling_params.skip_reading_prefix_cache = False
        req = Request.from_engine_core_request(request, self.request_block_hasher)
        if prefix and self._answered_by(req, prefix):
            return
        if req.use_structured_output:
            self.structured_output_manager.grammar_init(req)
        self.add_request(req, request.current_wave)

    def _answered_by(self, req: Request, prefix: list[int]) -> bool:
        """Put ``prefix`` in; True when the prefix is already the whole output, which is then answered
        here."""
        req.append_output_token_ids(list(prefix))
        status = req.status
        if check_stop(req, self._max_len):
            done = EngineCoreOutput(
                req.request_id, [], finish_reason=req.get_finished_reason(), stop_reason=req.stop_reason
            )
            outputs = EngineCoreOutputs(outputs=[done], finished_requests={req.request_id})
            outputs.weight_version = self._weight_version
            self._out(req.client_index, outputs)
            return True
        req.status, req.stop_reason = status, None
        req.prefill_stats = None
        self._resumed.add(req.request_id)
        return False

    def abort(self, request_ids: list[str]) -> None:
        self._handle_client_request(EngineCoreRequestType.ABORT, request_ids)
        self._resumed.difference_update(request_ids)

    def utility(self, call: Any) -> None:
        """``call``: (client_index, call_id, method, args); answered through ``send``."""
        self._handle_client_request(EngineCoreRequestType.UTILITY, call)

    def weight_version(self) -> str:
        return str(self._weight_version)

    def drop(self, client: int) -> list[str]:
        """Abort all that runs for a front, without an output; the ids."""
        ids = [one.request_id for one in self.scheduler.requests.values() if one.client_index == client]
        if ids:
            self.abort(ids)
        return ids

    def refuse(self, request: EngineCoreRequest) -> None:
        self.refuse_id(request.request_id, request.client_index)

    def refuse_id(self, request_id: str, client: int) -> None:
        self._send_error_outputs_to_client([request_id], client)

    def turn(self) -> bool:
        """One step when there is work; True when the model ran."""
        if self.has_work():
            ran = bool(self._process_engine_step())
            self.after_step()
            seat().stepped()
            return ran
        self._notify_idle_state_callbacks()
        self.idle()
        return False

    def take_leases(self, epoch: int, owner_generation: int) -> None:
        """The arenas of the other ranks, where there are any. Raises WorkerFailed: this worker then holds a part of the
        slot and must end."""
        if self.vllm_config.parallel_config.world_size > 1:
            self.model_executor.promote(epoch, owner_generation)

    def others(self) -> tuple[Mapped, ...]:
        """What ranks 1 and up map of the weights."""
        return seat().others

    def held(self) -> bool:
        """Whether whoever called the engine's own pause keeps it from every step: requests may wait for hours."""
        return bool(self.is_scheduler_paused()) and not self.has_work()

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        running, waiting = self.scheduler.get_request_counts()
        return int(running), int(waiting)

    def run_alone(self, requests: list[EngineCoreRequest], prefixes: dict[str, list[int]]) -> list[EngineCoreOutput]:
        """Run our own requests to their end and return their outputs; other clients' requests run along, but not under
        a pause of the engine's own."""
        self._internal = []
        waiting = {request.request_id for request in requests}
        with self._pause_lifted():
            for request in requests:
                self._add(request, prefixes.get(request.request_id, []))
            while waiting:
                self.turn()
                waiting -= {out.request_id for out in self._internal if out.finish_reason is not None}
            while self.has_work() and not self.scheduler.has_unfinished_requests():
                self.turn()  # the step that clears finished requests out of the runner
        return self._internal

    @contextmanager
    def _pause_lifted(self) -> Iterator[None]:
        """A trainer's /pause takes up nothing that waits, ours neither, which would be waited for without end (an
        update under a pause is what trainers do). So it is lifted with the others' requests put aside: they stay
        paused."""
        scheduler, state = self.scheduler, self.scheduler.pause_state
        if state is PauseState.UNPAUSED:
            yield
            return
        theirs, scheduler.waiting = scheduler.waiting, create_request_queue(scheduler.policy)
        scheduler.set_pause_state(PauseState.UNPAUSED)
        try:
            yield
        finally:
            theirs.prepend_requests(scheduler.waiting)  # what was running and had to wait meanwhile
            scheduler.waiting = theirs
            scheduler.set_pause_state(state)

    def _out(self, client: int, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if output.request_id in self._resumed:
                # Queue times and cached-token counts belong to the first life; a second set would falsify
                # both.
                output.events = None
                output.prefill_stats = None
                if output.finish_reason is not None:
                    self._resumed.discard(output.request_id)
        outputs.engine_index = self.engine_index
        if client == INTERNAL:
            self._internal.extend(outputs.outputs)
        else:
            self._send_out(client, outputs)


def is_error(output: EngineCoreOutput) -> bool:
    return output.finish_reason is not None and output.finish_reason == FinishReason.ERROR
