"""``config check``: what each rule refuses or warns of, by the key that is wrong; and what it must leave alone."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from belayer import config as configs
from belayer import config_check, model_files, model_fits, parser_words
from belayer.config_sense import is_host
from belayer.errors import ConfigInvalid

TREE = Path(__file__).parents[2]
PLAIN = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "max_position_embeddings": 4096,
}  # fmt: skip
PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, their width, bytes of a float32
SLOT = f"max_model_len = 512\nkv_bytes = {1 << 20}"


def model(folder: Path, config: dict[str, Any] | None = None, kind: str = "F32", shape: tuple[int, ...] = (4,)) -> Path:
    """A folder whose one tensor has a header and no bytes: nothing here reads them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PLAIN if config is None else config))
    header = json.dumps({"__metadata__": {}, "w": {"dtype": kind, "shape": shape, "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


def written(tmp_path: Path, slot: str = SLOT, extra: str = "", about_model: str = "") -> Path:
    file = tmp_path / "belayer.toml"
    file.write_text(
        f'{extra}\n[[model]]\nname = "m"\npath = "m"\n{about_model}\n[[slot]]\nname = "s"\nmodel = "m"\n{slot}\n'
    )
    return file


def seen(file: Path, memory: int = 1 << 40) -> list[tuple[str, str, bool]]:
    return [tuple(one) for one in config_check.findings(configs.load(file), memory)]  # type: ignore[misc]


# --- values that make no sense (config.load) ---


@pytest.mark.parametrize(
    ("slot", "extra", "key"),
    [
        ("hang_limit_s = inf", "", r"slot\[0\].hang_limit_s: inf is not a number up to"),
        ("start_deadline_s = 1e9", "", r"slot\[0\].start_deadline_s"),
        ("start_deadline_s = -1.0", "", r"slot\[0\].start_deadline_s"),
        ("hang_limit_s = 0", "", r"slot\[0\].hang_limit_s"),
        ("hang_limit_s = nan", "", r"slot\[0\].hang_limit_s"),
        ("hang_limit_s = 200.0", "", r"slot\[0\].start_deadline_s: must be longer than hang_limit_s"),
        ("", "[policy]\nfence_deadline_s = inf", r"policy.fence_deadline_s"),
        ("", '[router]\nhost = "rack1"', "router.host: 'rack1' is neither"),
        ("", '[router]\nhost = "[::1]"', "router.host"),
        ("", "[router]\nport = 65536", "router.port"),
        ("url_port = -1", "", "slot.*url_port"),
        ("url_port = 8000", "", r"slot\[0\].url_port: 8000 is used twice"),
        ("url_port = 7300", '[fleet]\nlisten = "0.0.0.0:7300"', r"slot\[0\].url_port: 7300 is the port of the fleet"),
        ("max_num_batched_tokens = 8", "", r"slot\[0\].max_num_batched_tokens: 8 must not be below max_num_seqs = 64"),
    ],
)
def test_what_makes_no_sense_is_refused_by_every_daemon(tmp_path: Path, slot: str, extra: str, key: str) -> None:
    model(tmp_path / "m")
    with pytest.raises(ConfigInvalid, match=key):
        configs.load(written(tmp_path, slot, extra))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::", "fd00::2"])
def test_addresses_are_taken(host: str) -> None:
    assert is_host(host)


# --- the context (model_fits.too_long) ---

YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 4096),
        (YARN, 4096),  # its length is the scaled one
        (LINEAR, 8192),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "other": {}}}, 32768),
        ({"model_type": "gemma3_text", **LINEAR}, 4096),
        ({"max_position_embeddings": None, "n_positions": 1024}, 1024),
        ({"seq_length": 2048}, 2048),  # the smallest key counts
        ({"model_max_length": 8000}, 8000),  # but this one before all
        ({"text_config": {"max_position_embeddings": 128}}, 128),
    ],
)
def test_the_longest_context_is_what_vllm_derives(changes: dict[str, Any], most: int) -> None:
    config = {**PLAIN, **changes}
    assert model_fits.too_long(config, most) == ""
    said = model_fits.too_long(config, most + 1)
    assert said.endswith(f"tokens, not {most + 1}")
    assert ("scaled by RoPE" in said) == (most > 4096 and "model_max_length" not in changes)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_position_embeddings": "many"}, {"max_position_embeddings": True}, {**PLAIN, "language_config": {}}],
)
def test_a_context_that_is_not_certain_is_left_to_vllm(config: dict[str, Any]) -> None:
    assert model_fits.too_long(config, 1 << 30) == ""


