"""``belayerctl republish MODEL``: the operator accepts the model's files for a lost or torn version."""

from __future__ import annotations

import click

from belayer.errors import Refused
from belayer.messages import owner as m
from belayer.paths import Paths
from belayer.seqpacket import SeqClient
from belayerctl.common import OK, console, emit_json, verb

LOADING_S = 3600.0  # reading and hashing a large model takes minutes


@click.command(help="Load torn weights of MODEL from its configured files, as the version after the last one.")
@click.argument("model")
@verb
def republish(paths: Paths, as_json: bool, timeout: float, model: str) -> int:
    client = SeqClient(paths.owner_sock("weights"), max(timeout, LOADING_S))
    try:
        client.call(m.Hello(role=m.Role.ADMIN, who="belayerctl"), m.Welcome)
        status, _ = client.call(m.OwnerStatus(), m.OwnerStatusReply)
        row = next((row for row in status.weights if row.model == model), None)
        if row is None:
            raise Refused(f"no model named {model!r}", remedy=f"one of {sorted(row.model for row in status.weights)}")
        asked = m.RepublishWeights(model=model, version=row.version, owner_generation=status.owner_generation)
        info, _ = client.call(asked, m.WeightsInfo)
    finally:
        client.close()
    if as_json:
        emit_json(info)
    else:
        console().print(f"{model}: {info.state} v{info.version} {info.digest[:12]}")
    return OK
