"""A call that may never return, given a bound: drivers hang inside the kernel, where no signal or timeout reaches
them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def bounded(call: Callable[[], T], seconds: float, what: str) -> T:
    """What ``call()`` returns or raises, run in a thread of its own. Raises TimeoutError naming ``what`` after
    ``seconds``; the thread is then left behind (a daemon), so the caller should not ask the same thing again."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        # Whatever it is, it is the caller's: it is raised again in the caller's thread.
        except BaseException as why:  # noqa: BLE001
            answers.put((None, why))

    threading.Thread(target=run, name=f"bounded: {what}", daemon=True).start()
    try:
        answer, why = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"{what} gave no answer in {seconds:g} s") from None
    if why is not None:
        raise why
    return answer  # type: ignore[return-value]
