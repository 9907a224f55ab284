"""Loading: fused neighbours, exact widening, tied names, and a named refusal of every broken folder."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from belayer.errors import HostUnfit, WeightsBroken
from gpuowner.backends.memfd import Memfd
from gpuowner.copying import FdSink, Files, file_jobs, run_jobs
from gpuowner.digest import first_difference
from gpuowner.layout import place
from gpuowner.loader import Loaded, load
from gpuowner.recipe import plain_recipe
from gpuowner.safetensors_file import read_header, read_model

LAYER = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def bf16(values: Any) -> bytes:
    return (np.asarray(values, dtype="<f4").view("<u4") >> 16).astype("<u2").tobytes()


def tensors() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    rng = np.random.default_rng(1)
    shapes = {
        "model.embed_tokens.weight": (8, 4),
        f"{LAYER}.k_proj.weight": (2, 4),
        f"{LAYER}.o_proj.weight": (4, 4),
        f"{LAYER}.q_proj.weight": (6, 4),
        f"{LAYER}.v_proj.weight": (2, 4),
        f"{MLP}.gate_proj.weight": (5, 4),
        f"{MLP}.up_proj.weight": (5, 4),
        "model.norm.weight": (4,),
    }
    return {name: ("BF16", shape, bf16(rng.standard_normal(shape))) for name, shape in shapes.items()}


def save(path: Path, content: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, body = {}, b""
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    save(tmp_path / "model.safetensors", tensors())
    return tmp_path


def quiet(done: int, nbytes: int, rate: float) -> None:
    pass


def view(loaded: Loaded, name: str) -> Any:
    spec = {spec.name: spec for spec in loaded.layout}[name]
    data = bytes(memoryview(loaded.mapping.buffer())[spec.offset : spec.offset + spec.nbytes])
    return np.frombuffer(data, dtype={"F32": "<f4", "BF16": "<u2"}[spec.dtype]).reshape(spec.shape)


def test_parts_of_a_fused_parameter_are_one_view(folder: Path) -> None:
    loaded = load("m", folder, "float32", quiet)
    parts = [view(loaded, f"{LAYER}.{part}_proj.weight") for part in "qkv"]
    np.testing.assert_array_equal(view(loaded, f"{LAYER}.qkv_proj.weight"), np.concatenate(parts))
    halves = [view(loaded, f"{MLP}.{part}_proj.weight") for part in ("gate", "up")]
    np.testing.assert_array_equal(view(loaded, f"{MLP}.gate_up_proj.weight"), np.concatenate(halves))
    np.testing.assert_array_equal(view(loaded, "lm_head.weight"), view(loaded, "model.embed_tokens.weight"))
    starts = [spec.offset for spec in loaded.layout if spec.name.endswith(("qkv_proj.weight", "o_proj.weight"))]
    assert all(offset % 64 == 0 for offset in starts)


def test_widening_is_exact_and_auto_keeps_the_bytes(folder: Path) -> None:
    raw = {name: data for name, (_, _, data) in tensors().items()}
    wide, kept = load("m", folder, "float32", quiet), load("m", folder, "bfloat16", quiet)
    for name, data in raw.items():
        bits = np.frombuffer(data, dtype="<u2").astype("<u4") << 16
        np.testing.assert_array_equal(view(wide, name).ravel(), bits.view("<f4"))
        assert view(kept, name).tobytes() == data
    assert first_difference(wide.mapping.buffer(), wide.chunks) is None
    assert load("m", folder, "float32", quiet).digest == wide.digest != kept.digest


def test_shards_give_the_same_bytes_as_one_file(folder: Path, tmp_path: Path) -> None:
    whole = load("m", folder, "float32", quiet)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text('{"tie_word_embeddings": true}')
    content = tensors()
    names = list(content)
    for number, part in enumerate((names[:3], names[3:])):
        save(sharded / f"s{number}.safetensors", {name: content[name] for name in part})
    where = {name: f"s{int(i >= 3)}.safetensors" for i, name in enumerate(names)}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert load("m", sharded, "float32", quiet).digest == whole.digest

    (sharded / "s1.safetensors").unlink()
    with pytest.raises(WeightsBroken, match=r"s1\.safetensors: the file is missing"):
        load("m", sharded, "float32", quiet)
    save(sharded / "s1.safetensors", {name: content[name] for name in names[4:]})
    with pytest.raises(WeightsBroken, match="the index says that"):
        load("m", sharded, "float32", quiet)
    save(sharded / "s1.safetensors", {**{name: content[name] for name in names[3:]}, "stray": content[names[0]]})
    with pytest.raises(WeightsBroken, match="holds stray, which the index does not list"):
        load("m", sharded, "float32", quiet)


def test_every_truncation_is_refused_by_name(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in {0, 4, 8, 40, len(data) // 2, len(data) - 1}:
        path.write_bytes(data[:length])
        with pytest.raises(WeightsBroken, match=r"model\.safetensors"):
            read_model(folder)
    path.write_bytes(data + b"\0")
    with pytest.raises(WeightsBroken, match="its tensors end at"):
        read_model(folder)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}, "unknown dtype F99"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "does not fit"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}, "does not fit"),
        ({"dtype": "F32", "shape": [1]}, "malformed"),
        ({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}, "malformed"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}, "truncated"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "truncated"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "truncated"),
        ({"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 4 << 62]}, "truncated"),
        ([1], "malformed"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, entry: Any, reason: str) -> None:
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(WeightsBroken, match=reason):
        read_header(path)


def header_file(path: Path, header: str, body: int) -> Path:
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * body)
    return path


def entry(name: str, start: int, end: int) -> str:
    return f'"{name}": {{"dtype": "U8", "shape": [{end - start}], "data_offsets": [{start}, {end}]}}'


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("{" + entry("a", 0, 4) + "," + entry("b", 2, 6) + "}", "b begins at byte .* it overlaps"),
        ("{" + entry("a", 0, 3) + "," + entry("b", 5, 6) + "}", "b begins at byte .* it leaves a hole"),
        ("{" + entry("a", 1, 6) + "}", "a begins at byte .* it leaves a hole"),
        ("{" + entry("a", 0, 3) + "," + entry("a", 3, 6) + "}", "names a twice"),
        ("{" + entry("a", 0, 5) + "}", "its tensors end at"),
        ("[" + "[" * 100000 + "]" * 100001, "cannot be read"),
        ("[1]", "no JSON object"),
        ("{  ", "cannot be read"),
    ],
)
def test_a_header_whose_tensors_do_not_tile_the_file_is_refused(tmp_path: Path, header: str, reason: str) -> None:
    with pytest.raises(WeightsBroken, match=reason):
        read_header(header_file(tmp_path / "x.safetensors", header, 6))


def test_a_tensor_in_two_shards_is_refused(folder: Path, tmp_path: Path) -> None:
    content = tensors()
    names = list(content)
    for number, part in enumerate((names[:4], names[3:])):
        save(folder / f"s{number}.safetensors", {name: content[name] for name in part})
    where = {name: f"s{int(i >= 3)}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(WeightsBroken, match=r"s0\.safetensors: it holds .*, which the index says is in s1"):
        load("m", folder, "float32", quiet)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    with pytest.raises(WeightsBroken, match="no index with a weight_map"):
        load("m", folder, "float32", quiet)


def test_a_file_that_is_cut_while_it_is_read_is_named_and_nothing_is_left_open(folder: Path) -> None:
    """Between the header check and the copy a file may still shrink."""
    raw = read_model(folder)
    layout, nbytes = place(plain_recipe({}, raw), raw, "F32")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    files, memory = Files(), Memfd("cut", nbytes)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightsBroken, match=r"model\.safetensors: it ends inside model\.norm\.weight while it is read"):
        run_jobs(list(file_jobs(layout, raw, files)), FdSink(memory.fd), 2, quiet, None, ())
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
    memory.close()


def test_a_refused_load_leaves_no_memory_behind(folder: Path) -> None:
    save(folder / "model.safetensors", {"w": ("F32", (2,), b"\0" * 8)})
    before = sorted(os.listdir("/proc/self/fd"))
    for dtype, reason in (("bfloat16", "without loss"), ("float8", "unknown dtype")):
        with pytest.raises(WeightsBroken, match=reason):
            load("m", folder, dtype, quiet)
    with pytest.raises(HostUnfit, match="huge pages"):
        load("m", folder, "float32", quiet, huge_pages="large")
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("dtype", "code"), [("F16", "<f2"), ("F32", "<f4")])
def test_every_value_of_a_narrow_float_is_widened_exactly(tmp_path: Path, dtype: str, code: str) -> None:
    bits = np.arange(1 << 16, dtype="<u2") if dtype == "F16" else np.arange(1 << 16, dtype="<u4") << 16
    save(tmp_path / "model.safetensors", {"w": (dtype, (1 << 16,), bits.tobytes())})
    (tmp_path / "config.json").write_text("{}")
    got = view(load("m", tmp_path, "float32", quiet), "w")
    expected = bits.view(code).astype("<f4")
    np.testing.assert_array_equal(got.view("<u4"), expected.view("<u4"))


def test_progress_ends_with_everything(folder: Path) -> None:
    seen: list[tuple[int, int, float]] = []
    loaded = load("m", folder, "float32", lambda *row: seen.append(row))
    done, of, rate = seen[-1]
    assert done == of == sum(spec.nbytes for spec in loaded.layout if not spec.alias_of)
    assert rate > 0
    assert loaded.mb_per_s > 0


def test_what_cannot_be_converted_or_stacked_is_refused(folder: Path) -> None:
    content = tensors()
    content[f"{LAYER}.k_proj.weight"] = ("BF16", (2, 5), b"\0" * 20)
    save(folder / "model.safetensors", content)
    with pytest.raises(WeightsBroken, match="do not stack"):
        load("m", folder, "float32", quiet)
    content = {"w": ("F32", (2,), b"\0" * 8)}
    save(folder / "model.safetensors", content)
    with pytest.raises(WeightsBroken, match="without loss"):
        load("m", folder, "bfloat16", quiet)
    (folder / "config.json").unlink()
    with pytest.raises(WeightsBroken, match=r"config\.json"):
        load("m", folder, "float32", quiet)


def test_a_model_larger_than_the_host_is_refused_before_allocation(folder: Path) -> None:
    path = folder / "model.safetensors"
    rows, columns = 1 << 20, 1 << 20  # 2 TiB as bf16; the file is sparse
    size = rows * columns * 2
    text = json.dumps({"w": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, size]}}).encode()
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + size)
    except OSError:
        pytest.skip("this file system holds no sparse file of 2 TiB")
    with pytest.raises(HostUnfit, match="MiB available"):
        load("m", folder, "float32", quiet)
