"""vLLM's executor over our own ranks: the leader's worker in this process, the others by messages (worker.ranks).

Every call goes to all ranks; each ends a call by saying what it heard, what it found (digests) and with which weights,
which must be those that the group was last said to compute with. So ranks that have come apart (a step, a layout, a
token, a weight version) end the worker instead of making wrong tokens. A rank that fails in a call ends its process,
and with it the worker; only "follow the weights" may be refused, and until all of them have followed no step is taken.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor.abstract import Executor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

from belayer.clock import monotonic
from belayer.errors import BelayerError, Refused, WorkerFailed
from belayer.messages.common import ErrorReply
from belayer.rpc import raise_if_error, to_reply
from belayerd.worker.adapter import steps
from belayerd.worker.adapter.gloo import Group, join
from belayerd.worker.adapter.seat import seat
from belayerd.worker.priority import come_back
from belayerd.worker.ranks import Answer, Call, Line, Mapped, apart

PULSE_S = 0.1
_FOLLOW = "follow_weights"

# Calls whose results must be the same on all ranks, and calls whose results are the leader's own affair.
_SAME = frozenset(
    {
        "get_kv_cache_spec", "get_supported_kv_cache_layouts", "determine_available_memory", "get_supported_tasks",
        "assert_arena", "set_kv_cache_layout",
    }
)  # fmt: skip
_ANY = frozenset(
    {
        "compile_or_warm_up_model", "reset_mm_cache", "reset_encoder_cache", "synchronize_device", "sleep", "wake_up",
        "execute_dummy_batch", "supports_draft_weight_updates", "update_max_model_len",
    }
)  # fmt: skip


def digest(thing: Any) -> bytes:
    return hashlib.sha256(repr(thing).encode()).digest()


def _answer(call: Call, found: bytes, refused: ErrorReply | None = None) -> Answer:
    grant = seat().weights.grant
    heard = hashlib.sha256(call.method.encode() + call.args).digest()
    return Answer(
        serial=call.serial, heard=heard, found=found, version=grant.version, weights=grant.digest, refused=refused
    )


def _done_or_why(act: Callable[[], Any]) -> tuple[Any, ErrorReply | None]:
    try:
        return act(), None
    except BelayerError as why:  # nothing but the mapping may have changed, and the answer says which it is
        return None, to_reply(why)


def _tokens(output: Any) -> Any:
    """What a step made, in words that two ranks share."""
    return None if output is None else (output.req_ids, output.sampled_token_ids)


def build(config: VllmConfig, group: Group) -> WorkerWrapperBase:
    """This process's worker, loaded. Blocks until the others build theirs."""
    register_all_kvcache_specs(config)
    join(group)
    worker = WorkerWrapperBase(rpc_rank=0, global_rank=group.rank)
    # The process group exists, so the method is not used; its last part becomes the name of vLLM's shared memory.
    kwargs = dict(
        vllm_config=config, local_rank=group.rank, rank=group.rank,
        distributed_init_method=f"file:///{group.name()}", is_driver_worker=group.rank == 0,
    )  # fmt: skip
    worker.init_worker(all_kwargs=[kwargs])
    worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(config)
    return worker


def _made(config: VllmConfig, specs: list[Any], memory: list[int], leader: Any, rank: int) -> Any:
    made = get_kv_cache_configs(config, specs, memory)[rank]
    made.kv_cache_layout, made.hash_block_size, made.cache_hit_alignment_tokens = leader
    return made


