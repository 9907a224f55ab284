"""What vLLM's front end holds for its engine, in a process of its own: clients that leave, or ask for what cannot be,
cost themselves and nobody else, and nothing of them stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import PrefillStats

from belayer.errors import WorkerGone
from belayerd.router.client import LEAVING, BelayerClient, Failure, RouterFault
from belayerd.router.remote_heart import RemoteHeart
from belayerd.router.ticket import TICKET, Ticket
from tests.contract.test_hearts import Stage, play


def request(request_id: str, **more: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA)
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__) | {
        "request_id": request_id,
        "external_req_id": request_id.rpartition("-")[0],
        "sampling_params": params,
        "prompt_token_ids": [1, 2],
        "arrival_time": 0.0,
        "resumable": False,
        "abort_immediately": False,
    }
    return EngineCoreRequest(**(fields | more))


class Front:
    """A client and its connection to the router, as in a front's own process."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.client = BelayerClient(None, None, ["s"], stage.codec)
        self.client._welcomed = True  # it has no configuration into which a worker's ready info would go
        self.processor = OutputProcessor(None, log_stats=False)
        self.heart: RemoteHeart

    async def begin(self) -> None:
        self.heart = await self.stage.front(1, self.client)  # type: ignore[arg-type]
        self.reads = self.stage.tasks[-1]
        self.client.attach(self.heart, self.processor)

    async def add(self, request_id: str, ticket: Ticket) -> None:
        before = TICKET.set(ticket)
        try:
            await self.client.add_request_async(request(request_id))
        finally:
            TICKET.reset(before)

    async def leave(self, request_id: str) -> None:
        before = LEAVING.set(True)
        try:
            await self.client.abort_requests_async([request_id])
        finally:
            LEAVING.reset(before)

    async def tokens(self, *ids: int) -> None:
        """The engine says two tokens in one row of which more is kept; they come."""
        await self.stage.says(EngineCoreOutput(self.stage_id, list(ids), prefill_stats=PrefillStats()))
        await self.client.outputs_queue.get()

    async def begun(self, request_id: str) -> None:
        await self.stage.join()
        await self.add(request_id, Ticket(named=True))
        assert (await self.stage.gets())[0] == b"add"
        self.stage_id = request_id
        await self.tokens(5, 6)

    async def heard(self) -> None:
        """All that the router had said before this has been heard, and the front lives."""
        answer = asyncio.create_task(self.heart.full())
        await asyncio.wait((answer, self.reads), return_when=asyncio.FIRST_COMPLETED)
        assert not self.reads.done(), self.reads
        assert not await answer


def test_a_client_that_repeats_and_leaves_at_once_does_not_take_its_front_along() -> None:
    """What is told again is on its way while it leaves: nobody is there to hear it, and that is all."""

    async def story(stage: Stage) -> None:
        front = Front(stage)
        await front.begin()
        await front.begun("cmpl-x-0-aaaaaaaa")
        await front.leave("cmpl-x-0-aaaaaaaa")
        await front.heard()
        for position in (0, 2):
            name = f"cmpl-x-0-bbbbbbb{position}"
            await front.add(name, Ticket(named=True, position=position))
            await front.leave(name)
            await front.heard()
        assert stage.core.counters.replayed == 2
        assert (stage.core.requests, front.client._tickets, front.client._gates) == ({}, {}, {})

    play("remote", story)


def test_a_position_inside_a_step_of_the_engine_is_refused_and_nothing_stays() -> None:
    async def story(stage: Stage) -> None:
        front = Front(stage)
        await front.begin()
        await front.begun("cmpl-x-0-aaaaaaaa")
        await front.leave("cmpl-x-0-aaaaaaaa")
        await front.add("cmpl-x-0-cccccccc", Ticket(named=True, position=1))
        failure = await front.client.outputs_queue.get()
        assert isinstance(failure, Failure)
        assert (failure.fault.code, int(failure.fault.status_code)) == ("refused", 409)
        assert "inside one step" in str(failure.fault)
        await front.heard()
        while stage.core.requests:
            await stage.gets()  # the add, and then the abort
        assert front.client._tickets == {}

    play("remote", story)


def test_of_a_request_with_several_choices_nothing_stays_when_one_fails() -> None:
    async def story(stage: Stage) -> None:
        front = Front(stage)
        await front.begin()
        await stage.join()
        whole = request("cmpl-y-0-aaaaaaaa")
        parent = ParentRequest(whole)
        queue = RequestOutputCollector(RequestOutputKind.DELTA, whole.request_id)
        ticket = Ticket()
        for number in range(3):
            child = msgspec.structs.replace(whole, request_id=f"{number}_{whole.request_id}")
            parent.child_requests.add(child.request_id)
            front.processor.add_request(child, None, parent, number, queue)
            await front.add(child.request_id, ticket)
            assert (await stage.gets())[0] == b"add"
        assert len(front.client._tickets) == 3
        front.client.fail(f"1_{whole.request_id}", WorkerGone("it died"))
        waiting = asyncio.create_task(front.client.get_output_async())
        with pytest.raises(RouterFault, match="worker_gone"):
            await queue.get()
        assert (front.client._tickets, front.processor.request_states) == ({}, {})
        aborted = await stage.gets()
        assert aborted[0] == b"abort"
        assert len(msgspec.msgpack.decode(aborted[1])) == 2
        waiting.cancel()

    play("remote", story)


def test_a_pause_that_fails_because_a_worker_died_holds_for_its_successor() -> None:
    """The other engines are paused by then; one that comes and runs would be alone with its weights."""

    async def story(stage: Stage) -> None:
        front = Front(stage)
        await front.begin()
        await stage.join()
        call = asyncio.create_task(front.client.call_utility_async("pause_scheduler", "wait", False))
        assert (await stage.gets())[0] == b"util"
        stage.lose()
        with pytest.raises(RouterFault, match="worker_gone"):
            await call
        await stage.join()
        kind, frame, *_ = await stage.gets()
        assert kind == b"util"
        assert msgspec.msgpack.decode(frame)[2:] == ["pause_scheduler", ["keep", False]]

    play("remote", story)
