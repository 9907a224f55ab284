"""``belayerctl fleet``: what this host knows of its peers. Exit 1 when one of them is not up, 2 without a fleet."""

from __future__ import annotations

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from belayer.daemon import EXIT_CONFIG, EXIT_REFUSED
from belayer.messages.fleet import FleetStatus, FleetStatusReply, RemoteSlot
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl.common import OK, console, emit_json, verb


@click.command(
    help="Peers of this host, their slots, and what was not let in. Exit 1 when a peer is not up, 2 without a fleet."
)
@verb
def fleet(paths: Paths, as_json: bool, timeout: float) -> int:
    said = call_sync(paths.router_sock, FleetStatus(), FleetStatusReply, timeout)
    if as_json:
        emit_json(said)
    if not said.listen:
        click.echo(f"belayerctl: {said.host} is in no fleet: fleet.listen is not set in its configuration", err=True)
        return EXIT_CONFIG
    if not as_json:
        out = console()
        out.print(peers(said))
        out.print(slots(said))
        for line in reasons(said):
            out.print(line)
        for reason, count in said.dropped.items():
            out.print(f"not let in: {reason} {count}")
    return OK if all(peer.state == "up" for peer in said.peers) else EXIT_REFUSED


def reasons(said: FleetStatusReply) -> list[str]:
    """Why a peer is not up, or a slot of it gets nothing new. A line each: in a table they would wrap in a corner."""
    rows = [f"{peer.host}: {peer.why}" for peer in said.peers if peer.why]
    unused = [(peer.host, slot, why) for peer in said.peers for slot, why in peer.unused.items()]
    return rows + [f"{host}/{slot} gets nothing new: {why}" for host, slot, why in unused]


def peers(said: FleetStatusReply) -> Table:
    table = _table(f"fleet of {said.host}: life {said.life}, listens at {said.listen}")
    for column in ("peer", "address", "state"):
        table.add_column(column, overflow="fold")
    for column in ("answer ms", "ours there", "theirs here"):
        table.add_column(column, justify="right")
    for peer in said.peers:
        answer = "-" if peer.answer_ms < 0 else f"{peer.answer_ms:.1f}"
        theirs = str(said.serving.get(peer.host, 0))
        table.add_row(peer.host, peer.address, peer.state, answer, str(peer.forwarded), theirs)
    return table


def slots(said: FleetStatusReply) -> Table:
    """Own slots first."""
    table = _table("slots")
    for column in ("slot", "state", "gen", "weights", "digest", "load", "used"):
        table.add_column(column, overflow="fold")
    for slot in said.own:
        table.add_row(*_cells(slot.slot, slot), "here")
    for peer in said.peers:
        for slot in peer.slots:
            table.add_row(*_cells(f"{peer.host}/{slot.slot}", slot), "no" if slot.slot in peer.unused else "yes")
    return table


def _cells(name: str, slot: RemoteSlot) -> tuple[str, ...]:
    load = f"{slot.load}/{slot.capacity}"
    return name, slot.state, str(slot.generation), slot.weight_version or "?", slot.weights_digest[:8] or "?", load


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
