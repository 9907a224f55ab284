"""``python -m gpuowner --kind weights|kv [--config PATH]``: one owner instance in the foreground.

The weights owner loads every model of the configuration before it listens, so "its socket answers" means
"sealed".
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from belayer import log, statefile
from belayer.config import Config, load
from belayer.daemon import OnlyOne, new_instance, notify, run, say, serve_until
from belayer.errors import BelayerError, ConfigInvalid
from belayer.paths import Paths
from gpuowner.service import Service
from gpuowner.vault import Vault


class Generation(msgspec.Struct, frozen=True):
    """Lives of this owner instance, counted on disk."""

    generation: int


def next_generation(paths: Paths, kind: str) -> int:
    """One more than the last life had, durable before this one grants anything."""
    file = paths.state / f"owner-{kind}.msgpack"
    last: Generation | None = statefile.load(file, Generation)
    mine = Generation(generation=last.generation + 1 if last else 1)
    statefile.save(file, mine)
    return mine.generation


def _load_models(vault: Vault, config: Config, logger: Any) -> None:
    for model in config.model:

        def progress(done: int, nbytes: int, rate: float, name: str = model.name) -> None:
            logger.info("loading", model=name, mb=round(done / 1e6), of=round(nbytes / 1e6), mb_per_s=round(rate))

        try:
            entry = vault.load_weights(model.name, Path(model.path), model.dtype, progress)
        except BelayerError as why:
            raise ConfigInvalid(f"model {model.name}: {why.message}", kept=why.kept, remedy=why.remedy) from why
        if entry.loaded:
            logger.info(
                "sealed",
                model=model.name,
                version=1,
                digest=entry.loaded.digest,
                ms=round(entry.loaded.load_ms),
            )


async def _main(stop: asyncio.Event, kind: str, config: Config, paths: Paths) -> None:
    logger = log.setup(f"gpuowner-{kind}")
    vault = Vault(next_generation(paths, kind))
    if kind == "weights":
        _load_models(vault, config, logger)
    service = Service(kind, paths.owner_sock(kind), vault, new_instance(), logger.info)
    service.listen()
    notify("READY=1")
    logger.info("serving", kind=kind, generation=vault.generation)
    await serve_until(stop, service.serve())


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpuowner", description="Holds weights or KV arenas for the workers.")
    parser.add_argument("--kind", choices=("weights", "kv"), required=True)
    parser.add_argument("--config", type=Path, default=None)
    args = parser.parse_args()
    try:
        paths = Paths().make()
        config = load(args.config or paths.config)
        lock = OnlyOne(paths.run, f"owner-{args.kind}")
    except BelayerError as why:
        return say(why)
    code = run(lambda stop: _main(stop, args.kind, config, paths))
    del lock  # held until here
    return code


if __name__ == "__main__":
    sys.exit(main())
