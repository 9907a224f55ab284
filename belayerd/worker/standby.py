"""What a standby does before it may be called ready: use everything once, and take the oracle.

First use of a feature costs (kernels are chosen, grammars compiled, tables built); a takeover must not pay for it.
The warm-up also proves resume on this very engine: a seeded request cut in two must give the tokens of the whole one.
All of it happens in the private view of the arena.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from belayer.clock import Stopwatch, wall
from belayer.errors import WorkerFailed
from belayer.messages.worker import Oracle
from belayerd.worker.adapter.core import INTERNAL, Core, is_error

_LONG = 48  # tokens of the warm-up's prefill, cut to what the engine takes
_SHORT = 6
_ORACLE_LENGTH = 4  # short: it runs inside a handover, where the time to read all weights once is what it costs


def _request(name: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"belayer-{name}",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=wall(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        client_index=INTERNAL,
    )


def _prompt(length: int, vocab: int) -> list[int]:
    """Token ids that every vocabulary has; fixed, because the oracle compares across workers."""
    return [(7 * i + 3) % min(vocab, 1000) for i in range(length)]


def _tokens(outputs: list[EngineCoreOutput], name: str) -> list[int]:
    tokens = [token for out in outputs if out.request_id == f"belayer-{name}" for token in out.new_token_ids]
    if any(is_error(out) for out in outputs):
        raise WorkerFailed(f"the warm-up request {name} ended in an error")
    return tokens


def _seeded(count: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9, seed=20, top_p=0.9, top_k=50, min_p=0.01, max_tokens=count, ignore_eos=True, logprobs=1,
        presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1,
    )  # fmt: skip


def warm_up(core: Core, max_len: int, max_batch: int, vocab: int, laps: Callable[[str], None]) -> None:
    """Run every feature once. ``laps`` is called with a name after each part. Raises WorkerFailed."""
    room = min(_LONG, max_len - 8, max_batch)
    short = _prompt(min(_SHORT, room), vocab)
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2)
    plain = SamplingParams(temperature=0.7, max_tokens=1, logprobs=0)
    # In one step: what a step costs is reading all weights, once for each.
    first = [("long", _prompt(room, vocab), greedy), ("grammar", short, _grammar()), ("plain", short, plain)]
    core.run_alone([_request(*one) for one in first], {})
    laps("features")
    whole = _tokens(core.run_alone([_request("whole", short, _seeded(3))], {}), "whole")
    laps("sampling")
    again = _tokens(core.run_alone([_request("cut", short, _seeded(3))], {"belayer-cut": whole[:1]}), "cut")
    if again != whole[1:] or len(whole) != 3:
        raise WorkerFailed(
            f"a resumed seeded request gave {again} where the whole one gave {whole[1:]}",
            kept="the standby is not offered",
            remedy="the sampler of this vLLM draws otherwise than the adapter expects",
        )
    laps("resume")


def _grammar() -> SamplingParams:
    choice = StructuredOutputsParams(regex="[ab]{2}")
    choice._backend = "xgrammar"  # what vLLM's front end fills in while it checks a request
    return SamplingParams(temperature=0.0, max_tokens=1, structured_outputs=choice)


def take_oracle(core: Core, vocab: int, weight_version: int) -> tuple[Oracle, float]:
    """One greedy token of the fixed prompt, and the milliseconds it took. Raises WorkerFailed."""
    watch = Stopwatch()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, skip_reading_prefix_cache=True)
    outputs = core.run_alone([_request("oracle", _prompt(_ORACLE_LENGTH, vocab), params)], {})
    tokens = _tokens(outputs, "oracle")
    rows = [out.new_logprobs for out in outputs if out.new_logprobs is not None]
    if len(tokens) != 1 or len(rows) != 1:
        raise WorkerFailed(f"the oracle gave {len(tokens)} tokens and {len(rows)} logprobs")
    logprob = float(rows[0].logprobs[0][0])
    return Oracle(weight_version=weight_version, token=tokens[0], logprob=logprob), watch.ms()


def same_oracle(mine: Oracle, expected: Oracle) -> bool:
    """Equal weight version and token, logprob within 1e-3 (another batch shape may round otherwise)."""
    return (
        mine.weight_version == expected.weight_version
        and mine.token == expected.token
        and math.isclose(mine.logprob, expected.logprob, abs_tol=1e-3)
    )
