"""``belayerctl fleet``: what this host knows of its peers. Exit 1 when one of them is not up."""

from __future__ import annotations

import click
from rich.table import Table

from belayer.daemon import EXIT_REFUSED
from belayer.messages.fleet import FleetStatus, FleetStatusReply, RemoteSlot
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl.common import OK, console, emit_json, verb


@click.command(help="Peers of this host, their slots, and what was not let in. Exit 1 when a peer is not up.")
@verb
def fleet(paths: Paths, as_json: bool, timeout: float) -> int:
    said = call_sync(paths.router_sock, FleetStatus(), FleetStatusReply, timeout)
    if as_json:
        emit_json(said)
    elif not said.listen:
        console().print(f"{said.host} is in no fleet (fleet.listen is not set)")
    else:
        out = console()
        out.print(_peers(said))
        for reason, count in said.dropped.items():
            out.print(f"not let in: {reason} {count}")
    return OK if all(peer.state == "up" for peer in said.peers) else EXIT_REFUSED


def _slot(slot: RemoteSlot, unused: str) -> str:
    row = f"{slot.slot}:{slot.state}@{slot.generation} weights {slot.weight_version or '?'} {slot.load}/{slot.capacity}"
    return f"{row} (not used: {unused})" if unused else row


def _peers(said: FleetStatusReply) -> Table:
    table = Table(title=f"fleet of {said.host} (life {said.life}, listens at {said.listen})")
    for column in ("peer", "state", "answer ms", "slots", "ours there", "theirs here", "why"):
        table.add_column(column)
    for peer in said.peers:
        slots = "\n".join(_slot(slot, peer.unused.get(slot.slot, "")) for slot in peer.slots)
        answer = "-" if peer.answer_ms < 0 else f"{peer.answer_ms:.1f}"
        theirs = str(said.serving.get(peer.host, 0))
        table.add_row(peer.host, peer.state, answer, slots, str(peer.forwarded), theirs, peer.why)
    return table
