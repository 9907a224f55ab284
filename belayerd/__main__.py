"""``belayerd`` and ``python -m belayerd``: read the configuration, run the supervisor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from belayer import config as configs
from belayer import daemon
from belayer.errors import BelayerError
from belayer.paths import Paths
from belayerd.service import Supervisor


@click.command(help="Supervise the worker pairs of this host.")
@click.option("--config", "path", type=click.Path(path_type=Path), default=None, help="belayer.toml")
def cli(path: Path | None) -> None:
    paths = Paths()
    config_path = path or paths.config

    async def run(stop: asyncio.Event) -> None:
        config = configs.load(config_path)
        await Supervisor(paths.make(), config, config_path.absolute()).run(stop)

    sys.exit(daemon.run(run, daemon.Told(paths.run, "belayerd")))


def main() -> None:
    try:
        cli()
    except BelayerError as error:
        sys.exit(daemon.say(error))


if __name__ == "__main__":
    main()
