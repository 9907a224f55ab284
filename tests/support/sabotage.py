"""A zygote whose workers fail a step of the handover when the file ``sabotage`` in the run folder says so.

    python -m tests.support.sabotage ARGUMENTS OF THE ZYGOTE

The file holds the name of a control message (``CheckOracle``) or ``stuck``; without it the workers are ordinary ones.
What the message does instead is what a broken device, owner or cache would make of it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from belayer.errors import LeaseRefused, WorkerFailed
from belayer.messages import worker as m
from belayer.paths import Paths
from belayerd.worker import zygote


def asked(paths: Paths) -> str:
    flag = paths.run / "sabotage"
    return flag.read_text() if flag.exists() else ""


def saboteur() -> Any:
    """The engine loop, once vLLM may be imported."""
    from belayerd.worker.engine import Engine

    class Saboteur(Engine):
        def _handle(self, message: Any) -> Any:
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
            if asked(Paths()) == "stuck":
                setattr(self._core, "turn", lambda: False)  # noqa: B010 - goes round and round, and never schedules
            super()._take_messages()

    return Saboteur


def main() -> int:
    for name, value in zygote.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from belayerd.worker import main as worker

    vars(worker)["Engine"] = saboteur()
    return zygote.main()


if __name__ == "__main__":
    sys.exit(main())
