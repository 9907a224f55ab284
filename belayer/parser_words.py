"""vLLM's parsers, known without importing vLLM, which takes ten seconds.

Their names are read from the source of its registries. What a parser must find in a tokenizer is a table, held against
vLLM itself by tests/contract/test_parser_words.py.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

# What a reasoning parser must find in the vocabulary, or its constructor raises and no engine starts.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "ernie45": ("<think>", "</think>"),
    "holo2": ("<think>", "</think>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "poolside_v1": ("<assistant>",),
    "step3": ("</think>",),
}
# What these look for between texts, and do without: a model whose tokenizer has no such token was not trained to
# think in them.
WANTS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v4": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "glm47": ("<think>", "</think>"),
    "kimi_k2": ("<think>", "</think>"),
    "mimo": ("<think>", "</think>"),
    "minimax_m2": ("<think>", "</think>"),
    "nemotron_v3": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
_REGISTRIES = {"tool_parser": "tool_parsers", "reasoning_parser": "reasoning"}


def names(key: str) -> frozenset[str]:
    """Of router.``key``: "tool_parser" or "reasoning_parser". Empty where there is no vLLM, or it keeps them
    elsewhere."""
    found = find_spec("vllm")  # finds the package, does not import it
    folders = list(found.submodule_search_locations or ()) if found else []
    return _keys(Path(folders[0]) / _REGISTRIES[key] / "__init__.py") if folders else frozenset()


def _keys(source: Path) -> frozenset[str]:
    """The keys of the table from which parsers are registered."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and any(map(_registry, targets)):
            return frozenset(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset()


def _registry(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id.endswith("_PARSERS_TO_REGISTER")
