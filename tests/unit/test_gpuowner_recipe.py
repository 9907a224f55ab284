"""Recipes, parts and digests: every element lands once, where the engine's loader would put it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from belayer.errors import WeightsBroken
from belayer.messages.owner import TensorSpec
from gpuowner import recipes
from gpuowner.copying import Files, MapSink, array_jobs, base_jobs, file_jobs, run_jobs, typed
from gpuowner.digest import CHUNK, chunk_digests, first_difference
from gpuowner.layout import place
from gpuowner.parts import Parts, complement
from gpuowner.recipe import Param, Piece, Recipe, c_strides, is_plain, is_run, key, merged, plain_recipe
from gpuowner.safetensors_file import RawTensor
from gpuowner.tensors import host_tensor, raw_tensor
from gpuowner.vmem import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE, Mapping

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def raw(name: str, shape: tuple[int, ...], dtype: str = "F32") -> RawTensor:
    return RawTensor(name, dtype, shape, Path("/nowhere"), 0, 0)


def quiet(done: int, nbytes: int, rate: float) -> None:
    pass


def fill(specs: tuple[TensorSpec, ...], nbytes: int, given: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The mapping's bytes after ``given`` was written through the parts."""
    target = bytearray(nbytes)
    parts = Parts(specs)
    jobs = []
    for name, array in given.items():
        tensor = host_tensor(name, array)
        for spec in parts.of(name, tensor.dtype, tensor.shape):
            jobs.extend(array_jobs(spec, tensor.flat, tensor.dtype))
    run_jobs(jobs, MapSink(target), 2, quiet, None, ())
    return np.frombuffer(bytes(target), dtype=np.uint8)


def named(specs: tuple[TensorSpec, ...], name: str) -> TensorSpec:
    return next(spec for spec in specs if spec.name == name)


def at(data: np.ndarray[Any, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
    return data[spec.offset : spec.offset + spec.nbytes].view("<f4").reshape(spec.shape)


def test_transposes_stacks_and_interleavings_land_element_by_element() -> None:
    w = np.arange(24, dtype="<f4").reshape(4, 6)
    experts = {f"e{i}": np.arange(6, dtype="<f4").reshape(2, 3) + 100 * i for i in range(3)}
    odd = np.arange(12, dtype="<f4").reshape(4, 3)
    recipe = Recipe(
        params=(Param("t", (6, 4), "F32"), Param("x", (3, 2, 3), "F32"), Param("z", (8, 3), "F32")),
        pieces=(
            Piece("w", "t", (6, 4), 0, (1, 6), 0, (4, 1)),
            *(Piece(f"e{i}", "x", (2, 3), 0, (3, 1), 6 * i, (3, 1)) for i in range(3)),
            Piece("even", "z", (4, 3), 0, (3, 1), 0, (6, 1)),
            Piece("odd", "z", (4, 3), 0, (3, 1), 3, (6, 1)),
        ),
    )
    arrays = {"w": w, **experts, "even": -odd, "odd": odd}
    specs, nbytes = place(recipe, {name: raw(name, array.shape) for name, array in arrays.items()}, "F32")
    data = fill(specs, nbytes, arrays)
    np.testing.assert_array_equal(at(data, named(specs, "t")), w.T)
    np.testing.assert_array_equal(at(data, named(specs, "x")), np.stack(list(experts.values())))
    np.testing.assert_array_equal(at(data, named(specs, "z"))[::2], -odd)
    np.testing.assert_array_equal(at(data, named(specs, "z"))[1::2], odd)


def test_items_are_found_in_every_part() -> None:
    """A sparse update counts items of the file's tensor; the engine may hold them transposed and cut in two."""
    recipe = Recipe(
        params=(Param("a", (6, 2), "F32"), Param("b", (6, 2), "F32")),
        pieces=(
            Piece("w", "a", (6, 2), 0, (1, 6), 0, (2, 1)),
            Piece("w", "b", (6, 2), 12, (1, 6), 0, (2, 1)),
        ),
    )
    specs, nbytes = place(recipe, {"w": raw("w", (4, 6))}, "F32")
    parts, w = Parts(specs), np.arange(24, dtype="<f4").reshape(4, 6)
    data = fill(specs, nbytes, {"w": w}).copy()
    indices = np.array([0, 7, 12, 13, 23])
    for spec in parts.parts("w"):
        place_, which = parts.place_items("w", spec, indices)
        data[spec.offset : spec.offset + spec.nbytes].view("<f4")[place_] = -1.0 - which
    w.reshape(-1)[indices] = [-1, -2, -3, -4, -5]
    np.testing.assert_array_equal(data, fill(specs, nbytes, {"w": w}))
    assert parts.elements_of("w") == 24


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (
            [Piece("w", "p", (2, 4), 0, (4, 1), 0, (4, 1)), Piece("v", "p", (2, 4), 0, (4, 1), 4, (4, 1))],
            "over another",
        ),
        (
            [Piece("w", "p", (2, 4), 0, (4, 1), 0, (8, 1)), Piece("v", "p", (2, 4), 0, (4, 1), 2, (8, 1))],
            "over another",
        ),
        ([Piece("w", "p", (2, 4), 0, (4, 1), 12, (4, 1))], "does not fit into p"),
        ([Piece("w", "p", (2, 4), 0, (4, 1), 0, (-4, 1))], "does not fit into p"),
        ([], "nothing in the files fills p"),
    ],
)
def test_a_recipe_that_writes_twice_or_outside_is_refused(pieces: list[Piece], reason: str) -> None:
    tensors = {name: raw(name, (2, 4)) for name in ("w", "v")}
    with pytest.raises(WeightsBroken, match=reason):
        place(Recipe((Param("p", (4, 4), "F32"),), tuple(pieces)), tensors, "F32")


