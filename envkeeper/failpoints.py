"""Points between two effects at which a test may stop this process, and then kill whom it likes (promise O1).

A point is reached after the effect it is named for. Armed only by the environment of a starting daemon:
``BELAYER_FAILPOINTS`` names a folder; when a file with the point's name lies there, it is renamed to ``<point>.hit``
and the process stops itself (SIGSTOP: all threads). The test sees both facts, kills, and continues or restarts us.
Without the variable ``reach`` is one comparison.
"""

from __future__ import annotations

import os
import signal
import threading
from enum import StrEnum
from pathlib import Path

VARIABLE = "BELAYER_FAILPOINTS"
_FOLDER = Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None


class Point(StrEnum):
    """In the order in which they are passed."""

    # create
    CREATE_RECORDED = "create.recorded"  # the container exists and is on record, not started
    CREATE_STARTED = "create.started"
    # an action
    ACTION_ENDED = "action.ended"  # the agent's answer is in, on no record
    ACTION_RECORDED = "action.recorded"  # on record, released to nobody
    # full_checkpoint
    CAPTURE_BEGUN = "capture.begun"
    CAPTURE_NONCE = "capture.nonce"
    CAPTURE_FROZEN = "capture.frozen"
    CAPTURE_COPYING = "capture.copying"
    CAPTURE_DUMPED = "capture.dumped"
    CAPTURE_COPIED = "capture.copied"  # still frozen
    CAPTURE_THAWED = "capture.thawed"
    PUBLISH_HASHED = "publish.hashed"
    PUBLISH_MANIFEST = "publish.manifest"
    PUBLISH_SYNCED = "publish.synced"
    PUBLISH_RENAMED = "publish.renamed"
    PUBLISH_NAMED = "publish.named"
    PUBLISH_READY = "publish.ready"
    # full_restore
    RESTORE_CLAIMED = "restore.claimed"
    RESTORE_RECORDED = "restore.recorded"
    RESTORE_FENCED = "restore.fenced"
    RESTORE_CREATED = "restore.created"
    RESTORE_INSTALLED = "restore.installed"
    RESTORE_ARMED = "restore.armed"  # the OCI runtime has its claim
    RESTORE_STARTED = "restore.started"
    RESTORE_VERIFIED = "restore.verified"
    RESTORE_PROVED = "restore.proved"
    RESTORE_POINTED = "restore.pointed"  # READY is at what was restored
    RESTORE_SERVED = "restore.served"  # on record as running, told to nobody
    # destroy
    DESTROY_RECORDED = "destroy.recorded"
    DESTROY_FENCED = "destroy.fenced"
    DESTROY_REMOVED = "destroy.removed"  # the containers are gone, checkpoints are not


def reach(point: Point) -> None:
    if _FOLDER is not None:
        _stop_if_armed(_FOLDER, point)


def _stop_if_armed(folder: Path, point: Point) -> None:
    try:
        (folder / point).rename(folder / f"{point}.hit")
    except FileNotFoundError:
        return
    # To this very thread: a signal to the process may be taken by another one a moment later.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
