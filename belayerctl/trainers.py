"""``belayerctl trainers``: who is told of replaced mains, and what each has not acknowledged."""

from __future__ import annotations

import click
from rich.table import Table

from belayer.messages.common import Done
from belayer.messages.trainer import ListTrainers, TrainerList, UnregisterTrainer
from belayer.paths import Paths
from belayer.rpc import call_sync
from belayerctl.common import OK, console, emit_json, verb


@click.command(help="Trainers that hold a group with engines; what is owed to one holds the next weight update.")
@click.option("--forget", metavar="NAME", help="NAME is no more: it is owed nothing.")
@verb
def trainers(paths: Paths, as_json: bool, timeout: float, forget: str | None) -> int:
    if forget:
        done = call_sync(paths.belayerd_sock, UnregisterTrainer(trainer=forget), Done, timeout)
        if as_json:
            emit_json(done)
        else:
            console().print(done.detail)
        return OK
    listed = call_sync(paths.belayerd_sock, ListTrainers(), TrainerList, timeout)
    if as_json:
        emit_json(listed.trainers)
    else:
        console().print(_table(listed))
    return OK


def _table(listed: TrainerList) -> Table:
    table = Table("trainer", "model", "pid", "not acknowledged", box=None)
    for row in listed.trainers:
        owed = ", ".join(f"{event.slot} generation {event.new_generation} ({event.cause})" for event in row.owed)
        owed += f" (and {row.left_out} older)" if row.left_out else ""
        table.add_row(row.trainer, row.model or "all", str(row.pid or "-"), owed or "nothing")
    return table
