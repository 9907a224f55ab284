"""``python -m belayerd.worker.recipe FOLDER DTYPE``: asks vLLM how it loads a model, and ends.

gpuowner starts it once for a model whose layout it does not know and keeps the answer: an owner never imports vLLM.
The answer (a ``RecipeReply``) goes to standard output, everything that vLLM prints to standard error.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import msgspec

from belayer.errors import BelayerError
from belayerd.worker.zygote import ENVIRONMENT
from gpuowner.recipes import RecipeReply
from gpuowner.safetensors_file import read_model


def main() -> int:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    folder, dtype = Path(sys.argv[1]), sys.argv[2]
    try:
        tensors = read_model(folder)
        import_module("belayerd.worker.adapter.checks").self_check()
        reply = RecipeReply(recipe=import_module("belayerd.worker.adapter.trace").trace(folder, dtype, tensors))
    except BelayerError as why:
        reply = RecipeReply(message=why.message, remedy=why.remedy)
    # Whatever vLLM raises about a model folder is the answer: it does not take this model.
    except Exception as why:  # noqa: BLE001
        reply = RecipeReply(message=f"vLLM does not take this model: {type(why).__name__}: {why}")
    with answer:
        answer.write(msgspec.msgpack.encode(reply))
    return 0


if __name__ == "__main__":
    sys.exit(main())