# --- one request in the arena (model_fits.too_few_bytes) ---


@pytest.mark.parametrize(
    ("changes", "dtype", "ranks", "per_token"),
    [
        ({}, "float32", 1, PER_TOKEN),
        ({}, "bfloat16", 1, PER_TOKEN // 2),
        ({}, "float32", 2, PER_TOKEN // 2),
        ({}, "float32", 4, PER_TOKEN // 2),  # fewer heads than ranks: each has one
        ({"head_dim": 32}, "float32", 1, 2 * PER_TOKEN),
        ({"model_type": "qwen3", "head_dim": 16}, "float32", 1, PER_TOKEN),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "float32", 1, PER_TOKEN),
    ],
)
def test_an_arena_holds_at_least_one_request(changes: dict[str, Any], dtype: str, ranks: int, per_token: int) -> None:
    config, need = {**PLAIN, **changes}, 512 * per_token
    assert model_fits.too_few_bytes(config, dtype, need, 500, 32, ranks) == "", "16 blocks of 32"
    said = model_fits.too_few_bytes(config, dtype, need - 1, 500, 32, ranks)
    assert said == f"holds 480 tokens of this model, and one request may have max_model_len = 500: that takes {need}"


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "deepseek_v3"},  # keeps something else
        {"model_type": "qwen3"},  # its width has a default that only vLLM knows
        {"sliding_window": 128},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"num_key_value_heads": None},
    ],
)
def test_an_arena_of_which_it_is_not_certain_is_left_to_vllm(changes: dict[str, Any]) -> None:
    assert model_fits.too_few_bytes({**PLAIN, **changes}, "float32", 1, 4096, 32, 1) == ""


# --- dtype ---


@pytest.mark.parametrize(
    ("stored", "dtype", "all_", "some"),
    [
        ({"BF16": 9}, "bfloat16", "", ""),
        ({"BF16": 9}, "float32", "", ""),
        ({"F16": 9}, "float32", "", ""),
        ({"BF16": 9}, "float16", "take bfloat16 or float32", ""),
        ({"F16": 9}, "bfloat16", "take float16 or float32", ""),
        ({"F32": 9}, "bfloat16", "take float32", ""),
        ({"BF16": 9, "F16": 1}, "float16", "", "hold bfloat16,"),
        ({"BF16": 9, "F32": 1}, "bfloat16", "", "hold float32,"),
        ({"BF16": 9, "F32": 1}, "float16", "take float32", ""),
        ({"I8": 9}, "float16", "", ""),
        ({}, "float16", "", ""),
    ],
)
def test_no_weight_loses_a_bit(stored: dict[str, int], dtype: str, all_: str, some: str) -> None:
    told = model_fits.lossy(stored, dtype)
    assert bool(told[0]) == bool(all_)
    assert bool(told[1]) == bool(some)
    assert all_ in told[0]
    assert some in told[1]


def test_bytes_of_the_loaded_weights() -> None:
    assert model_fits.weight_bytes({"BF16": 10, "I64": 2, "F8_E4M3": 3}, "float32") == 40 + 16 + 3
    assert model_fits.weight_bytes({"BF16": 10}, "bfloat16") == 20


# --- the whole look ---


def test_a_good_one_has_nothing_to_be_said_about(tmp_path: Path) -> None:
    model(tmp_path / "m")
    assert seen(written(tmp_path)) == []


def test_each_finding_names_its_key(tmp_path: Path) -> None:
    vocabulary = {"model": {"vocab": {"a": 0, "</think>": 1}}, "added_tokens": [{"content": "<x>"}]}
    model(tmp_path / "m", {**PLAIN, "model_type": "gemma2"}, "BF16")
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(vocabulary))
    extra = '[router]\nreasoning_parser = "deepseek_r1"\ntool_parser = "hermes"'
    file = written(tmp_path, "max_model_len = 5000", extra, 'dtype = "float16"')
    found = {key: (said, fatal) for key, said, fatal in seen(file)}
    assert found.keys() == {"model[0].dtype", "slot[0].max_model_len", "router.reasoning_parser"}
    assert "max_position_embeddings = 4096" in found["slot[0].max_model_len"][0]
    assert found["router.reasoning_parser"] == (
        f"'deepseek_r1' looks for <think>, of which the tokenizer of {tmp_path / 'm'} has no token", True
    )  # fmt: skip
    assert [said for key, said, _ in seen(file) if key == "model[0].dtype"] == [
        "vLLM does not compute gemma2 in float16",
        "the files hold bfloat16, which cannot become float16 without loss: take bfloat16 or float32",
    ]
    file = written(tmp_path, SLOT, '[router]\nreasoning_parser = "qwen3"')
    assert [(key, fatal) for key, _, fatal in seen(file)] == [("router.reasoning_parser", False)]


