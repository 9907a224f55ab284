"""``belayerctl status``: one look. When belayerd is down, the last status file is shown and the exit code is 3."""

from __future__ import annotations

import click

from belayer import statefile
from belayer.clock import wall
from belayer.daemon import EXIT_REFUSED, EXIT_UNREACHABLE
from belayer.errors import DaemonUnreachable
from belayer.messages.control import HostStatus, HostStatusReply
from belayer.messages.router import RouterStatus, RouterStatusReply
from belayer.messages.sandbox import ListSandboxes, SandboxList
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl import render
from belayerctl.common import OK, console, emit_json, verb


@click.command(help="Slots, owners, router and sandboxes. Exit 1 when a slot is not protected.")
@verb
def status(paths: Paths, as_json: bool, timeout: float) -> int:
    try:
        host = call_sync(paths.belayerd_sock, HostStatus(), HostStatusReply, timeout)
    except DaemonUnreachable as why:
        return _from_file(paths, as_json, why)
    router = ask_router(paths, timeout)
    boxes = ask_sandboxes(paths, timeout)
    if as_json:
        emit_json({"host": host, "router": router, "sandboxes": boxes})
    else:
        out = console()
        out.print(render.slots(host))
        out.print(render.owners(host))
        out.print(render.router(router) if router else "belayer-router does not answer")
        out.print(render.sandboxes(boxes) if boxes else "envkeeper does not answer")
    return OK if host.healthy else EXIT_REFUSED


def ask_router(paths: Paths, timeout: float) -> RouterStatusReply | None:
    try:
        return call_sync(paths.router_sock, RouterStatus(), RouterStatusReply, timeout)
    except DaemonUnreachable:
        return None


def ask_sandboxes(paths: Paths, timeout: float) -> SandboxList | None:
    try:
        return call_sync(paths.envkeeper_sock, ListSandboxes(), SandboxList, timeout)
    except DaemonUnreachable:
        return None


def _from_file(paths: Paths, as_json: bool, why: DaemonUnreachable) -> int:
    last = statefile.load(paths.status_file, HostStatusReply)
    if last is None:
        raise why
    if as_json:
        emit_json({"stale": True, "host": last})
    else:
        console().print(render.slots(last))
    click.echo(f"belayerctl: {why.message}; shown is its last word, {wall() - last.at:.0f} s old", err=True)
    return EXIT_UNREACHABLE
