"""``belayerctl incidents``: what happened, and the milliseconds of each step. Readable when belayerd is down."""

from __future__ import annotations

import click

from belayer.errors import DaemonUnreachable
from belayer.messages.control import IncidentList, ListIncidents
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayer.story import Incidents
from belayerctl import render
from belayerctl.common import OK, console, emit_json, verb


@click.command(help="Incidents, newest first.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=20, show_default=True)
@click.option("--steps", is_flag=True, help="Show the steps of each.")
@verb
def incidents(paths: Paths, as_json: bool, timeout: float, limit: int, steps: bool) -> int:
    try:
        rows = call_sync(paths.belayerd_sock, ListIncidents(limit=limit), IncidentList, timeout).incidents
    except DaemonUnreachable:
        if not paths.incidents.exists():
            raise
        store = Incidents(paths.incidents)
        rows = tuple(store.latest(limit))
        store.close()
    if as_json:
        emit_json(rows)
    elif steps:
        for row in rows:
            console().print(render.incident(row))
    else:
        console().print(render.incidents(rows))
    return OK
