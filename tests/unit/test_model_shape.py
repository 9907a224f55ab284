"""``config check`` refuses ranks that the model cannot be cut into, naming file, key and reason; exit 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from belayer.model_shape import undivided

SHAPE = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 1000}


def shape(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_divides_is_taken(tmp_path: Path, ranks: int) -> None:
    assert undivided(shape(tmp_path), ranks) == ""


@pytest.mark.parametrize(
    ("changes", "ranks", "key"),
    [
        ({"num_attention_heads": 9}, 2, "num_attention_heads = 9"),
        ({"num_key_value_heads": 3}, 2, "num_key_value_heads = 3"),
        ({"num_key_value_heads": 2}, 3, "num_key_value_heads = 2"),
        ({"intermediate_size": 97}, 2, "intermediate_size = 97"),
        ({"num_key_value_heads": 3, "intermediate_size": 99}, 3, "vocab_size (padded to 1024) = 1000"),
    ],
)
def test_what_does_not_is_named(tmp_path: Path, changes: dict[str, int], ranks: int, key: str) -> None:
    said = undivided(shape(tmp_path, **changes), ranks)
    assert said == f"{ranks} does not divide {key} of {tmp_path / 'config.json'}"


def test_fewer_kv_heads_than_ranks_are_repeated_and_a_nested_text_config_counts(tmp_path: Path) -> None:
    assert undivided(shape(tmp_path, num_key_value_heads=1), 4) == ""
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "text_config": {**SHAPE, "n_head": 3}}))
    assert undivided(tmp_path, 5).startswith("5 does not divide num_attention_heads = 12")


@pytest.mark.parametrize("text", ["", "[]", '{"num_attention_heads": "many"}'])
def test_a_file_that_says_nothing_is_for_the_loader_to_refuse(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert undivided(tmp_path, 3) == ""


def test_config_check_says_it_in_one_sentence(tmp_path: Path) -> None:
    file = shape(tmp_path, num_attention_heads=9) / "belayer.toml"
    file.write_text(
        f'[[model]]\nname = "m"\npath = "{tmp_path}"\n[[slot]]\nname = "s"\nmodel = "m"\ntensor_parallel = 2\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "belayerctl", "config", "check", str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "BELAYER_ROOT"},
    )
    assert done.returncode == 2
    assert f"{file}: slot[0].tensor_parallel: 2 does not divide num_attention_heads = 9 of {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr
