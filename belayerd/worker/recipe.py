"""``python -m belayerd.worker.recipe FOLDER DTYPE [RANKS]``: asks vLLM how it loads a model, and ends.

gpuowner starts it once for a model whose layout it does not know and keeps the answer: an owner never imports vLLM.
The answer (a ``RecipeReply``) goes to standard output, everything that vLLM prints to standard error. For several
tensor-parallel ranks it forks as many processes, which meet as the ranks of an engine do and each watch their own part.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec

from belayer.errors import BelayerError, WeightsBroken
from belayer.procs import die_with_parent
from belayerd.worker.zygote import ENVIRONMENT
from gpuowner.recipe import Recipe
from gpuowner.recipes import RecipeReply
from gpuowner.safetensors_file import read_model


def main() -> int:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder, dtype, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1
    try:
        reply = RecipeReply(recipes=_recipes(folder, dtype, ranks))
    except BelayerError as why:
        reply = RecipeReply(message=why.message, remedy=why.remedy)
    # Whatever vLLM raises about a model folder is the answer: it does not take this model.
    except Exception as why:  # noqa: BLE001
        reply = RecipeReply(message=f"vLLM does not take this model: {type(why).__name__}: {why}")
    with answer:
        answer.write(msgspec.msgpack.encode(reply))
    return 0


def _recipes(folder: Path, dtype: str, ranks: int) -> tuple[Recipe, ...]:
    tensors = read_model(folder)
    import_module("belayerd.worker.adapter.checks").self_check()
    trace = import_module("belayerd.worker.adapter.trace").trace
    if ranks == 1:
        return (trace(folder, dtype, tensors),)
    group = import_module("belayerd.worker.adapter.gloo").Group
    with tempfile.TemporaryDirectory() as tmp:
        store = Path(tmp) / "store"
        others = [_forked(partial(trace, folder, dtype, tensors, group(at, ranks, store))) for at in range(1, ranks)]
        mine = trace(folder, dtype, tensors, group(0, ranks, store))
        return (mine, *(_answer(pipe, pid) for pipe, pid in others))


def _forked(work: Callable[[], Recipe]) -> tuple[int, int]:
    """A child that writes its recipe to a pipe: (read end, pid). It ends with this process."""
    reading, writing = os.pipe()
    me = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        return reading, pid
    code = 1
    try:
        die_with_parent(me)
        os.close(reading)
        with os.fdopen(writing, "wb") as answer:
            answer.write(msgspec.msgpack.encode(work()))
        code = 0
    except BaseException:  # noqa: BLE001 the parent's stack must never be unwound in the child
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _answer(pipe: int, pid: int) -> Recipe:
    with os.fdopen(pipe, "rb") as answer:
        data = answer.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise WeightsBroken(
            f"a rank's part of it was not told (exit {os.waitstatus_to_exitcode(status)})", kept="nothing was sealed"
        )
    return msgspec.msgpack.decode(data, type=Recipe)


if __name__ == "__main__":
    sys.exit(main())
