"""The owner's part of each tensor-parallel rank against what vLLM's own loader puts into a model of that rank."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from belayer import statefile
from tests.support import tiny_models

RANKS = 2
KINDS = ("llama", "qwen2", "gpt2", "qwen3_moe")  # padded vocabulary; biases and a tied matrix; transposed; experts


def same_parts(kind: str, root: Path, in_child: Callable[[Callable[[], Any]], None]) -> dict[str, Any]:
    """Both ranks at the same time, as an engine has them: they meet."""
    folder = root / f"{kind}-ranks"
    tiny_models.make(kind, folder, seed=3)
    pid = os.fork()  # rank 1 is a grandchild of the caller, waited for here
    if pid == 0:
        os._exit(_failed(in_child, partial(_rank, kind, folder, 1)))
    failed = _failed(in_child, partial(_rank, kind, folder, 0))
    assert os.waitpid(pid, 0)[1] == 0 == failed, "a rank failed: see above"
    said: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_bytes()) for rank in range(RANKS)]
    return {
        "count": min(row["count"] for row in said),
        "differ": [name for row in said for name in row["differ"]],
        "digests": [row["digest"] for row in said],
        "halved": sorted(said[0]["halved"]),
    }


def _failed(in_child: Callable[[Callable[[], Any]], None], act: Callable[[], Any]) -> int:
    try:
        in_child(act)
    except RuntimeError:
        return 1
    return 0


def _rank(kind: str, folder: Path, rank: int) -> None:
    import numpy as np
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model

    from belayerd.worker.adapter.gloo import Group
    from belayerd.worker.adapter.trace import trace
    from gpuowner import recipes
    from gpuowner.loader import load
    from gpuowner.safetensors_file import read_model

    tensors, kept = read_model(folder), folder / f"kept-{rank}"
    recipe = trace(folder, "float32", tensors, Group(rank, RANKS, folder / "store"))
    kept.mkdir()
    statefile.save(recipes.answer_path(folder, tensors, "float32", kept, rank, RANKS), recipe)
    loaded = load(kind, folder, "float32", lambda *_: None, kept=kept, rank=rank, ranks=RANKS)
    whole = load(kind, folder, "float32", lambda *_: None, kept=folder / "whole") if kind == "llama" else loaded
    data = np.frombuffer(loaded.mapping.buffer(), dtype=np.uint8)
    specs = {spec.name: spec for spec in loaded.layout}
    args = EngineArgs(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=16,
        tensor_parallel_size=RANKS, distributed_executor_backend="uni",
    )  # fmt: skip
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        model = initialize_model(config, model_config=config.model_config)
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    theirs = {name: value.detach().contiguous().view(-1).view(torch.uint8) for name, value in model.named_parameters()}
    ours = {name: data[specs[name].offset : specs[name].offset + specs[name].nbytes] for name in theirs}
    full = {spec.name: spec.nbytes for spec in whole.layout}
    answer = {
        "count": len(theirs),
        "differ": [name for name, value in theirs.items() if not np.array_equal(value.numpy(), ours[name])],
        "digest": loaded.digest,
        "halved": [name for name in theirs if 2 * specs[name].nbytes == full[name]],
    }
    (folder / f"{rank}.json").write_text(json.dumps(answer))
