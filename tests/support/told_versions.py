"""Whether each token is of the weights that its answer names: the final norm tells two versions of one model apart.

The norm is behind all attention, so what is kept of a context is the same under both versions, and what a version would
have said next can be asked afterwards of any engine that serves it.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from gpuowner.safetensors_file import read_model
from tests.support.streams import Seen

NORM = "model.norm.weight"
_NEAR = 1e-3  # logprobs: of a token beside one that was as likely, in steps of other shapes


def norm_of(folder: Path) -> NDArray[np.float32]:
    """Of a model in bfloat16, exactly."""
    found = read_model(folder)[NORM]
    assert found.dtype == "BF16"
    bits = np.fromfile(found.path, dtype="<u2", count=(found.end - found.start) // 2, offset=found.start)
    return (bits.astype(np.uint32) << 16).view(np.float32).reshape(found.shape)


def spans(*parts: Seen) -> list[tuple[int, int, int]]:
    """(version, start, end) that the last chunk of an answer tells; with several ``parts`` (the first ones broken off)
    those of the whole. They leave no token out, and no chunk goes back or leaves one out."""
    tokens = 0
    for seen in parts:
        for chunk in seen.chunks:
            tokens += sum(len(choice.get("token_ids") or ()) for choice in chunk.get("choices", ()))
            if "belayer" in chunk:
                assert chunk["belayer"]["position"] == tokens
    (told,) = (choice["weight_versions"] for choice in parts[-1].choices if choice.get("weight_versions"))
    found = [(int(row["version"]), row["start"], row["end"]) for row in told]
    assert [start for _, start, _ in found] == [0, *(end for _, _, end in found[:-1])]
    assert found[-1][2] == tokens
    return found


def misfits(url: str, prompt: list[int], tokens: list[int]) -> list[int]:
    """The places of ``tokens`` at which the weights that are served now would have said another one."""
    body = {"model": "smollm2", "prompt": prompt + tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    assert len(rows) == len(tokens)
    best = [max(one["logprob"] for one in row.values()) for row in rows]
    said = [row[str(token)]["logprob"] for row, token in zip(rows, tokens, strict=True)]
    return [place for place, (mine, most) in enumerate(zip(said, best, strict=True)) if mine < most - _NEAR]