@pytest.mark.parametrize(
    ("key", "name", "near"), [("tool_parser", "hermess", "hermes"), ("reasoning_parser", "qwen", "qwen3")]
)
def test_a_parser_that_vllm_does_not_have(tmp_path: Path, key: str, name: str, near: str) -> None:
    model(tmp_path / "m")
    ((found, said, fatal),) = seen(written(tmp_path, SLOT, f'[router]\n{key} = "{name}"'))
    assert (found, fatal) == (f"router.{key}", True)
    assert said.startswith(f"vLLM has no {name!r}; it has ")
    assert near in said


def test_names_come_without_an_import_of_vllm() -> None:
    ask = "import sys, belayer.parser_words as p\nassert p.names('tool_parser') and p.names('reasoning_parser')"
    heavy = "assert not {'vllm', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", f"{ask}\n{heavy}"], cwd=TREE, check=False)
    assert done.returncode == 0
    assert parser_words._keys(Path("/nowhere")) == frozenset()


def test_memory_is_added_up_and_warned_of(tmp_path: Path) -> None:
    model(tmp_path / "m", shape=(1 << 20,))  # 4 MiB as float32
    file = written(tmp_path, f"{SLOT}\npacked_weights = true")  # an arena of 1 MiB, packed matrices of 8
    assert seen(file, 17 << 20) == []
    assert seen(file, (17 << 20) - 1) == [
        (
            "model.update",
            'weights and arenas take 13 MiB, an update 4 more (update = "in_place": none), and this machine has 16 MiB',
            False,
        )
    ]
    assert seen(written(tmp_path, f"{SLOT}\npacked_weights = true", about_model='update = "in_place"'), 13 << 20) == []
    ((key, said, fatal),) = seen(file, (13 << 20) - 1)
    assert (key, fatal) == ("slot.kv_bytes", False)
    assert said == "weights take 4 MiB, arenas 1, packed matrices 8, and this machine has 12 MiB"
    pool = written(tmp_path, SLOT, "[envkeeper]\npool = 3\nmemory_mb = 512")
    assert [key for key, _, _ in seen(pool, 1 << 30)] == ["envkeeper.pool"]
    assert seen(written(tmp_path, SLOT, "[envkeeper]\npool = 3\nenabled = false"), 1 << 30) == []


def test_two_models_and_missing_files(tmp_path: Path) -> None:
    model(tmp_path / "m")
    (model(tmp_path / "n") / "model.safetensors").unlink()
    more = f'[[model]]\nname = "n"\npath = "n"\n[[slot]]\nname = "t"\nmodel = "n"\n{SLOT}'
    keys = [(key, fatal) for key, _, fatal in seen(written(tmp_path, f"{SLOT}\n{more}"))]
    assert keys == [("slot", True), ("model[1].path", True)]


LIES = [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"w": 1} ']


@pytest.mark.parametrize("header", LIES)
def test_files_that_cannot_be_read_say_nothing(tmp_path: Path, header: bytes) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(header)
    (folder / "tokenizer.json").write_text('{"model": 3}')
    assert model_files.stored(folder) == Counter()
    assert model_files.vocabulary(folder) is None


def test_shards_and_a_unigram_are_read(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"w": "a.safetensors", "x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["▁a", -1.0], ["b", -2.0]]}}))
    assert model_files.stored(folder) == Counter({"F32": 4})
    assert model_files.vocabulary(folder) == {"▁a", "b"}


def check(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "belayerctl", "config", "check", str(file), *words]
    env = {key: value for key, value in os.environ.items() if key != "BELAYER_ROOT"}
    return subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_refuses_and_warns(tmp_path: Path) -> None:
    model(tmp_path / "m", kind="BF16")
    refused = check(written(tmp_path, "max_model_len = 5000", about_model='dtype = "float16"'))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "slot[0].max_model_len: the model takes at most max_position_embeddings = 4096 tokens" in refused.stderr
    assert "model[0].dtype: the files hold bfloat16" in refused.stderr, "all of it at once"
    warned = check(written(tmp_path, SLOT, "[envkeeper]\npool = 1000000"))
    assert warned.returncode == 0
    assert "warning: envkeeper.pool: 1000000 sandboxes" in warned.stderr
    assert "good, with warnings; slots: s" in warned.stdout
    as_json = check(written(tmp_path), "--json")
    assert json.loads(as_json.stdout)["slot"][0]["name"] == "s"