class GroupExecutor(Executor):
    """The leader's side."""

    def _init_executor(self) -> None:
        if self.model_config.is_multimodal_model or self.model_config.runner_type != "generate":
            raise WorkerFailed("several ranks compute models of text that generate only", remedy="tensor_parallel = 1")
        held = seat()
        if held.ranks is None or held.ranks.size != self.parallel_config.world_size:
            raise WorkerFailed(f"this worker has no {self.parallel_config.world_size} ranks")
        self._ranks = held.ranks
        self._last_pulse = monotonic()
        self._serial = 0
        self._ranks.tell(Call("build"))
        self._worker = build(self.vllm_config, Group(0, self._ranks.size, held.meet))
        built = [msgspec.msgpack.decode(data, type=Answer) for data in self._ranks.answers()]
        self._map(built)
        self._in_step("build", _answer(Call("build"), b""), built)
        self._even_or_refuse()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        if not isinstance(method, str) or kwargs or method not in _SAME | _ANY | {_FOLLOW}:
            raise Refused(f"{method} cannot be called on an engine of several ranks", kept="the engine as it is")
        data = msgspec.msgpack.encode(args)
        if method == _FOLLOW:
            mine = self._follow(data, args)
        else:
            mine = self._call(method, data, lambda: run_method(self._worker, method, args, {}))
        result = [mine, *(copy.deepcopy(mine) for _ in self._ranks.lines)]
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def _call(self, method: str, data: bytes, mine: Callable[[], Any], said: Callable[[Any], Any] | None = None) -> Any:
        """``mine()`` in step with the ranks; ``said`` picks what all must agree on."""
        call = self._tell(method, data)
        result = mine()
        expected = _answer(call, digest(said(result) if said else result if method in _SAME else None))
        answers = [msgspec.msgpack.decode(answer, type=Answer) for answer in self._ranks.answers()]
        self._in_step(method, expected, answers)
        return result

    def _tell(self, method: str, data: bytes) -> Call:
        self._serial += 1
        call = Call(method, data, self._serial)
        self._ranks.tell(call)
        return call

    def _follow(self, data: bytes, args: tuple[Any, ...]) -> Any:
        """Every rank moves to the owner's last version. Raises what the first that could not gave as its reason; then
        some may have moved, no step is taken, and the call can be made again: who has moved verifies its bytes anew."""
        call = self._tell(_FOLLOW, data)
        mine, refused = _done_or_why(lambda: run_method(self._worker, _FOLLOW, args, {}))
        answers = [msgspec.msgpack.decode(answer, type=Answer) for answer in self._ranks.answers()]
        self._map(answers)
        self._in_step(_FOLLOW, _answer(call, digest(None)), answers)
        for one in (refused, *(answer.refused for answer in answers)):
            raise_if_error(one)
        self._even_or_refuse()
        return mine

    def _map(self, answers: list[Answer]) -> None:
        seat().others = tuple(Mapped(answer.version, answer.weights) for answer in answers)

    def _even_or_refuse(self) -> None:
        """Raises WorkerFailed while the ranks compute with parts of different versions."""
        versions = [seat().weights.grant.version, *(other.version for other in seat().others)]
        if len(set(versions)) > 1:
            raise WorkerFailed(
                f"the ranks map weights of versions {', '.join(map(str, versions))}",
                kept="no step is taken",
                remedy="FollowWeights again, or a new worker",
            )

    def _in_step(self, method: str, mine: Answer, answers: list[Answer]) -> None:
        for rank, (answer, mapped) in enumerate(zip(answers, seat().others, strict=True), start=1):
            why = apart(msgspec.structs.replace(mine, version=mapped.version, weights=mapped.digest), answer)
            if why:
                raise WorkerFailed(
                    f"rank {rank} and the leader have come apart in {method}: {why}",
                    kept="nothing of this step is sent",
                    remedy="this worker ends; the shadow goes on from the last token",
                )

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Each rank makes its own from the same rule; what crosses is what the engine core has decided since."""
        one = kv_cache_configs[0]
        decided = (one.kv_cache_layout, one.hash_block_size, one.cache_hit_alignment_tokens)
        data = msgspec.msgpack.encode(decided)
        self._call(
            "initialize_from_config", data, lambda: self._worker.initialize_from_config(kv_cache_configs),
            lambda _: one,
        )  # fmt: skip

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._even_or_refuse()
        data = steps.encode_step(scheduler_output)
        output = self._call("execute_model", data, lambda: self._worker.execute_model(scheduler_output), _tokens)
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        data = steps.encode_grammar(grammar_output)
        output = self._call("sample_tokens", data, lambda: self._worker.sample_tokens(grammar_output), _tokens)
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def promote(self, epoch: int, owner_generation: int) -> None:
        """The arenas of the ranks, after the leader's own: the lease is of all or the worker ends."""
        self._call("promote", msgspec.msgpack.encode((epoch, owner_generation)), lambda: None)

    def pulse(self) -> None:
        """In a turn without a step: every rank answers, or this loop, and with it the heartbeat, stands still."""
        if monotonic() - self._last_pulse >= PULSE_S:
            self._call("pulse", b"", lambda: None)
            self._last_pulse = monotonic()

    def check_health(self) -> None:
        """Whether the ranks live is watched by ``worker.ranks``."""

    def shutdown(self) -> None:
        """The ranks end with this process."""


def serve(args: EngineArgs, group: Group, line: Line) -> None:
    """A rank's life: do what the leader says, and say what came of it. Ends with the process."""
    config = args.create_engine_config()
    worker: Any = None
    while True:
        call = msgspec.msgpack.decode(line.receive(), type=Call)
        if call.method == "build":
            worker = build(config, group)
            line.send(msgspec.msgpack.encode(_answer(call, b"")))
            continue
        if call.method == _FOLLOW:
            args = tuple(msgspec.msgpack.decode(call.args))
            _, refused = _done_or_why(partial(run_method, worker, _FOLLOW, args, {}))
            line.send(msgspec.msgpack.encode(_answer(call, digest(None), refused)))
            continue
        found = digest(_do(worker, config, group, call))
        line.send(msgspec.msgpack.encode(_answer(call, found)))


def _do(worker: Any, config: VllmConfig, group: Group, call: Call) -> Any:
    match call.method:
        case "pulse":
            return None
        case "promote":
            come_back()
            seat().arena.promote(*msgspec.msgpack.decode(call.args))
            return None
        case "execute_model":
            return _tokens(worker.execute_model(steps.decode_step(call.args)))
        case "sample_tokens":
            return _tokens(worker.sample_tokens(steps.decode_grammar(call.args)))
        case "initialize_from_config":
            return _initialize(worker, config, group, msgspec.msgpack.decode(call.args))
        case "set_kv_cache_layout":
            (config.cache_config.kv_cache_layout,) = msgspec.msgpack.decode(call.args)
    result = run_method(worker, call.method, tuple(msgspec.msgpack.decode(call.args)), {})
    return result if call.method in _SAME else None


def _initialize(worker: Any, config: VllmConfig, group: Group, decided: Any) -> Any:
    with set_current_vllm_config(config):
        spec = worker.get_kv_cache_spec()
        memory = worker.determine_available_memory()
        made = _made(config, [spec] * group.size, [memory] * group.size, decided, group.rank)
    worker.worker.initialize_from_config(made)
    return made
