"""``belayerctl handover SLOT``: a planned handover; returns when the new main serves."""

from __future__ import annotations

import click

from belayer.daemon import EXIT_REFUSED
from belayer.messages.control import Handover, IncidentReply
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl import render
from belayerctl.common import OK, console, emit_json, verb


@click.command(help="Hand SLOT over to its shadow now. Refused when it has none that is ready.")
@click.argument("slot")
@click.option("--reason", default="operator", show_default=True)
@verb
def handover(paths: Paths, as_json: bool, timeout: float, slot: str, reason: str) -> int:
    # The daemon has its own deadlines; ours is only for one that does not answer at all.
    reply = call_sync(paths.belayerd_sock, Handover(slot=slot, reason=reason), IncidentReply, max(timeout, 120.0))
    if as_json:
        emit_json(reply.incident)
    else:
        console().print(render.incident(reply.incident))
    return OK if reply.incident.outcome == "served" else EXIT_REFUSED
