"""The router's core: random interleavings against a model of workers (R2, R6)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from belayer.errors import Fenced
from belayerd.router import events as ev
from belayerd.router.core import Core, Limits
from belayerd.router.records import RequestState
from tests.unit.test_router_core import FRAMES


def token(request_id: str, position: int) -> int:
    return hash((request_id, position)) % 1000


def length(request_id: str) -> int:
    return 1 + int(request_id[1:]) % 6


SLOTS = ("a", "b", "c")


class Fleet(RuleBasedStateMachine):
    """A core among model workers. Workers speak exactly as the wire promises; pipes may be read late."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(deaths=3, home_s=20.0, waiting_s=100.0, journal_every=2, slots=frozenset(SLOTS))
        self.core = Core(limits)
        self.now = 0.0
        self.made = 0
        self.generation = dict.fromkeys(SLOTS, -1)
        self.live: dict[str, str] = {}  # slot -> worker id
        self.engines: dict[str, dict[str, int]] = {}  # worker id -> request id -> tokens so far
        self.pipes: dict[str, list[ev.Outputs]] = {}
        self.seq: dict[str, int] = {}
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.journal: dict[str, list[int]] = {}

    def do(self, event: ev.Event) -> None:
        for effect in self.core.step(event, self.now):
            self.perform(effect, event)

    def perform(self, effect: ev.Effect, event: ev.Event) -> None:
        match effect:
            case ev.SendAdd(worker_id=worker_id, request_id=request_id, prefix=prefix):
                assert worker_id in self.live.values()
                assert list(prefix) == self.delivered[request_id]
                self.engines[worker_id][request_id] = len(prefix)
            case ev.SendAbort(worker_id=worker_id, request_ids=ids):
                for request_id in ids:
                    self.engines[worker_id].pop(request_id, None)
            case ev.Deliver(request_id=request_id, position=position):
                assert isinstance(event, ev.Outputs)
                item = event.items[position]
                assert item.request_id == request_id
                assert request_id not in self.ended
                self.delivered[request_id] += item.tokens
                if item.finish:
                    assert self.journal[request_id] == self.delivered[request_id]
                    self.ended[request_id] = item.finish
            case ev.Fail(request_id=request_id, code=code):
                assert request_id not in self.ended
                self.ended[request_id] = code
            case ev.JournalAdd(request_id=request_id):
                self.journal[request_id] = []
            case ev.JournalTokens(request_id=request_id, start=start, tokens=tokens):
                assert start == len(self.journal[request_id])
                self.journal[request_id] += tokens

    @rule()
    def add(self) -> None:
        request_id = f"r{self.made}"
        self.made += 1
        self.delivered[request_id] = []
        self.do(ev.Add(request_id, FRAMES, session="s" if self.made % 5 == 0 else ""))

    @rule(slot=st.sampled_from(SLOTS))
    def register(self, slot: str) -> None:
        self.generation[slot] += 1
        worker_id = f"{slot}-{self.generation[slot]}"
        self.live[slot] = worker_id
        self.engines[worker_id], self.pipes[worker_id], self.seq[worker_id] = {}, [], 0
        self.do(ev.Register(slot, self.generation[slot], worker_id, "e"))
        self.do(ev.Ready(slot, self.generation[slot], worker_id))

    @rule(slot=st.sampled_from(SLOTS), removed=st.booleans(), cause=st.sampled_from(list(ev.Cause)))
    def unregister(self, slot: str, removed: bool, cause: ev.Cause) -> None:
        if self.generation[slot] >= 0:
            self.live.pop(slot, None)
            self.do(ev.Unregister(slot, self.generation[slot], cause, removed))

    @rule(slots=st.frozensets(st.sampled_from(SLOTS)))
    def given_up(self, slots: frozenset[str]) -> None:
        self.do(ev.GivenUp(slots))

    @rule(slot=st.sampled_from(SLOTS))
    def stale_register(self, slot: str) -> None:
        if self.generation[slot] >= 0:
            with pytest.raises(Fenced):
                self.do(ev.Register(slot, self.generation[slot], "impostor", "e"))

    @rule(slot=st.sampled_from(SLOTS))
    def engine_step(self, slot: str) -> None:
        worker_id = self.live.get(slot)
        if worker_id is None:
            return
        items = []
        for request_id, done in list(self.engines[worker_id].items()):
            end = length(request_id)
            fresh = (token(request_id, done),) if done < end else ()
            finish = "length" if done + len(fresh) >= end else ""
            items.append(ev.Item(request_id, fresh, finish))
            self.engines[worker_id][request_id] = done + len(fresh)
            if finish:
                del self.engines[worker_id][request_id]
        if items:
            generation = int(worker_id.split("-")[1])
            message = ev.Outputs(slot, generation, worker_id, self.seq[worker_id], tuple(items))
            self.seq[worker_id] += 1
            self.pipes[worker_id].append(message)

    @precondition(lambda self: any(self.pipes.values()))
    @rule(data=st.data())
    def read_pipe(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from([w for w, pipe in self.pipes.items() if pipe]))
        self.do(self.pipes[worker_id].pop(0))

    @precondition(lambda self: self.core.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.core.requests)))
        self.ended[request_id] = "abort"
        self.do(ev.Abort((request_id,)))

    @rule(seconds=st.floats(0.0, 60.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if (due := self.core.next_deadline()) is not None and due <= self.now:
            self.do(ev.Tick())

    @invariant()
    def tokens_are_a_prefix_of_the_truth(self) -> None:
        for request_id, tokens in self.delivered.items():
            assert tokens == [token(request_id, i) for i in range(len(tokens))]

    @invariant()
    def live_and_ended_are_apart_and_complete(self) -> None:
        live = set(self.core.requests)
        assert live.isdisjoint(self.ended)
        assert live | set(self.ended) == set(self.delivered)

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        assert not (self.core.waiting and self.core.given_up == set(SLOTS) and not self.live)

    @invariant()
    def running_sets_match_states(self) -> None:
        running = {r for slot in self.core.slots.values() for r in slot.running}
        assert running == {i for i, r in self.core.requests.items() if r.state is RequestState.RUNNING}
        assert self.core.waiting == len(self.core.requests) - len(running)

    def teardown(self) -> None:
        """One healthy slot and time are enough to bring every request to its one end."""
        self.register("a")
        for _ in range(40):
            for slot in SLOTS:
                self.engine_step(slot)
            for pipe in self.pipes.values():
                while pipe:
                    self.do(pipe.pop(0))
            if (due := self.core.next_deadline()) is not None:
                self.now = max(self.now, due)
                self.do(ev.Tick())
        assert set(self.ended) == set(self.delivered)
        for request_id, how in self.ended.items():
            if how == "length":
                assert len(self.delivered[request_id]) == length(request_id)


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestFleet = Fleet.TestCase
