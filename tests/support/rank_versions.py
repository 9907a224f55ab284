"""A model that lies in two parts and whose every value tells its weight version and its place, and its writer process.

What belongs into a part is said twice: once as the recipe that the owner follows, once as slices (``expected``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from belayer import statefile
from gpuowner import recipes
from gpuowner.attach import OwnerClient, WeightsView
from gpuowner.recipe import Param, Piece, Recipe, c_strides
from gpuowner.safetensors_file import read_model
from gpuowner.tensors import Sparse
from gpuowner.update import begin_update
from tests.support import versions

RANKS = 2
LAYER = "model.layers.0"
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
Q, K, O = (f"{LAYER}.self_attn.{one}_proj.weight" for one in "qko")  # noqa: E741
QKV = f"{LAYER}.self_attn.qkv_proj.weight"
SHAPES: dict[str, tuple[int, ...]] = {EMBED: (64, 256), Q: (8, 64), K: (4, 64), O: (64, 64), NORM: (64,)}
DELTA = (K, NORM)  # rows of a part, and all of both parts
DTYPE = "float32"


def tensor(name: str, version: int) -> NDArray[np.float32]:
    """Version plus a fraction that tells the place."""
    count = int(np.prod(SHAPES[name]))
    return (version + np.arange(count) % 97 / 128).astype(np.float32).reshape(SHAPES[name])


def state(version: int, names: Any = SHAPES) -> dict[str, Any]:
    return {name: tensor(name, version) for name in names}


def recipe(rank: int) -> Recipe:
    """Rows of the embedding, of q and of k (fused); columns of o; all of the norm."""
    pieces = []

    def rows(name: str, target: str, at: int) -> None:
        count, wide = SHAPES[name][0] // RANKS, SHAPES[name][1]
        strides = c_strides((count, wide))
        pieces.append(Piece(name, target, (count, wide), rank * count * wide, strides, at * wide, strides))

    rows(EMBED, EMBED, 0)
    rows(Q, QKV, 0)
    rows(K, QKV, SHAPES[Q][0] // RANKS)
    tall, wide = SHAPES[O]
    half = (tall, wide // RANKS)
    pieces.append(Piece(O, O, half, rank * half[1], (wide, 1), 0, c_strides(half)))
    pieces.append(Piece(NORM, NORM, SHAPES[NORM], 0, (1,), 0, (1,)))
    params = (Param(EMBED, (32, 256)), Param(QKV, (6, 64)), Param(O, half), Param(NORM, SHAPES[NORM]))
    return Recipe(params=params, pieces=tuple(pieces))


def expected(rank: int, of: dict[str, int]) -> dict[str, NDArray[np.float32]]:
    """The tensors of a part when each tensor of the files is of the version that ``of`` names."""
    whole = {name: tensor(name, of[name]) for name in SHAPES}
    return {
        EMBED: whole[EMBED][32 * rank : 32 * rank + 32],
        QKV: np.concatenate([whole[Q][4 * rank : 4 * rank + 4], whole[K][2 * rank : 2 * rank + 2]]),
        O: whole[O][:, 32 * rank : 32 * rank + 32],
        NORM: whole[NORM],
    }


def make_model(folder: Path, kept: Path, version: int = 1) -> Path:
    """``kept``: where the owner looks for what vLLM would have said of the parts."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    versions.save(folder / "model.safetensors", state(version))
    tensors = read_model(folder)
    kept.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        statefile.save(recipes.answer_path(folder, tensors, DTYPE, kept, rank, RANKS), recipe(rank))
    return folder


def is_of(view: WeightsView, rank: int, of: dict[str, int]) -> bool:
    return all(np.array_equal(versions.held(view, name), value) for name, value in expected(rank, of).items())


def write(client: OwnerClient, model: str, mode: str, kind: str, version: int, at: Callable[[str], None]) -> None:
    """``kind``: whole, delta or sparse."""
    update = begin_update(client, model, mode=mode, whole=kind == "whole", version=version, at=at, threads=1)
    if kind == "sparse":
        values = tensor(K, version).reshape(-1)
        update.write_sparse({K: Sparse(np.arange(values.size), values)})
    else:
        update.write(state(version, SHAPES if kind == "whole" else DELTA))
    update.commit()


if __name__ == "__main__":
    versions.main(write)
