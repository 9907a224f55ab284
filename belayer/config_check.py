"""What ``belayerctl config check`` sees beyond ``config.load``: the models' files, vLLM's parser names, this machine.

The daemons refuse all of this too, each at its own start and some only after a minute. A refusal is certain; where the
verdict hangs on the machine that the check runs on, or on what only vLLM knows, it is a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from belayer import model_files, model_fits, parser_words
from belayer.config import Config, Slot

_MEMINFO = Path("/proc/meminfo")
_OPEN_ENDED = 1 << 62  # bytes of a machine that does not say


class Finding(NamedTuple):
    """``key``: of the configuration. ``fatal``: a daemon or every engine would refuse to start."""

    key: str
    said: str
    fatal: bool = True


def findings(config: Config, memory: int | None = None) -> Iterator[Finding]:
    """``memory``: bytes of the machine; None: of this one."""
    served = sorted({slot.model for slot in config.slot})
    if len(served) > 1:
        yield Finding("slot", f"slots of several models ({', '.join(served)}), and a router serves exactly one")
    weights: Counter[str] = Counter()
    for index, model in enumerate(config.model):
        folder = Path(model.path)
        lost = [path for path in model_files.weight_files(folder) if not path.is_file()]
        if lost:
            yield Finding(f"model[{index}].path", f"{lost[0]} is missing")
            continue
        stored = model_files.stored(folder)
        yield from _dtype(f"model[{index}].dtype", model_files.read_config(folder), stored, model.dtype)
        weights[model.name] = model_fits.weight_bytes(stored, model.dtype)
    for index, slot in enumerate(config.slot):
        yield from _slot(config, slot, f"slot[{index}]")
    yield from _parsers(config)
    yield from _memory(config, weights, _of_this_machine() if memory is None else memory)


def _dtype(key: str, table: dict[str, object], stored: Counter[str], dtype: str) -> Iterator[Finding]:
    if why := model_fits.never_float16(table, dtype):
        yield Finding(key, why)
    if "quantization_config" in table:
        return  # its tensors are no numbers of the model's
    all_, some = model_fits.lossy(stored, dtype)
    if all_ or some:
        yield Finding(key, all_ or some, fatal=bool(all_))


def _slot(config: Config, slot: Slot, where: str) -> Iterator[Finding]:
    model = config.model_named(slot.model)
    table = model_files.read_config(Path(model.path))
    if why := model_fits.too_long(table, slot.max_model_len):
        yield Finding(f"{where}.max_model_len", f"{why} ({Path(model.path) / 'config.json'})")
    why = model_fits.too_few_bytes(
        table, model.dtype, slot.kv_bytes, slot.max_model_len, slot.block_size, slot.tensor_parallel
    )
    if why:
        yield Finding(f"{where}.kv_bytes", f"{slot.kv_bytes} {why}")


def _parsers(config: Config) -> Iterator[Finding]:
    chosen = {"tool_parser": config.router.tool_parser, "reasoning_parser": config.router.reasoning_parser}
    for key, name in chosen.items():
        known = parser_words.names(key) if name else frozenset()
        if name and not known:
            yield Finding(f"router.{key}", "no vLLM is installed here that could tell whether it has this one", False)
        elif name not in known and name:
            near = get_close_matches(name, known, 3) or sorted(known)
            yield Finding(f"router.{key}", f"vLLM has no {name!r}; it has {', '.join(near)}")
        elif key == "reasoning_parser" and name:
            yield from _thinking(config, name)


def _thinking(config: Config, name: str) -> Iterator[Finding]:
    for model in config.model:
        needs, wants = (table.get(name, ()) for table in (parser_words.NEEDS, parser_words.WANTS))
        known = model_files.vocabulary(Path(model.path)) if needs or wants else None
        lost = [word for word in needs or wants if known is not None and word not in known]
        if lost:
            said = f"{name!r} looks for {' and '.join(lost)}, of which the tokenizer of {model.path} has no token"
            yield Finding("router.reasoning_parser", said, fatal=bool(needs))


def _memory(config: Config, weights: Counter[str], machine: int) -> Iterator[Finding]:
    """Of slots on the CPU, without what each worker and sandbox needs beside it."""
    slots = [slot for slot in config.slot if slot.device == "cpu"]
    arenas = sum(slot.kv_bytes * slot.tensor_parallel for slot in slots)
    loaded = {slot.model for slot in slots}
    once = sum(weights[name] for name in loaded)
    twice = sum(weights[model.name] for model in config.model if model.name in loaded and model.update == "swap")
    packed = sum(2 * weights[slot.model] for slot in slots if slot.packed_weights)
    told = f"and this machine has {_mib(machine)} MiB"
    if once + arenas + packed > machine:
        parts = f"weights take {_mib(once)} MiB, arenas {_mib(arenas)}, packed matrices {_mib(packed)}"
        yield Finding("slot.kv_bytes", f"{parts}, {told}", fatal=False)
    elif once + arenas + packed + twice > machine:
        more = f'an update {_mib(twice)} more (update = "in_place": none)'
        said = f"weights and arenas take {_mib(once + arenas + packed)} MiB, {more}, {told}"
        yield Finding("model.update", said, fatal=False)
    keeper = config.envkeeper
    waiting = keeper.pool * keeper.memory_mb << 20 if keeper.enabled else 0
    if waiting > machine:
        yield Finding("envkeeper.pool", f"{keeper.pool} sandboxes may take {_mib(waiting)} MiB, {told}", fatal=False)


def _mib(nbytes: int) -> int:
    return nbytes >> 20


def _of_this_machine() -> int:
    """Bytes of memory and swap."""
    try:
        rows = [line.split() for line in _MEMINFO.read_text().splitlines()]
    except OSError:
        return _OPEN_ENDED
    found = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 1 and row[1].isdigit()}
    return found.get("MemTotal", _OPEN_ENDED) + found.get("SwapTotal", 0)
