"""``belayerctl top``: a live view. ``--once`` prints one frame, ``--json`` one frame as data."""

from __future__ import annotations

import threading

import click
from rich.live import Live

from belayer import refusals
from belayer.clock import monotonic
from belayer.errors import DaemonUnreachable
from belayer.messages.control import HostStatus, HostStatusReply, Incident, IncidentList, ListIncidents
from belayer.messages.router import RouterStatusReply
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl import render
from belayerctl.common import OK, console, emit_json, verb
from belayerctl.status import ask_router, ask_sandboxes


class _Rates:
    """Tokens per second of each slot between two looks."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._at = monotonic()

    def update(self, router: RouterStatusReply | None) -> dict[str, float]:
        now, rows = monotonic(), router.slots if router else ()
        span = max(now - self._at, 1e-3)
        rates = {row.slot: (row.tokens_total - self._last.get(row.slot, row.tokens_total)) / span for row in rows}
        self._last, self._at = {row.slot: row.tokens_total for row in rows}, now
        return rates


def _host(paths: Paths, timeout: float) -> tuple[HostStatusReply | None, tuple[Incident, ...]]:
    try:
        status = call_sync(paths.belayerd_sock, HostStatus(), HostStatusReply, timeout)
        rows = call_sync(paths.belayerd_sock, ListIncidents(limit=8), IncidentList, timeout).incidents
    except DaemonUnreachable:
        return None, ()
    return status, rows


@click.command(help="A live view of the host; Ctrl-C leaves.")
@click.option("--once", is_flag=True, help="Print one frame and leave.")
@click.option("--every", type=click.FloatRange(0.1), default=0.5, show_default=True, help="Seconds between frames.")
@verb
def top(paths: Paths, as_json: bool, timeout: float, once: bool, every: float) -> int:
    status, rows = _host(paths, timeout)
    if status is None:
        raise DaemonUnreachable(
            f"{refusals.why_silent(paths.run, 'belayerd')} (no answer at {paths.belayerd_sock})",
            remedy="start belayerd, or set BELAYER_ROOT",
        )
    router, boxes = ask_router(paths, timeout), ask_sandboxes(paths, timeout)
    if as_json:
        emit_json({"host": status, "router": router, "sandboxes": boxes, "incidents": rows})
        return OK
    rates = _Rates()
    frame = render.live(status, router, boxes, rows, rates.update(router))
    if once:
        console().print(frame)
        return OK
    pause = threading.Event()
    with Live(frame, console=console(), screen=True, auto_refresh=False) as live:
        try:
            while not pause.wait(every):
                status, rows = _host(paths, timeout)
                router, boxes = ask_router(paths, timeout), ask_sandboxes(paths, timeout)
                live.update(render.live(status, router, boxes, rows, rates.update(router)), refresh=True)
        except KeyboardInterrupt:
            return OK
    return OK
