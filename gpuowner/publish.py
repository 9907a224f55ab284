"""A trainer's whole update: engines paused, the next version written and sealed, engines on it and going again.

    python -m gpuowner.publish MODEL FOLDER [--mode swap|in_place]

or, from a training loop on the same host,

    with publishing(Paths(), "policy") as update:
        update.write(state_dict)

Whatever happens inside the block, the engines go on: at the new version when it was sealed, at the last one when the
update was aborted. The one exception is an update in place whose writer failed after it had begun to write: the bytes
are torn, the mains stay paused, and a whole rewrite (this again, or RepublishWeights) brings them back.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from belayer import procs
from belayer.clock import Stopwatch
from belayer.daemon import say
from belayer.errors import BelayerError, DaemonUnreachable
from belayer.lives import call_any_life, call_one_life
from belayer.messages import owner as m
from belayer.messages.control import BeginWeightsUpdate, EndWeightsUpdate, WeightsUpdated
from belayer.paths import Paths
from gpuowner.attach import OwnerClient
from gpuowner.update import Update, begin_update

_COMING_S = 10.0  # a belayerd that was killed leaves its socket, and is on its way back
_HASH_S = 600.0  # the owner hashes all of a model before it answers a commit


@contextmanager
def publishing(
    paths: Paths, model: str, *, mode: str = "", whole: bool = True, within_s: float = 120.0
) -> Iterator[Update]:
    """Pause the engines of ``model``, yield its writer, commit at the end of the block and let the engines follow. A
    belayerd that is killed meanwhile is asked again in its next life.

    ``whole``: every tensor will be written. ``within_s``: bound on each answer of belayerd, in seconds. Raises what the
    block raises after an abort; WeightsTorn, Refused, DaemonUnreachable as their messages say.
    """
    me, name, sealed = os.getpid(), secrets.token_hex(8), 0
    begin = BeginWeightsUpdate(model=model, within_s=within_s, pid=me, start_time=procs.start_time(me), update=name)
    coming_s = _COMING_S if paths.belayerd_sock.exists() else 0.0
    call_one_life(paths.belayerd_sock, begin, WeightsUpdated, within_s, coming_s)
    try:
        client = OwnerClient(paths.owner_sock("weights"), m.Role.LOADER, "publish", timeout=_HASH_S)
        try:
            with begin_update(client, model, mode=mode, whole=whole) as update:
                yield update
                update.commit()
                sealed = update.version
        finally:
            client.close()
    finally:
        _end(paths, EndWeightsUpdate(model=model, update=name), within_s, sealed)


def _end(paths: Paths, message: EndWeightsUpdate, within_s: float, sealed: int) -> None:
    try:
        call_any_life(paths.belayerd_sock, message, WeightsUpdated, within_s)
    except DaemonUnreachable as why:
        if not sealed:
            raise
        raise DaemonUnreachable(
            f"v{sealed} of {message.model} is sealed, but no belayerd said that it is served: {why.message}",
            kept=f"v{sealed}, every request",
            remedy="start belayerd: it brings the engines to what is sealed",
        ) from why


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpuowner.publish", description="Publish a folder as the next version.")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=("swap", "in_place"), default="")
    asked = parser.parse_args()
    watch = Stopwatch()
    try:
        with publishing(Paths(), asked.model, mode=asked.mode) as update:
            update.write_folder(asked.folder)
    except BelayerError as why:
        return say(why)
    print(f"{asked.model} v{update.version} is served, {watch.ms() / 1e3:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
