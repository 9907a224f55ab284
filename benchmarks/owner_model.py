"""A model of any size for benchmarks/owner.py, and the two baselines that read it: read(2) and vLLM's own loader."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from belayer.clock import Stopwatch

BLOCK = 4 << 20
SHARD = 1 << 30  # bytes of a file
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    width, inner, kv, vocab = 2048, 5632, 512, 32000
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q", width), ("k", kv), ("v", kv), ("o", width)):
            out[f"{at}.self_attn.{name}_proj.weight"] = (rows, width)
        out[f"{at}.mlp.gate_proj.weight"] = out[f"{at}.mlp.up_proj.weight"] = (inner, width)
        out[f"{at}.mlp.down_proj.weight"] = (width, inner)
        out[f"{at}.input_layernorm.weight"] = out[f"{at}.post_attention_layernorm.weight"] = (width,)
    return {**out, "model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def nbytes(shape: tuple[int, ...]) -> int:
    return 2 * int(np.prod(shape))


def make(folder: Path, gib: float, seed: int = 0) -> list[Path]:
    """Write a bf16 model of about ``gib`` GiB in shards; returns its files."""
    folder.mkdir(parents=True)
    fixed = sum(nbytes(shape) for shape in shapes(0).values())
    layer = sum(nbytes(shape) for shape in shapes(1).values()) - fixed
    layers = max(1, round((gib * 2**30 - fixed) / layer))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    # Small random values, as weights are: one tile of random bits, cut at another place for every tensor.
    tile = np.random.default_rng(seed).standard_normal(32 << 20, dtype=np.float32)
    bits = ((tile * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes(layers).items():
        if sum(nbytes(one) for one in shards[-1].values()) + nbytes(shape) > SHARD and shards[-1]:
            shards.append({})
        shards[-1][name] = shape
    where, files = {}, []
    for number, tensors in enumerate(shards):
        path = folder / f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        _write(path, tensors, bits, number)
        where.update(dict.fromkeys(tensors, path.name))
        files.append(path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return files


def _write(
    path: Path, tensors: dict[str, tuple[int, ...]], bits: np.ndarray[tuple[int], np.dtype[np.uint16]], salt: int
) -> None:
    header, at = {}, 0
    for name, shape in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes(shape)]}
        at += nbytes(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, shape in enumerate(tensors.values()):
            left, start = nbytes(shape) // 2, (salt * 7919 + number * 104729) % (bits.size // 2)
            while left:
                part = bits[start : start + min(left, bits.size - start)]
                file.write(part.tobytes())
                left, start = left - part.size, 0
        file.flush()
        os.fsync(file.fileno())


def forget(files: list[Path]) -> None:
    """Drop the files from the page cache (posix_fadvise(2), DONTNEED): the next read comes from the disk."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain_read(files: list[Path], threads: int) -> float:
    """Milliseconds to read all files by read(2) into small buffers that are used again: nothing can load faster."""

    def one(path: Path) -> None:
        buffer = bytearray(BLOCK)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    watch = Stopwatch()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, files))
    return watch.ms()


def plain_read_kept(files: list[Path]) -> float:
    """Milliseconds to read all files into fresh memory, as a loader must at least."""
    watch = Stopwatch()
    kept = []
    for path in files:
        memory = np.empty(path.stat().st_size, dtype=np.uint8)
        with path.open("rb", buffering=0) as file:
            at = 0
            while got := file.readinto(memory[at:].data):
                at += got
        kept.append(memory)
    return watch.ms()


_THEIRS = """
import gc, os, sys, time
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
args = EngineArgs(model=sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64)
config = args.create_engine_config()
with set_current_vllm_config(config):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    init_distributed_environment(1, 0, "env://", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
    os.write(3, b"ready\\n")
    for _ in sys.stdin:
        config.compilation_config.static_forward_context.clear()
        begun = time.perf_counter()
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(config, model_config=config.model_config)
            DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
        took = (time.perf_counter() - begun) * 1000
        del model
        config.compilation_config.static_forward_context.clear()
        gc.collect()  # a model is full of cycles: without this each round would keep two more gigabytes
        os.write(3, b"%f\\n" % took)
"""


class Theirs:
    """vLLM's own loader in a process that has imported vLLM already: only building and loading is timed."""

    def __init__(self, folder: Path) -> None:
        from belayerd.worker.zygote import ENVIRONMENT

        ours, theirs = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 closed with the process
        env = {**ENVIRONMENT, **os.environ}
        command = ["bash", "-c", 'exec 3>&"$0"; exec "$@"', str(theirs), sys.executable, "-c", _THEIRS, str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, env=env,
            pass_fds=(theirs,), text=True,
        )  # fmt: skip
        os.close(theirs)
        self._answers = os.fdopen(ours)
        if self._answers.readline() != "ready\n":
            raise RuntimeError(f"vLLM's own loader could not be set up: {self._words()}")

    def load(self) -> float:
        """Milliseconds of one load."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended between two loads: the empty answer below tells why
            os.write(self._process.stdin.fileno(), b"load\n")
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"vLLM's own loader ended: {self._words()}")
        return float(answer)

    def _words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        return f"status {status}: " + self._errors.read()[-2000:].decode(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._errors.close()
