"""``envkeeper`` and ``python -m envkeeper [--config PATH]``: sandboxes of this host, in the foreground."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from belayer import config as configs
from belayer import daemon
from belayer.errors import BelayerError, ConfigInvalid
from belayer.paths import Paths
from envkeeper import doctor, native, service
from envkeeper.host import PREFIX


@click.command(help="Keep the sandboxes of this host and their checkpoints.")
@click.option("--config", "path", type=click.Path(path_type=Path), default=None, help="belayer.toml")
@click.option("--doctor", "examine", is_flag=True, help="Really dump and restore a small sandbox, then exit.")
@click.option("--install-native", "install", is_flag=True, help=f"Put the wheel's agent and runtime below {PREFIX}.")
def cli(path: Path | None, examine: bool, install: bool) -> None:
    paths = Paths()
    if install:
        for done in native.install(PREFIX):
            print(done)
        return

    async def run(stop: asyncio.Event) -> None:
        config = configs.load(path or paths.config)
        if examine:
            for line in await asyncio.to_thread(doctor.examine, config.envkeeper):
                print(line)
            return
        if not config.envkeeper.enabled:
            raise ConfigInvalid(
                f"{path or paths.config}: envkeeper.enabled is false: this host keeps no sandboxes",
                kept="nothing was started",
                remedy="set it to true, or do not start envkeeper here (systemctl mask envkeeper)",
            )
        await service.run(config, paths, stop)

    sys.exit(daemon.run(run, None if examine else daemon.Told(paths.run, service.NAME)))


def main() -> None:
    try:
        cli()
    except BelayerError as error:
        sys.exit(daemon.say(error))


if __name__ == "__main__":
    main()
