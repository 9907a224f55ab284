"""Whether what a slot asks of a model is what its files allow, as vLLM and the owner of the weights judge it. Pure.

Each answer is "" unless it is certain: a model of a kind that is not known here is left to vLLM, which refuses it at
the start. The rules are vLLM 0.32's (config/model.py, model_arch_config_convertor.py, kv_cache_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Parts of a model that have a context of their own: which one counts is vLLM's to say.
_PARTS = frozenset({"language_config", "llm_config", "thinker_config", "decoder", "generator", "text_encoder"})
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Kinds of RoPE whose stated length is the scaled one already.
_SCALED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
_NO_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})
# Every layer keeps the keys and values of every token, and config.json says how many.
_PLAIN = frozenset({"llama", "qwen2", "qwen2_moe", "mistral", "mixtral", "granite", "olmo2", "phi3", "smollm3"})
_OWN_HEADS = frozenset({"qwen3", "qwen3_moe", "gemma"})  # the same, where head_dim is not hidden_size over heads


def too_long(config: Mapping[str, Any], asked: int) -> str:
    """Why one request cannot have ``asked`` tokens."""
    text = _text(config)
    key, most = _longest(text)
    if not key or asked <= most:
        return ""
    factor = 1.0 if "gemma3" in str(text.get("model_type", "")) else _scaling(text)
    if asked <= most * factor:
        return ""
    scaled = f" (scaled by RoPE to {most * factor:.0f})" if factor > 1 else ""
    return f"the model takes at most {key} = {most:g}{scaled} tokens, not {asked}"


def too_few_bytes(config: Mapping[str, Any], dtype: str, kv_bytes: int, tokens: int, block: int, ranks: int) -> str:
    """Why an arena of ``kv_bytes`` does not hold one request of ``tokens``; of one rank."""
    per_token = _kv_bytes_per_token(_text(config), dtype, ranks)
    need = per_token * block * -(-tokens // block)
    if kv_bytes >= need:
        return ""
    room = kv_bytes // (per_token * block) * block
    return f"holds {room} tokens of this model, and one request may have max_model_len = {tokens}: that takes {need}"


def never_float16(config: Mapping[str, Any], dtype: str) -> str:
    kind = str(_text(config).get("model_type", ""))
    return f"vLLM does not compute {kind} in float16" if dtype == "float16" and kind in _NO_FLOAT16 else ""


def lossy(stored: Mapping[str, int], dtype: str) -> tuple[str, str]:
    """Why the tensors of the files do not become ``dtype``: (for all of them, for some of them). 16 bits become
    float32 exactly; everything else would lose some, and the owner of the weights refuses that."""
    floats = {_NAMES[kind]: count for kind, count in stored.items() if kind in _NAMES and count}
    others = [kind for kind in floats if dtype not in (kind, "float32")]
    if not others:
        return "", ""
    said = f"the files hold {' and '.join(others)}, which cannot become {dtype} without loss"
    if len(others) == len(floats):
        return f"{said}: take {'float32' if 'float32' in floats or len(floats) > 1 else f'{others[0]} or float32'}", ""
    return "", f"{said}: the engine must want them as they are, or the owner of the weights refuses the model"


def weight_bytes(stored: Mapping[str, int], dtype: str) -> int:
    """Of all tensors of the files once they are loaded as ``dtype``."""
    sizes = {"F64": 8, "I64": 8, "I32": 4, "I16": 2}
    return sum(count * (ITEM[dtype] if kind in _NAMES else sizes.get(kind, 1)) for kind, count in stored.items())


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that generates text; {} where another part may be it."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return inner
    return {} if _PARTS & config.keys() else config


def _longest(text: Mapping[str, Any]) -> tuple[str, float]:
    """The key that bounds the context, and its value. One that is not there has a default that only vLLM knows: it can
    only be smaller."""
    own = text.get("model_max_length")
    if _number(own) and own:
        return "model_max_length", own
    found = [(key, text[key]) for key in _LENGTHS if _number(text.get(key))]
    return min(found, key=lambda row: row[1], default=("", 0))


def _scaling(text: Mapping[str, Any]) -> float:
    """What the length may be multiplied with; the largest factor where layers differ."""
    factors = [1.0]
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if not isinstance(rope, dict):
            continue
        rows = [row for row in rope.values() if isinstance(row, dict)] or [rope]
        for row in rows:
            kind, factor = row.get("rope_type", row.get("type")), row.get("factor")
            if kind not in _SCALED and _number(factor):
                factors.append(factor)
    return max(factors)


def _kv_bytes_per_token(text: Mapping[str, Any], dtype: str, ranks: int) -> int:
    """Of all layers of one rank; 0 for models of which it is not certain."""
    kind = text.get("model_type")
    if kind not in _PLAIN | _OWN_HEADS or _slides(text):
        return 0
    layers, kv, heads = (text.get(key) for key in ("num_hidden_layers", "num_key_value_heads", "num_attention_heads"))
    wide, width = text.get("head_dim"), text.get("hidden_size")
    if wide is None and kind in _PLAIN and _number(width) and _number(heads) and heads:
        wide = width // heads
    if not (_number(layers) and _number(kv) and _number(wide)):
        return 0
    return int(layers * 2 * max(1, kv // ranks) * wide * ITEM[dtype])


def _slides(text: Mapping[str, Any]) -> bool:
    """Whether some layer forgets: it keeps fewer tokens than a request has."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds):
        return True
    return bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
