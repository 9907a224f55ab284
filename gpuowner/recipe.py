"""How the tensors of a model's files become the tensors of the engine: copies of regions, nothing else.

Pure. vLLM renames, fuses, transposes and stacks weights in a way of its own for each architecture. For the few
architectures of ``PLAIN`` the rule is known here (and a test holds it against vLLM's own loader); for any other one
vLLM's loader is watched at work (``belayerd.worker.recipe``), and what it does is written down in these terms. What
is no copy of a region (a sum, a scale, an interleaving that needs a new tensor) has no recipe and is refused by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from belayer.errors import WeightsBroken
from gpuowner.safetensors_file import RawTensor, elements

FORMAT = 1  # of the structs below, as kept on disk

# vLLM stacks these, in this order (vllm.model_executor.models.llama: LlamaModel.hf_to_vllm_mapper and its kin).
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
PLAIN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
VOCAB = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
VOCAB_PAD = 64  # rows (vllm.model_executor.layers.vocab_parallel_embedding: DEFAULT_VOCAB_PADDING_SIZE)

_LAYER = r"model\.layers\.\d+\."
_KNOWN = re.compile(
    rf"({_LAYER}self_attn\.[qkvo]_proj\.(weight|bias)|{_LAYER}self_attn\.[qk]_norm\.weight"
    rf"|{_LAYER}mlp\.(gate|up|down)_proj\.(weight|bias)|{_LAYER}(input|post_attention)_layernorm\.weight"
    r"|model\.embed_tokens\.weight|model\.norm\.weight|lm_head\.weight)"
)
_IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")


class Param(msgspec.Struct, frozen=True):
    """A tensor of the engine: contiguous, ``dtype`` as in safetensors ("" is that of its source). ``buffer``: the
    engine may write to it, so every engine takes a private copy."""

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    buffer: bool = False


class Piece(msgspec.Struct, frozen=True):
    """``shape`` elements of ``source`` go to ``target``. Offsets and strides in elements."""

    source: str
    target: str
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Recipe(msgspec.Struct, frozen=True):
    """``unused``: tensors of the files that the engine ignores. ``tied``: (name, the tensor that it is)."""

    params: tuple[Param, ...]
    pieces: tuple[Piece, ...]
    unused: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous array in C order."""
    out, step = [], 1
    for size in reversed(shape):
        out.append(step)
        step *= size
    return tuple(reversed(out))


def is_run(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether these items lie side by side (the stride of an axis of one item says nothing)."""
    return all(size == 1 or mine == whole for size, mine, whole in zip(shape, strides, c_strides(shape), strict=True))


def is_plain(config: Mapping[str, Any], tensors: Iterable[str]) -> bool:
    """Whether the rule of this module applies. A config without an architecture has nobody else to ask."""
    if "quantization_config" in config:
        return False
    named = config.get("architectures")
    if not named:
        return True
    return set(named) <= PLAIN and all(_KNOWN.fullmatch(name) or _IGNORED.fullmatch(name) for name in tensors)


def plain_recipe(config: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> Recipe:
    """The rule of ``PLAIN``. Raises WeightsBroken when the parts of a fused tensor do not stack."""
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.get("tie_word_embeddings", False) else {}
    tied = {alias: name for alias, name in tied.items() if name in tensors}
    unused = tuple(name for name in tensors if _IGNORED.fullmatch(name))
    names = [name for name in tensors if name not in tied and name not in unused]
    params: list[Param] = []
    pieces: list[Piece] = []
    for fused, members in _groups(names):
        rows = [tensors[name] for name in members]
        _stackable(fused, rows)
        at, tail = 0, rows[0].shape[1:]
        for row in rows:
            strides = c_strides(row.shape)
            pieces.append(Piece(row.name, fused, row.shape, 0, strides, at, strides))
            at += elements(row.shape)
        length = sum(row.shape[0] for row in rows) if rows[0].shape else 0
        if fused in VOCAB and config.get("architectures"):
            length = -(-length // VOCAB_PAD) * VOCAB_PAD
        params.append(Param(fused, (length, *tail) if rows[0].shape else ()))
    return Recipe(tuple(params), tuple(pieces), unused, tuple(tied.items()))


def _groups(names: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name in the engine, its members) in file order; a group stands where its first member stood."""
    present, placed = set(names), set[str]()
    for name in names:
        if name not in placed:
            group = _group_of(name, present)
            placed.update(group[1])
            yield group


def _group_of(name: str, present: set[str]) -> tuple[str, tuple[str, ...]]:
    parts = name.split(".")
    for fused, members in FUSED.items():
        for member in members:
            if member not in parts:
                continue
            at = parts.index(member)
            siblings = tuple(".".join([*parts[:at], one, *parts[at + 1 :]]) for one in members)
            if all(one in present for one in siblings):
                return ".".join([*parts[:at], fused, *parts[at + 1 :]]), siblings
    return name, (name,)


def _stackable(name: str, rows: list[RawTensor]) -> None:
    first = rows[0]
    if any(row.shape[1:] != first.shape[1:] or row.dtype != first.dtype for row in rows):
        raise WeightsBroken(
            f"{name}: its parts {[(row.name, list(row.shape), row.dtype) for row in rows]} do not stack",
            kept="nothing was sealed",
            remedy="the model folder mixes tensors of different models or dtypes",
        )


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours that are one region on both sides become one piece (vLLM copies q, k and v of a fused file apart)."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last is not None and _adjoins(last, piece):
            out[-1] = msgspec.structs.replace(last, shape=(last.shape[0] + piece.shape[0], *last.shape[1:]))
        else:
            out.append(piece)
    return out


def _adjoins(a: Piece, b: Piece) -> bool:
    return (
        bool(a.shape)
        and (a.source, a.target, a.source_strides, a.strides) == (b.source, b.target, b.source_strides, b.strides)
        and a.shape[1:] == b.shape[1:]
        and b.source_offset == a.source_offset + a.shape[0] * a.source_strides[0]
        and b.offset == a.offset + a.shape[0] * a.strides[0]
    )


def key(config: bytes, tensors: Mapping[str, RawTensor], dtype: str, engine: str) -> str:
    """Hex digest over all that decides a recipe: config.json, names and shapes, dtype, engine version."""
    whole = hashlib.sha256(f"{FORMAT}\0{dtype}\0{engine}\0".encode())
    whole.update(hashlib.sha256(config).digest())
    for name in sorted(tensors):
        raw = tensors[name]
        whole.update(f"{name}\0{raw.dtype}\0{raw.shape}\0".encode())
    return whole.hexdigest()
