"""A tiny random model with a real tokenizer: to measure the mechanism and not the arithmetic.

Re-reading 400 tokens of context through SmolLM2-135M takes this kind of machine more than a second whatever Belayer
does; through this model (Qwen3 architecture, 4 layers, hidden size 256) it takes hundredths.
"""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make(folder: Path, tokenizer_from: Path, seed: int = 0) -> Path:
    """Write the model to ``folder`` once; returns it."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

    base = AutoConfig.from_pretrained(tokenizer_from)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=base.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=base.bos_token_id,
        eos_token_id=base.eos_token_id,
        dtype="float32",
    )
    beside = folder.with_suffix(".tmp")
    shutil.rmtree(beside, ignore_errors=True)
    Qwen3ForCausalLM(config).save_pretrained(beside)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, beside / name)
    beside.replace(folder)
    return folder
