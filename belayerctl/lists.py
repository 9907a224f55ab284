"""``owners``, ``sandboxes``, ``restore`` and ``config check``: the short verbs."""

from __future__ import annotations

from pathlib import Path

import click

from belayer import config as configs
from belayer import config_check, fleet_keys
from belayer.errors import ConfigInvalid
from belayer.messages.common import Done
from belayer.messages.control import HostStatus, HostStatusReply, RestoreSlot
from belayer.messages.sandbox import Lineages, ListLineage, ListSandboxes, SandboxList
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl import accounting, render
from belayerctl.common import OK, console, emit_json, verb


@click.command(help="What the owners hold, for whom, and what a shadow costs.")
@verb
def owners(paths: Paths, as_json: bool, timeout: float) -> int:
    host = call_sync(paths.belayerd_sock, HostStatus(), HostStatusReply, timeout)
    if as_json:
        held, costs = accounting.held(host), accounting.shadow_costs(host)
        emit_json({"owners": host.owners, "memory": held, "slots": host.slots, "shadow_costs": costs})
    else:
        console().print(render.owners(host))
    return OK


@click.command(help="Sandboxes and their checkpoints.")
@click.option("--lineage", is_flag=True, help="Show where each of their lives came from: restores, rewinds, forks.")
@verb
def sandboxes(paths: Paths, as_json: bool, timeout: float, lineage: bool) -> int:
    if lineage:
        found = call_sync(paths.envkeeper_sock, ListLineage(), Lineages, timeout)
        if as_json:
            emit_json(found.births)
        else:
            console().print(render.lineages(found))
        return OK
    listed = call_sync(paths.envkeeper_sock, ListSandboxes(), SandboxList, timeout)
    if as_json:
        emit_json(listed.sandboxes)
    else:
        console().print(render.sandboxes(listed))
    return OK


@click.command(help="Start a quarantined or exposed SLOT again: its device is good.")
@click.argument("slot")
@verb
def restore(paths: Paths, as_json: bool, timeout: float, slot: str) -> int:
    done = call_sync(paths.belayerd_sock, RestoreSlot(slot=slot), Done, timeout)
    if as_json:
        emit_json(done)
    else:
        console().print(f"{slot}: {done.detail}")
    return OK


@click.group(help="Devices that a slot was quarantined on.")
def gpu() -> None:
    pass


gpu.add_command(restore)


@click.group(help="The configuration file.")
def config() -> None:
    pass


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@verb
def check(paths: Paths, as_json: bool, timeout: float, file: Path | None) -> int:
    """Check FILE (default: the host's own) as the daemons do: keys and what they say together, keys of the fleet, what
    the models' files and vLLM's parsers allow. What hangs on this machine is a warning on stderr."""
    path = file or paths.config
    found = configs.load(path)
    if found.fleet.listen:
        fleet_keys.of_fleet(Path(found.fleet.keys), found.host.name, [peer.name for peer in found.peer])
    seen = list(config_check.findings(found))
    fatal = next((one for one in seen if one.fatal), None)
    for one in seen:
        if one is not fatal:
            click.echo(f"belayerctl: {path}: {'' if one.fatal else 'warning: '}{one.key}: {one.said}", err=True)
    if fatal is not None:
        raise ConfigInvalid(f"{path}: {fatal.key}: {fatal.said}")
    if as_json:
        emit_json(found)
    else:
        slots = ", ".join(slot.name for slot in found.slot) or "none"
        console().print(f"{path}: good{', with warnings' if seen else ''}; slots: {slots}")
    return OK
