"""``python -m tests.support.architectures ROOT``: what tests/e2e/test_weights.py reads, measured in real engines.

vLLM is imported once; each case runs in a forked child, because a process can sit in one engine's seat only, and
leaves ROOT/<case>.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from belayer import statefile
from belayerd.worker.zygote import ENVIRONMENT
from tests.support import rank_parts, tiny_models

PROMPT = [5, 6, 7, 8, 9, 10, 11, 250, 3, 17]
COUNT = 24
ENGINES = {  # kind -> (dtype of the files, mode of the update)
    "llama": ("float32", "in_place"),
    "qwen2": ("bfloat16", "swap"),
    "gpt2": ("float32", "swap"),
    "qwen3_moe": ("float32", "swap"),
}
PACKED = ("llama", "gpt2")  # updated in place and by swap; gpt2 has biases and transposed files
DTYPES = {"qwen3": "bfloat16", "gpt_neox": "bfloat16", "opt": "float16"}  # of files and engine; float32 elsewhere
STATE_DICT = "gpt2"  # updated as a trainer does it: tied and transposed tensors from torch
ASKED = "gpt2"  # its owner asks vLLM itself; for other kinds the answer is there already, to save ten seconds

PRELOAD = (
    "belayerd.worker.adapter.arena",
    "belayerd.worker.adapter.trace",
    "belayerd.worker.main",
    "vllm.entrypoints.llm",
    "vllm.v1.executor.uniproc_executor",
)


def recipe_of(folder: Path, dtype: str = "float32") -> Any:
    from belayerd.worker.adapter.trace import trace
    from gpuowner.safetensors_file import read_model

    return trace(folder, dtype, read_model(folder))


# --- bytes: the owner's layout against vLLM's own loader ---


def same_bytes(kind: str, root: Path) -> dict[str, Any]:
    """Names of parameters whose bytes in the owner's layout differ from those that vLLM's loader puts there."""
    import numpy as np
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from gpuowner import recipes
    from gpuowner.layout import place
    from gpuowner.loader import DTYPES as DTYPE_NAMES
    from gpuowner.loader import load
    from gpuowner.recipe import is_plain
    from gpuowner.safetensors_file import read_model

    folder, dtype = root / f"{kind}-1", DTYPES.get(kind, "float32")
    tensors = read_model(folder)
    recipe = recipe_of(folder, dtype)
    traced, _ = place(recipe, tensors, DTYPE_NAMES[dtype])
    plain = is_plain(recipes.read_config(folder)[1], tensors)
    if not plain:
        statefile.save(answer_of(folder, root / "kept", dtype), recipe)
    loaded = load(kind, folder, dtype, lambda *_: None, kept=root / "kept")
    specs = {spec.name: spec for spec in loaded.layout}
    data = np.frombuffer(loaded.mapping.buffer(), dtype=np.uint8)
    args = EngineArgs(model=str(folder), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=16)
    config = args.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(getattr(torch, dtype)):
        model = initialize_model(config, model_config=config.model_config)
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    theirs = {name: value.detach().contiguous().view(-1).view(torch.uint8) for name, value in model.named_parameters()}
    ours = {name: data[specs[name].offset : specs[name].offset + specs[name].nbytes] for name in theirs}
    return {
        "plain": plain,
        "count": len(theirs),
        "differ": [name for name, value in theirs.items() if not np.array_equal(value.numpy(), ours[name])],
        "rule_differs": sorted(
            spec.name for spec in traced if not spec.alias_of and spec.nbytes and spec.shape != specs[spec.name].shape
        ),
        "reordered": [spec.name for spec in loaded.layout if spec.source_strides],
    }


def refused(kind: str, root: Path) -> dict[str, Any]:
    from belayer.errors import WeightsBroken

    tiny_models.make(kind, root / kind)
    try:
        recipe_of(root / kind)
    except WeightsBroken as why:
        return {"said": str(why)}
    return {"said": ""}


def answer_of(folder: Path, kept: Path, dtype: str = "float32") -> Path:
    """Where the owner will look for vLLM's answer."""
    from gpuowner import recipes
    from gpuowner.recipe import key
    from gpuowner.safetensors_file import read_model

    raw, _ = recipes.read_config(folder)
    return kept / f"{key(raw, read_model(folder), dtype, recipes.engine_version())}.msgpack"


