"""A tiny random model with a real tokenizer: to measure the mechanism and not the arithmetic.

Re-reading 400 tokens of context through SmolLM2-135M takes this kind of machine more than a second whatever Belayer
does; through this model (Qwen3 architecture, 4 layers, hidden size 256) it takes hundredths.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make(folder: Path, tokenizer_from: Path, seed: int = 0) -> Path:
    """Write the model to ``folder`` once, whoever else does so at the same time; returns it."""
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
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    beside.chmod(0o755)
    Qwen3ForCausalLM(config).save_pretrained(beside)
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).is_file():
            shutil.copy(tokenizer_from / name, beside / name)
    put(beside, folder)
    return folder


def put(beside: Path, folder: Path) -> None:
    """Give ``beside`` its name; when another process was first, its folder holds the same and stays."""
    try:
        beside.rename(folder)
    except OSError:
        shutil.rmtree(beside)
        if not (folder / "config.json").is_file():
            raise
