"""What a model's folder says of itself, for ``config check``: a look, no verdict on the files.

What cannot be read says nothing here; whoever loads the model refuses it by name.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

_MAX_HEADER = 100 << 20  # bytes; the format's own bound
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, {} when there is nothing to read."""
    return _table(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index, else the one; they need not exist."""
    places = _table(folder / _INDEX).get("weight_map")
    if isinstance(places, dict):
        return [folder / Path(str(name)).name for name in sorted(set(map(str, places.values())))]
    return [folder / _WHOLE]


def stored(folder: Path) -> Counter[str]:
    """Elements of all tensors by their dtype, as safetensors names it; empty when a file cannot be read."""
    found: Counter[str] = Counter()
    for path in weight_files(folder):
        rows = _header(path)
        if not rows:
            return Counter()
        for row in rows.values():
            found[row["dtype"]] += math.prod(row["shape"])
    return found


def vocabulary(folder: Path) -> frozenset[str] | None:
    """All tokens of tokenizer.json, as they are written there; None without one."""
    table = _table(folder / "tokenizer.json")
    model, added = table.get("model"), table.get("added_tokens")
    known = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(known, dict | list):
        return None
    words = {str(row["content"]) for row in added or () if isinstance(row, dict) and "content" in row}
    # A unigram's vocabulary is a list of pairs: the token and its weight.
    words |= set(known) if isinstance(known, dict) else {str(row[0]) for row in known if isinstance(row, list) and row}
    return frozenset(words)


def _is_entry(row: Any) -> bool:
    shape = row.get("shape")
    return isinstance(row.get("dtype"), str) and isinstance(shape, list) and all(isinstance(n, int) for n in shape)


def _header(path: Path) -> dict[str, Any]:
    """8 bytes of length, then JSON (https://github.com/huggingface/safetensors, "Format")."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            table = json.loads(file.read(length)) if length <= _MAX_HEADER else {}
            rows = {name: row for name, row in table.items() if name != "__metadata__"}
            return rows if all(map(_is_entry, rows.values())) else {}
    except (OSError, ValueError, AttributeError, struct.error):
        return {}


def _table(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
