"""Tiny random models of several architectures, made by transformers from a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 300,  # not a multiple of 64: vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name -> (transformers' model class, its configuration class, configuration)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**COMMON, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**COMMON, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**COMMON, "head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**COMMON, "head_dim": 32, "tie_word_embeddings": False}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 300, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 1,
         "eos_token_id": 2},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {"vocab_size": 300, "hidden_size": 128, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 256, "word_embed_proj_dim": 128, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**COMMON, "pad_token_id": 0}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 256},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**COMMON, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "tie_word_embeddings": False},
    ),
}  # fmt: skip

# Its loader interleaves q, k and v of each head by a new tensor: no copy of a region.
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 300, "hidden_size": 128, "n_layer": 2, "n_head": 4}),
}


def make(kind: str, folder: Path, seed: int = 0, dtype: str = "float32", shard: str = "50GB") -> Path:
    """Write the model and its configuration; another ``seed`` gives other weights of the same shapes. ``shard``: the
    largest file, as transformers takes it ("100KB")."""
    import torch
    import transformers

    model_class, config_class, settings = {**KINDS, **REFUSED}[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**settings, dtype=dtype)
    model = getattr(transformers, model_class)(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)  # far from the uniform logits of a fresh start, and no bias is zero
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
