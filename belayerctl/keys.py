"""``belayerctl keys``: the CURVE pair of this host, and the public keys of its peers (docs/fleet.md)."""

from __future__ import annotations

from pathlib import Path

import click

from belayer import config as configs
from belayer import fleet_keys
from belayer.paths import Paths
from belayerctl.common import OK, console, emit_json, verb


@click.group(help="Keys of the fleet: one pair per host, the public keys of its peers.")
def keys() -> None:
    pass


def where(paths: Paths) -> tuple[Path, str]:
    """The folder of the keys and the name of this host, as the configuration says."""
    found = configs.load(paths.config)
    return Path(found.fleet.keys), found.host.name


@keys.command(help="Make this host's pair. Refused when there is one: peers know it.")
@verb
def make(paths: Paths, as_json: bool, timeout: float) -> int:
    folder, name = where(paths)
    return _say(name, fleet_keys.make(folder, name), as_json)


@keys.command(help="Print NAME KEY of this host, as `keys add` takes it on the others.")
@verb
def show(paths: Paths, as_json: bool, timeout: float) -> int:
    folder, name = where(paths)
    return _say(name, fleet_keys.load(folder, name).public.decode(), as_json)


# A key may begin with "-": it is no option.
@keys.command(help="Admit host NAME by its public KEY.", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("key")
@verb
def add(paths: Paths, as_json: bool, timeout: float, name: str, key: str) -> int:
    fleet_keys.add(where(paths)[0], name, key)
    return _say(name, key, as_json)


@keys.command(help="Admit host NAME no more.")
@click.argument("name")
@verb
def remove(paths: Paths, as_json: bool, timeout: float, name: str) -> int:
    fleet_keys.remove(where(paths)[0], name)
    if as_json:
        emit_json({"host": name, "removed": True})
    else:
        console().print(f"{name} is admitted no more")
    return OK


@keys.command("list", help="All keys, with the host that each speaks for.")
@verb
def list_(paths: Paths, as_json: bool, timeout: float) -> int:
    folder, own = where(paths)
    found = fleet_keys.admitted(folder)
    if as_json:
        emit_json([{"host": host, "key": key, "own": host == own} for key, host in found.items()])
    else:
        for key, host in found.items():
            _line(f"{host} {key}{'  (this host)' if host == own else ''}")
    return OK


def _say(name: str, key: str, as_json: bool) -> int:
    if as_json:
        emit_json({"host": name, "key": key})
    else:
        _line(f"{name} {key}")
    return OK


def _line(text: str) -> None:
    click.echo(text)  # as it is: Z85 has square brackets, which are markup elsewhere