# --- tokens: an engine on the owner's memory against vLLM's own ---


def tokens_of_vllm(folder: Path, engines: list[Any]) -> dict[str, Any]:
    """``engines`` keeps the engine: when one is dropped, vLLM ends the process groups of the next one too."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
        kv_cache_memory_bytes=8 << 20, block_size=32, max_num_seqs=4,
    )  # fmt: skip
    engines.append(engine)
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, logprobs=1, ignore_eos=True, detokenize=False)
    made = engine.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0]
    rows = zip(made.token_ids, made.logprobs or [], strict=True)
    return {"tokens": list(made.token_ids), "logprobs": [row[token].logprob for token, row in rows]}


def engine_case(kind: str, root: Path, slot: str = "") -> dict[str, Any]:
    """``slot``: more lines of its configuration."""
    from tests.support.owner_stack import Stack

    _, mode = ENGINES[kind]
    lines = f"kv_bytes = 8388608\nmax_model_len = 128\nmax_num_seqs = 4\n{slot}"
    stack = Stack(lines, model=root / f"{kind}-1")
    stack.paths.config.write_text(stack.paths.config.read_text().replace("[[slot]]", f'update = "{mode}"\n[[slot]]'))
    try:
        if kind != ASKED:
            path = answer_of(root / f"{kind}-1", stack.paths.state / "recipes")
            in_child(lambda: statefile.save(path, recipe_of(root / f"{kind}-1")))
        for name in ("weights", "kv"):
            stack.wait_socket(stack.daemon("gpuowner", "--kind", name), stack.paths.owner_sock(name))
        engines: list[Any] = []
        theirs = [tokens_of_vllm(root / f"{kind}-{version}", engines) for version in (1, 2)]
        return {"theirs": theirs, **ours(stack, root / f"{kind}-2", mode)}
    finally:
        stack.stop()


def ours(stack: Any, second: Path, mode: str) -> dict[str, Any]:
    """Tokens of the worker's engine before and after the update to the weights in ``second``."""
    from belayer.config import load
    from belayer.messages.owner import Role
    from belayerd.worker.adapter import seat, weights
    from belayerd.worker.adapter.core import Core, engine_args
    from belayerd.worker.standby import take_oracle
    from gpuowner.attach import ArenaView, OwnerClient, WeightsView
    from gpuowner.update import begin_update

    config = load(stack.paths.config)
    slot, model = config.slot[0], config.model[0]
    path = stack.paths.owner_sock("weights")
    view = WeightsView(OwnerClient(path, Role.WORKER, "w"), model.name)
    view.verify()
    arena = ArenaView(OwnerClient(stack.paths.owner_sock("kv"), Role.WORKER, "w"), slot.name, slot.kv_bytes)
    seat.take(seat.Seat(view, arena, lambda tokens: None, lambda: None, packed=slot.packed_weights))
    args = engine_args(model, slot)
    args.skip_tokenizer_init = True
    core = Core(args, lambda client, outputs: None)
    core.set_weight_version("1")
    bound = seat.seat().bound
    assert bound is not None
    vocab = core.vllm_config.model_config.get_vocab_size()
    module = core.model_executor.driver_worker.worker.model_runner.model
    first, oracle = tokens_of_core(core), take_oracle(core, vocab, 1)[0]
    before = {name: value.data_ptr() for name, value in module.named_parameters()}
    held = on_board(core)  # and no step is taken until the engine has moved
    loader = OwnerClient(path, Role.LOADER, "trainer", timeout=300.0)
    update = begin_update(loader, model.name, mode=mode, whole=True)
    if STATE_DICT in second.name:
        import transformers

        update.write(transformers.AutoModelForCausalLM.from_pretrained(second).state_dict())
    else:
        update.write_folder(second)
    update.commit()
    moved = weights.move_engine(core)
    across = held + finish(core)
    after = {name: value.data_ptr() for name, value in module.named_parameters()}
    copied = [row.name for row in bound.copies]
    return {
        "ours": [first, tokens_of_core(core)],
        "continued": continued(core, held),
        "oracles": [[one.weight_version, one.token] for one in (oracle, take_oracle(core, vocab, moved.now)[0])],
        "version": core.weight_version(),
        "across": across,
        "moved": [moved.was, moved.now, moved.remapped],
        "same_addresses": [name for name in before if before[name] == after[name]],
        "parameters": sorted(before),
        "copied": copied,
        "outside": [
            name for name, value in module.named_parameters()
            if not view.mapping.contains(value.data_ptr(), value.numel() * value.element_size())
        ],
        "views": bound.views,
        "packed": bound.packed_bytes,
    }  # fmt: skip


