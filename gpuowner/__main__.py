"""``python -m gpuowner --kind weights|kv [--config PATH]``: one owner instance in the foreground.

It takes over what its last life left before it listens, and the weights owner loads every other model of the
configuration before that too: "its socket answers" means "sealed, or torn by name". ``--release`` ends the holder of
a stopped owner instead, and with it what nobody maps.
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
from belayer.daemon import OnlyOne, Told, new_instance, notify, run, say, serve_until
from belayer.errors import BelayerError, ConfigInvalid, HostUnfit
from belayer.paths import Paths
from belayer.progress import Teller
from gpuowner.backends.choice import maker_for
from gpuowner.backends.driver import REAL
from gpuowner.keeping import StoreLost
from gpuowner.ledger import WeightsRow
from gpuowner.recipes import ASK_DEADLINE_S
from gpuowner.service import Service
from gpuowner.store import Found, HolderStore, SystemdStore, end_holder
from gpuowner.vault import Vault
from gpuowner.version import Source


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


def sources(config: Config, driver: str = REAL) -> dict[str, Source]:
    huge, memory = config.gpuowner.huge_pages, config.gpuowner.memory
    return {
        model.name: Source(
            Path(model.path), model.dtype, model.update, huge, config.ranks_of(model.name), memory=memory, driver=driver
        )
        for model in config.model
    }


def open_store(paths: Paths, kind: str, choice: str) -> tuple[HolderStore | SystemdStore, Found]:
    """The store, and what it kept of the last life. Raises HostUnfit: an owner that cannot know that must not begin
    over it."""
    try:
        store = SystemdStore() if choice == "systemd" else HolderStore(paths.owner_holder_sock(kind))
        return store, store.all()
    except (StoreLost, OSError) as why:
        raise HostUnfit(
            f"gpuowner@{kind}: {why}",
            kept="what the holder keeps",
            remedy=f"end the workers and the stuck holder of {paths.owner_holder_sock(kind)}, then start again",
        ) from why


def _load_model(vault: Vault, name: str, rank: int, source: Source, logger: Any, teller: Teller) -> None:
    last: WeightsRow | None = vault.to_load.get((name, rank))
    part = f"{name}, rank {rank}" if source.ranks > 1 else name
    # Until its first bytes are there it may be vLLM that is asked how the model lies, which has a bound of its own.
    teller.tell(f"loads {part}", within_s=ASK_DEADLINE_S)

    def progress(done: int, nbytes: int, rate: float) -> None:
        teller.tell(f"loads {part}", done, nbytes)
        logger.info("loading", model=name, mb=round(done / 1e6), of=round(nbytes / 1e6), mb_per_s=round(rate))
        notify(f"STATUS=loading {name}: {done >> 20} of {nbytes >> 20} MiB, {rate:.0f} MB/s")

    try:
        entry = vault.models.load(name, rank, source, progress, last)
    except BelayerError as why:
        raise ConfigInvalid(f"model {name}: {why.message}", kept=why.kept, remedy=why.remedy) from why
    info = entry.info()
    fields = {"model": name, "version": info.version, "digest": info.digest, "ms": round(info.load_ms)}
    logger.info(info.state, **fields, **({"reason": info.reason} if info.reason else {}))


async def serve(stop: asyncio.Event, kind: str, choice: str, config: Config, paths: Paths, driver: str = REAL) -> None:
    """One life of an owner, until ``stop``. ``driver``: of GPU memory."""
    logger = log.setup(f"gpuowner-{kind}")
    teller = Teller(paths.owner_progress(kind))
    teller.tell("starts")
    maker = maker_for(config.gpuowner.memory, driver, {slot.device for slot in config.slot})
    store, found = open_store(paths, kind, choice)
    slots = frozenset(slot.name for slot in config.slot)
    vault = Vault(next_generation(paths, kind), paths.owner_ledger(kind), store, logger.info, maker, slots)
    wanted = sources(config, driver) if kind == "weights" else {}
    vault.revive(found, wanted, teller.tell)
    for said in vault.adopted:
        logger.info("adopted", what=said)
    for said in vault.lost:
        logger.error("lost", what=said, remedy="a new shadow for that slot; a lost weight version is published again")
    for name, source in wanted.items():
        for rank in range(source.ranks):
            if (name, rank) not in vault.models.entries:
                _load_model(vault, name, rank, source, logger, teller)
    reopen = None if choice == "systemd" else lambda: HolderStore(paths.owner_holder_sock(kind))
    service = Service(kind, paths.owner_sock(kind), vault, new_instance(), logger.info, reopen)
    service.listen()
    notify("READY=1\nSTATUS=serving")
    logger.info("serving", kind=kind, generation=vault.generation, store=store.describe())
    await serve_until(stop, service.serve(), _answers(teller))
    vault.stop()


async def _answers(teller: Teller) -> None:
    """After the first turn of the service: who asks from here on is answered."""
    teller.over()


def release(paths: Paths, kind: str) -> int:
    """End the holder of an owner that does not run."""
    end_holder(paths.owner_holder_sock(kind))
    paths.owner_ledger(kind).unlink(missing_ok=True)
    paths.owner_progress(kind).unlink(missing_ok=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpuowner", description="Holds weights or KV arenas for the workers.")
    parser.add_argument("--kind", choices=("weights", "kv"), required=True)
    parser.add_argument("--config", type=Path, default=None)
    parser.add_argument("--store", choices=("holder", "systemd"), default="holder", help="keeper of second copies")
    parser.add_argument("--release", action="store_true", help="end the holder of a stopped owner, and exit")
    args = parser.parse_args()
    try:
        paths = Paths().make()
    except BelayerError as why:
        return say(why)
    told = Told(paths.run, f"owner-{args.kind}")
    try:
        lock = OnlyOne(paths.run, f"owner-{args.kind}")
        if args.release:
            return release(paths, args.kind)
        config = load(args.config or paths.config)
    except BelayerError as why:
        return told.say(why)
    code = run(lambda stop: serve(stop, args.kind, args.store, config, paths), told)
    del lock  # held until here
    return code


if __name__ == "__main__":
    sys.exit(main())
