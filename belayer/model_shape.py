"""Whether a model can be cut into equal parts for tensor-parallel ranks, from its config.json alone.

The rules are vLLM's (config/model.py, the attention layers, vocab_parallel_embedding.py): attention heads are divided;
key/value heads are divided, or repeated when there are fewer of them than ranks; the vocabulary is padded to a multiple
of 64 and divided, as is the width of the feed-forward layers. Other layers may have rules of their own: those are told
by vLLM when the weights are laid out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PADDED = 64


def undivided(folder: Path, ranks: int) -> str:
    """Why ``ranks`` do not fit the model, naming file and key, or "". Also "" for a file that cannot be read: whoever
    loads the model says that."""
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return ""
    config = whole.get("text_config", whole) if isinstance(whole, dict) else {}
    for key, value, fits in _rules(config, ranks):
        if not fits:
            return f"{ranks} does not divide {key} = {value} of {file}"
    return ""


def _rules(config: dict[str, Any], ranks: int) -> Any:
    heads_key, heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    if heads:
        yield heads_key, heads, heads % ranks == 0
    kv_key, kv = _first(config, "num_key_value_heads", "num_kv_heads")
    if kv:
        yield kv_key, kv, kv % ranks == 0 if kv >= ranks else ranks % kv == 0
    wide_key, wide = _first(config, "intermediate_size", "n_inner")
    if wide:
        yield wide_key, wide, wide % ranks == 0
    vocab_key, vocab = _first(config, "vocab_size")
    if vocab:
        padded = -(-vocab // _PADDED) * _PADDED
        yield f"{vocab_key} (padded to {padded})", vocab, padded % ranks == 0


def _first(config: dict[str, Any], *keys: str) -> tuple[str, int]:
    found = ((key, config[key]) for key in keys if isinstance(config.get(key), int))
    return next(found, (keys[0], 0))