def test_neighbouring_copies_become_one_piece() -> None:
    rows = [Piece("w", "p", (2, 4), 8 * i, (4, 1), 8 * i, (4, 1)) for i in range(3)]
    assert merged(rows) == [Piece("w", "p", (6, 4), 0, (4, 1), 0, (4, 1))]
    apart = [rows[0], Piece("w", "p", (2, 4), 8, (4, 1), 9, (4, 1))]
    assert merged(apart) == apart
    assert c_strides((2, 3, 4)) == (12, 4, 1)
    assert is_run((1, 3, 4), (99, 4, 1))
    assert not is_run((2, 3, 4), (99, 4, 1))


def test_the_rule_is_only_for_what_it_was_written_for() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    assert is_plain(LLAMA, names)
    assert is_plain(LLAMA, [*names, "model.layers.0.self_attn.rotary_emb.inv_freq"])
    assert not is_plain(LLAMA, [*names, "model.layers.0.adapter.weight"])
    assert not is_plain({"architectures": ["GPT2LMHeadModel"]}, names)
    assert not is_plain({**LLAMA, "quantization_config": {}}, names)


def test_tied_padded_and_ignored_tensors_have_their_rows() -> None:
    tensors = {
        name: raw(name, shape)
        for name, shape in {
            "model.embed_tokens.weight": (70, 4),
            "lm_head.weight": (70, 4),
            "model.layers.0.self_attn.rotary_emb.inv_freq": (2,),
        }.items()
    }
    specs, nbytes = place(plain_recipe({**LLAMA, "tie_word_embeddings": True}, tensors), tensors, "F32")
    embed = named(specs, "model.embed_tokens.weight")
    assert (embed.shape, nbytes) == ((128, 4), 128 * 4 * 4)
    assert named(specs, "lm_head.weight").alias_of == embed.name
    parts = Parts(specs)
    assert parts.sources == {"model.embed_tokens.weight"}
    assert parts.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert parts.parts("lm_head.weight") == parts.parts("model.embed_tokens.weight")
    assert parts.of("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (2,)) == []
    with pytest.raises(WeightsBroken, match="no tensor named"):
        parts.parts("model.norm.weight")
    with pytest.raises(WeightsBroken, match="has shape"):
        parts.of("model.embed_tokens.weight", "F32", (128, 4))


def test_a_recipes_key_tells_everything_that_decides_it() -> None:
    tensors = {"w": raw("w", (2, 4))}
    base = key(b"{}", tensors, "float32", "vllm 1")
    others = {
        key(b"{ }", tensors, "float32", "vllm 1"),
        key(b"{}", {"w": raw("w", (4, 2))}, "float32", "vllm 1"),
        key(b"{}", {"w": raw("w", (2, 4), "BF16")}, "float32", "vllm 1"),
        key(b"{}", tensors, "bfloat16", "vllm 1"),
        key(b"{}", tensors, "float32", "vllm 2"),
    }
    assert len(others - {base}) == 5


def test_what_is_between_ranges() -> None:
    assert complement([], 0, 10) == [(0, 10)]
    assert complement([(2, 4), (3, 6), (8, 20)], 0, 10) == [(0, 2), (6, 8)]
    assert complement([(0, 10)], 0, 10) == []
    assert complement([(20, 30)], 0, 10) == [(0, 10)]
    assert complement([(0, 3)], 5, 10) == [(5, 10)]


def test_chunks_are_hashed_once_their_last_byte_is_there(tmp_path: Path) -> None:
    """Three chunks; many jobs on four threads; the digests are those of the final bytes."""
    nbytes = 2 * CHUNK + 12345
    content = np.random.default_rng(3).integers(0, 255, nbytes, dtype=np.uint8)
    text = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + content.tobytes())
    tensors = {"w": RawTensor("w", "U8", (nbytes,), path, 8 + len(text), 8 + len(text) + nbytes)}
    specs, size = place(plain_recipe({}, tensors), tensors, "")
    target, files = bytearray(size), Files()
    jobs = list(file_jobs(specs, tensors, files))
    digests = run_jobs(jobs, MapSink(target), 4, quiet, memoryview(target), range(3))
    files.close()
    assert [digests[index] for index in range(3)] == list(chunk_digests(content.tobytes(), threads=3))
    assert first_difference(target, tuple(digests[index] for index in range(3)), threads=2) is None
    target[CHUNK] ^= 1
    assert first_difference(target, tuple(digests[index] for index in range(3)), threads=2) == 1
    base = Mapping(-1, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS)
    memoryview(base.buffer()).cast("B")[:] = content.tobytes()
    run_jobs(base_jobs([(CHUNK, CHUNK + 1)], base), MapSink(target), 1, quiet, None, ())
    assert bytes(target) == content.tobytes()
    base.close()


