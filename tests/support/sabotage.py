"""A zygote whose workers fail a step of the handover when the file ``sabotage`` in the run folder says so.

    python -m tests.support.sabotage ARGUMENTS OF THE ZYGOTE

The file holds the name of a control message (``CheckOracle``) or a word; without it the workers are ordinary ones.
What the message does instead is what a broken device, owner or cache would make of it. Once, in whichever main comes
first, and said by the file ``sabotage.begun``, which names its slot: ``stuck``, ``stall SECONDS`` (asleep), ``spin
SECONDS`` (on a core), ``phase SECONDS`` (asleep, and announced, as a first shape that is compiled).

``/collective_rpc`` finds the method ``nap SECONDS``.

``rank digest``: a worker says another digest of its rank's weights. ``apart HOW``: see ``drifting``. ``rank follow``:
rank 1 of a main does not follow an update, once; ``rank hangs``: it stands still before it does, for ever. ``late
rank``: rank 1 of the next worker attaches once this word is taken away.

``start HOW``: each worker that is forked ends before it has an engine, ``rank HOW``: its rank 1 does. HOW is one of
``raise``, ``exit``, ``signal``, ``oom`` (the kernel ends it, for the memory that it takes).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from belayer.clock import monotonic
from belayer.errors import HostUnfit, LeaseRefused, WeightsTorn, WorkerFailed
from belayer.messages import worker as m
from belayer.paths import Paths
from belayerd.worker import zygote
from tests.support import oom


def asked(paths: Paths) -> str:
    try:
        return (paths.run / "sabotage").read_text()
    except FileNotFoundError:  # looked for at every turn, and taken away at any moment
        return ""


def saboteur() -> Any:
    """The engine loop, once vLLM may be imported."""
    from belayerd.worker.engine import Engine

    class Saboteur(Engine):
        def _handle(self, message: Any) -> Any:
            if asked(Paths()) == "rank digest" and isinstance(message, m.WorkerStatus):
                return msgspec.structs.replace(super()._handle(message), rank_digests=("0" * 64,))
            if asked(Paths()) != type(message).__name__:
                return super()._handle(message)
            match message:
                case m.WorkerStatus():
                    return msgspec.structs.replace(super()._handle(message), weights_digest="0" * 64)
                case m.CheckOracle():
                    reply: Any = super()._handle(message)
                    off = msgspec.structs.replace(reply.oracle, token=reply.oracle.token + 1)
                    return msgspec.structs.replace(reply, oracle=off, equal=False)
                case m.TakeArena():
                    raise LeaseRefused("the owner refuses, on purpose")
            raise WorkerFailed(f"{type(message).__name__} fails on purpose")

        def _take_messages(self) -> None:
            words = asked(Paths())
            if words == "stuck" and self._core.has_work() and self._begun():
                setattr(self._core, "turn", lambda: False)  # noqa: B010 - goes round and round, and never schedules
            elif words.startswith(("stall ", "spin ", "phase ")) and self._core.has_work() and self._begun():
                self._stall(*words.split())
            super()._take_messages()

        def _begun(self) -> bool:
            """True for the first that comes."""
            flag = Paths().run / "sabotage.begun"
            try:
                with flag.open("x") as said:
                    said.write(self._standing.slot)
            except FileExistsError:
                return False
            return True

        def _stall(self, kind: str, seconds: str) -> None:
            end = monotonic() + float(seconds)
            if kind == "phase":
                self._heart.announce("first shape", 6 * float(seconds))
            while kind == "spin" and monotonic() < end:
                pass
            threading.Event().wait(end - monotonic())

    return Saboteur


def fails(how: str) -> None:
    match how:
        case "raise":
            raise HostUnfit("no such device, on purpose\nand a second line", remedy="mend it")
        case "exit":
            os._exit(3)
        case "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        case "oom":
            oom.run_out_of_memory()
    raise AssertionError(f"this process goes on after {how}")


def failing(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        kind, _, how = asked(Paths()).partition(" ")
        if kind == what:
            fails(how)
        return real(*args)

    return run


def drifting(real: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """What a rank of a main hears of its leader, once, and said: ``apart again``, while idle, the same call twice; in a
    step that goes on with a request: ``apart step``, another position; ``apart weights``, with a version of its own."""
    twice: list[bytes] = []

    def receive(line: Any) -> bytes:
        from belayerd.worker.adapter.seat import seat

        if twice:
            return twice.pop()
        data, kind, how = real(line), *asked(Paths()).partition(" ")[::2]
        if kind != "apart" or seat().ranks is not None or seat().arena.epoch < 0:
            return data
        method, args, serial = msgspec.msgpack.decode(data)
        if how == "again":
            if method == "pulse" and once():
                twice.append(data)
            return data
        step = msgspec.msgpack.decode(args) if method == "execute_model" else [[], [[]]]
        if not step[1][0] or not once():  # no request that was in a step before
            return data
        match how:
            case "step":
                step[1][5][0] -= 1  # num_computed_tokens
                return msgspec.msgpack.encode((method, msgspec.msgpack.encode(step), serial))
            case "weights":
                seat().weights.grant = msgspec.structs.replace(seat().weights.grant, version=9)
        return data

    return receive


def not_following(real: Callable[..., Any]) -> Callable[..., Any]:
    def follow(*args: Any) -> Any:
        from belayerd.worker.adapter.seat import seat

        mains_rank = seat().ranks is None and seat().arena.epoch >= 0
        how = asked(Paths()) if mains_rank else ""
        if how == "rank follow" and once():
            raise WeightsTorn("the rank does not follow, on purpose")
        if how == "rank hangs" and once():
            threading.Event().wait()
        return real(*args)

    return follow


def late(real: Callable[..., Any]) -> Callable[..., Any]:
    def attach(paths: Paths, worker_id: str, slot: Any, rank: int) -> Any:
        if rank and asked(paths) == "late rank" and once():
            while asked(paths) == "late rank":
                threading.Event().wait(0.01)
        return real(paths, worker_id, slot, rank)

    return attach


def once() -> bool:
    """True for the first that comes."""
    try:
        (Paths().run / "sabotage.begun").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def main() -> int:
    for name, value in zygote.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from belayerd.worker import main as worker
    from belayerd.worker import rank, ranks

    vars(worker)["Engine"] = saboteur()
    vars(worker)["run"] = failing("start", worker.run)
    vars(rank)["run"] = failing("rank", rank.run)
    vars(rank)["attach"] = late(rank.attach)
    from belayerd.worker.adapter import weights
    from belayerd.worker.adapter.arena import BelayerWorker

    vars(weights)["follow"] = not_following(weights.follow)
    setattr(BelayerWorker, "nap", lambda _, seconds: threading.Event().wait(float(seconds)))  # noqa: B010
    setattr(ranks.Line, "receive", drifting(ranks.Line.receive))  # noqa: B010
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