def request(name: str, count: int) -> Any:
    from vllm.sampling_params import SamplingParams

    from belayerd.worker.standby import _request

    return _request(name, PROMPT, SamplingParams(temperature=0.0, max_tokens=count, logprobs=1, ignore_eos=True))


def on_board(core: Any) -> list[int]:
    """A request that has made a few tokens with the old weights, and is still running: those tokens."""
    core._internal = []
    core.add(request("across", COUNT), [])
    while len(tokens := [token for out in core._internal for token in out.new_token_ids]) < 5:
        core.turn()
    core._internal = []
    return tokens


def continued(core: Any, held: list[int]) -> list[int]:
    """What the new weights alone say after the prompt and ``held``."""
    outs = core.run_alone([request("continued", COUNT)], {"belayer-continued": held})
    return held + [token for out in outs for token in out.new_token_ids]


def finish(core: Any) -> list[int]:
    while not any(out.finish_reason is not None for out in core._internal):
        core.turn()
    return [token for out in core._internal for token in out.new_token_ids]


def tokens_of_core(core: Any) -> dict[str, Any]:
    outs = core.run_alone([request("case", COUNT)], {})
    tokens = [token for out in outs for token in out.new_token_ids]
    logprobs = [float(row[0]) for out in outs if out.new_logprobs is not None for row in out.new_logprobs.logprobs]
    return {"tokens": tokens, "logprobs": logprobs}


# --- running ---


def in_child(act: Callable[[], Any]) -> None:
    """Run in a forked child. Raises RuntimeError when it fails; its words are on standard error."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001 the parent's stack must never be unwound in the child
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise RuntimeError("the child failed")


def main() -> None:
    root = Path(sys.argv[1])
    wanted = sys.argv[2:]
    cases: dict[str, Callable[[], dict[str, Any]]] = {}
    for kind in tiny_models.KINDS:
        cases[f"bytes-{kind}"] = lambda kind=kind: same_bytes(kind, root)  # type: ignore[misc]
    for kind in rank_parts.KINDS:
        cases[f"ranks-{kind}"] = lambda kind=kind: rank_parts.same_parts(kind, root, in_child)  # type: ignore[misc]
    for kind in tiny_models.REFUSED:
        cases[f"refused-{kind}"] = lambda kind=kind: refused(kind, root)  # type: ignore[misc]
    for kind in ENGINES:
        cases[f"engine-{kind}"] = lambda kind=kind: engine_case(kind, root)  # type: ignore[misc]
    for kind in PACKED:
        cases[f"packed-{kind}"] = lambda kind=kind: engine_case(kind, root, "packed_weights = true")  # type: ignore[misc]
    for name, case in cases.items():
        if wanted and name not in wanted:
            continue
        try:
            in_child(lambda name=name, case=case: (root / f"{name}.json").write_text(json.dumps(case())))  # type: ignore[misc]
        except RuntimeError:
            (root / f"{name}.json").write_text(json.dumps({"failed": True}))


def prepare(root: Path) -> None:
    """The models: two versions of each kind that gets an engine."""
    for kind in tiny_models.KINDS:
        dtype = ENGINES[kind][0] if kind in ENGINES else DTYPES.get(kind, "float32")
        for version in (1, 2) if kind in ENGINES else (1,):
            shard = "100KB" if kind == "qwen2" else "50GB"
            tiny_models.make(kind, root / f"{kind}-{version}", seed=version, dtype=dtype, shard=shard)


if __name__ == "__main__":
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    prepare(Path(sys.argv[1]))
    for module in PRELOAD:
        import_module(module)
    main()
