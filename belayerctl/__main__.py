"""``belayerctl``: the verbs, put together."""

from __future__ import annotations

import sys

import click

from belayer import __version__, daemon
from belayer.errors import BelayerError
from belayerctl.fleet import fleet
from belayerctl.handover import handover
from belayerctl.incidents import incidents
from belayerctl.inject import inject
from belayerctl.keys import keys
from belayerctl.lists import config, gpu, owners, restore, sandboxes
from belayerctl.republish import republish
from belayerctl.status import status
from belayerctl.top import top
from belayerctl.trainers import trainers


@click.group(
    help="Watch, move and break this host. BELAYER_ROOT names a private root.\n\n"
    "Exit codes: 0 done, 1 refused or unhealthy, 2 usage or configuration, 3 daemon unreachable."
)
@click.version_option(__version__)
def cli() -> None:
    pass


for _command in (
    status,
    top,
    handover,
    inject,
    incidents,
    owners,
    sandboxes,
    restore,
    republish,
    trainers,
    gpu,
    config,
    keys,
    fleet,
):
    cli.add_command(_command)


def main() -> None:
    try:
        cli(prog_name="belayerctl")
    except BelayerError as error:  # a root that cannot be
        sys.exit(daemon.say(error))


if __name__ == "__main__":
    main()
