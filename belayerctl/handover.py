"""``belayerctl handover SLOT``: a planned handover; returns when the new main serves."""

from __future__ import annotations

import click
from click.core import ParameterSource

from belayer.daemon import EXIT_REFUSED
from belayer.messages.control import Handover, IncidentReply
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl import render
from belayerctl.common import OK, console, emit_json, verb

_LONG_S = 120.0  # the daemon has its own deadlines; this is for one that does not answer at all


@click.command(help="Hand SLOT over to its shadow now. Refused when it has none that is ready.")
@click.argument("slot")
@click.option("--reason", default="operator", show_default=True)
@verb
def handover(paths: Paths, as_json: bool, timeout: float, slot: str, reason: str) -> int:
    if click.get_current_context().get_parameter_source("timeout") is ParameterSource.DEFAULT:
        timeout = _LONG_S
    reply = call_sync(paths.belayerd_sock, Handover(slot=slot, reason=reason), IncidentReply, timeout)
    if as_json:
        emit_json(reply.incident)
    else:
        console().print(render.incident(reply.incident))
    return OK if reply.incident.outcome == "served" else EXIT_REFUSED
