"""``belayerctl status``: one look. When belayerd is down, the last status file is shown and the exit code is 3."""

from __future__ import annotations

import click

from belayer import refusals, statefile
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
    silent = why_silent(paths, host, router, boxes)
    if as_json:
        emit_json({"host": host, "router": router, "sandboxes": boxes, "silent": silent})
    else:
        out = console()
        out.print(render.slots(host))
        out.print(render.owners(host))
        if router:
            out.print(render.router(router))
        if boxes:
            out.print(render.sandboxes(boxes))
        for said in (*silent.values(), *host.notes):
            out.print(said, markup=False)
    return OK if host.healthy else EXIT_REFUSED


def why_silent(
    paths: Paths, host: HostStatusReply, router: RouterStatusReply | None, boxes: SandboxList | None
) -> dict[str, str]:
    """Of each daemon that does not answer: what is known of the reason, by its name."""
    answer = {f"owner-{owner.kind}" for owner in host.owners}
    names = [name for name in ("owner-weights", "owner-kv") if name not in answer]
    names += [] if router else ["router"]
    names += [] if boxes else ["envkeeper"]
    return {refusals.title(name): refusals.why_silent(paths.run, name) for name in names}


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
    reason = refusals.why_silent(paths.run, "belayerd")
    last = statefile.load(paths.status_file, HostStatusReply)
    if last is None:
        raise DaemonUnreachable(f"{reason} ({why.message})", remedy=why.remedy) from why
    if as_json:
        emit_json({"stale": True, "host": last, "silent": {"belayerd": reason}})
    else:
        console().print(render.slots(last))
        if last.fronts:
            console().print(render.fronts(last.fronts))
    old = f"{wall() - last.at:.0f} s old"
    click.echo(f"belayerctl: {reason} ({why.message}); shown is its last word, {old}", err=True)
    return EXIT_UNREACHABLE
