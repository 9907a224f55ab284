"""A model whose tokenizer has words for thinking: two tokens of the given one that nothing uses are named so."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.tiny import put

THINK, ENOUGH = 4, 5  # <reponame> and <file_sep> in SmolLM2's vocabulary
_NAMES = {"<reponame>": "<think>", "<file_sep>": "</think>"}


def make(folder: Path, base: Path) -> Path:
    """Write it to ``folder`` once, beside the files of ``base``; returns it."""
    if (folder / "config.json").is_file():
        return folder
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    shutil.copytree(base, beside, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (beside / name).read_text()
        for old, new in _NAMES.items():
            text = text.replace(old, new)
        (beside / name).write_text(text)
    path = beside / "tokenizer.json"
    table = json.loads(path.read_text())
    for row in table["added_tokens"]:
        if row["id"] in (THINK, ENOUGH):
            row["special"] = False  # as in models that think: a special token is left out of the text
    path.write_text(json.dumps(table))
    put(beside, folder)
    return folder