def test_tensors_of_every_kind_give_the_same_bits() -> None:
    torch = pytest.importorskip("torch")
    values = np.array([[1.5, -2.0], [0.25, 3.0]], dtype="<f4")
    plain = host_tensor("w", values)
    for other in (
        torch.from_numpy(values.copy()),
        values[:, ::-1][:, ::-1],
        raw_tensor("F32", (2, 2), values.tobytes()),
    ):
        got = host_tensor("w", other)
        assert (got.dtype, got.shape) == (plain.dtype, plain.shape)
        np.testing.assert_array_equal(got.flat, plain.flat)
    narrow = host_tensor("w", torch.from_numpy(values).to(torch.bfloat16).t())
    assert (narrow.dtype, narrow.shape) == ("BF16", (2, 2))
    np.testing.assert_array_equal(narrow.flat, typed(values.T.copy().view("<u4") >> 16, "F32").astype("<u2"))
    assert host_tensor("s", np.array(2, dtype=np.float32)).shape == ()
    assert host_tensor("e", torch.empty((0, 3))).flat.size == 0
    for bad, reason in (("text", "not a tensor"), (np.zeros(2, dtype=complex), "dtype complex128"),
                        (torch.empty(2, device="meta"), "lies on meta")):  # fmt: skip
        with pytest.raises(WeightsBroken, match=reason):
            host_tensor("w", bad)
    with pytest.raises(WeightsBroken, match="no tensor of shape"):
        raw_tensor("F32", (3,), b"\0" * 8)


def test_an_unanswered_question_is_an_error_with_the_last_words(tmp_path: Path, folder_of_gpt2: Path) -> None:
    tensors = {"wte.weight": raw("wte.weight", (2, 2))}
    with pytest.raises(WeightsBroken, match=r"model folder .*: no model\.safetensors"):
        recipes.find(folder_of_gpt2, tensors, "float32", tmp_path / "kept")
    assert not list((tmp_path / "kept").glob("*.msgpack")), "a refusal is not kept as an answer"


@pytest.fixture
def folder_of_gpt2(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    return folder
