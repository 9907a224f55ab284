"""xgrammar's table of a tokenizer, made once before the fork: 0.3 s of CPU for 49,152 tokens that each worker would
spend again while its slot is exposed. The table is never written to after it was made."""

from __future__ import annotations

from typing import Any

import xgrammar
from transformers import PreTrainedTokenizerBase
from vllm.config import ModelConfig
from vllm.tokenizers.registry import cached_tokenizer_from_config

_plain = xgrammar.TokenizerInfo.from_huggingface
_made: dict[tuple[int, int], tuple[Any, Any]] = {}  # (id of the tokenizer, vocabulary) -> both, so that the id stays


def _table(tokenizer: Any, *, vocab_size: int | None = None, stop_token_ids: Any = None) -> Any:
    held = _made.get((id(tokenizer), vocab_size or 0)) if stop_token_ids is None else None
    return held[1] if held else _plain(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids)


def prepare(config: ModelConfig) -> None:
    """What vLLM's xgrammar backend asks for in a worker of this model is found from now on."""
    tokenizer, size = cached_tokenizer_from_config(config), config.get_vocab_size()
    if isinstance(tokenizer, PreTrainedTokenizerBase) and (id(tokenizer), size) not in _made:
        _made[id(tokenizer), size] = (tokenizer, _plain(tokenizer, vocab_size=size))
    setattr(xgrammar.TokenizerInfo, "from_huggingface", staticmethod(_table))  # noqa: B010
