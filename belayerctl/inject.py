"""``belayerctl inject``: break something on purpose; every injection proves that it happened."""

from __future__ import annotations

import click

from belayer.messages.common import FaultProof
from belayer.messages.control import InjectWorkerFault
from belayer.messages.router import InjectFrontFault
from belayer.messages.sandbox import InjectSandboxFault
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl.common import OK, console, emit_json, verb


@click.group(help="Break something on purpose, with proof.")
def inject() -> None:
    pass


def _show(proof: FaultProof, as_json: bool) -> int:
    if as_json:
        emit_json(proof)
    else:
        console().print(f"{proof.fault} {proof.target}: {proof.seen} ({proof.ms:.1f} ms)")
    return OK


def _worker(paths: Paths, as_json: bool, timeout: float, slot: str, kind: str, shadow: bool) -> int:
    message = InjectWorkerFault(slot=slot, kind=kind, role="shadow" if shadow else "main")
    return _show(call_sync(paths.belayerd_sock, message, FaultProof, timeout), as_json)


@inject.command("kill-worker", help="SIGKILL the main worker of SLOT.")
@click.argument("slot")
@click.option("--shadow", is_flag=True, help="The shadow instead of the main.")
@verb
def kill_worker(paths: Paths, as_json: bool, timeout: float, slot: str, shadow: bool) -> int:
    return _worker(paths, as_json, timeout, slot, "kill", shadow)


@inject.command("stop-worker", help="SIGSTOP the main worker of SLOT: it hangs.")
@click.argument("slot")
@click.option("--shadow", is_flag=True, help="The shadow instead of the main.")
@verb
def stop_worker(paths: Paths, as_json: bool, timeout: float, slot: str, shadow: bool) -> int:
    return _worker(paths, as_json, timeout, slot, "stop", shadow)


def _front(paths: Paths, as_json: bool, timeout: float, front: int, kind: str) -> int:
    message = InjectFrontFault(front=front, kind=kind)
    return _show(call_sync(paths.router_sock, message, FaultProof, timeout), as_json)


@inject.command("kill-front", help="SIGKILL front NUMBER of a router that has several.")
@click.argument("number", type=click.IntRange(0))
@verb
def kill_front(paths: Paths, as_json: bool, timeout: float, number: int) -> int:
    return _front(paths, as_json, timeout, number, "kill")


@inject.command("stop-front", help="SIGSTOP front NUMBER of a router that has several: it hangs.")
@click.argument("number", type=click.IntRange(0))
@verb
def stop_front(paths: Paths, as_json: bool, timeout: float, number: int) -> int:
    return _front(paths, as_json, timeout, number, "stop")


@inject.command("kill-sandbox", help="SIGKILL PID 1 of SANDBOX.")
@click.argument("sandbox")
@verb
def kill_sandbox(paths: Paths, as_json: bool, timeout: float, sandbox: str) -> int:
    message = InjectSandboxFault(sandbox_id=sandbox, kind="kill")
    return _show(call_sync(paths.envkeeper_sock, message, FaultProof, timeout), as_json)
