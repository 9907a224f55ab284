"""Words of Docker, containerd, runc, CRIU and the kernel that speak of the engine or the host, not of a sandbox and not
of a checkpoint. Pure.

The rule, and why it is this way round: only CRIU looks into a sandbox, and runc says of nothing else "criu failed". All
other words of an engine (a content store that is locked or not collected yet, a shim or a connection that went, a
deadline, a name that is there still) are its own trouble, also those that nobody has met yet. And what CRIU says is the
host's where it is short of something: memory, descriptors, processes, time.
"""

from __future__ import annotations

import errno
import os
import re

from belayer.errors import RestoreFailed
from envkeeper.disk import FULL

SHORT = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOBUFS})

AGAIN = "ask again later; the log of dockerd and of the kernel tell more"

_SHORT_WORDS = tuple(os.strerror(code).lower() for code in (*sorted(SHORT), errno.EBUSY, errno.EINTR, errno.ETIMEDOUT))
# CRIU's own alarm for tasks that do not come to rest; what kills it from outside (the kernel, for memory).
_TIME = re.compile(r"timeout reached|unable to interrupt the current operation|killed by signal 9|signal: killed")
_CRIU_SAID = re.compile(r"criu failed: type", re.IGNORECASE)
# Of Docker's removals: it died under Docker's hands, its root is mounted a moment longer, or its death came late.
_LINGERS = re.compile(
    r"is not running|device or resource busy|did not receive an exit event|directory not empty|[Cc]ould not kill"
)


class Hindered(RestoreFailed):
    """The engine or the host failed, not the checkpoint: another checkpoint would fare no better, and this one may do
    better soon. ``again``: asked at once it may work; not on a full disk."""

    def __init__(self, message: str, *, kept: str = "", remedy: str = AGAIN, again: bool = True) -> None:
        super().__init__(message, kept=kept, remedy=remedy)
        self.again = again


def hung(container_id: str, after_s: float, ended: list[int]) -> Hindered:
    """A restore that was not over in time, and was killed. Not tried again at once: it would take as long again."""
    return Hindered(
        f"the restore of container {container_id[:12]} was not over after {after_s:g} s; its runc and CRIU "
        f"(pids {ended}) were killed",
        kept="the checkpoint",
        remedy="restore again later; raise envkeeper.restore_timeout_s if the host is only slow",
        again=False,
    )


def of_criu(said: str) -> bool:
    """Whether an engine passes on what CRIU found, and not trouble of its own."""
    return bool(_CRIU_SAID.search(said))


def is_short(words: str) -> bool:
    """Whether CRIU, or who started it, lacked something that the host may have again."""
    low = words.lower()
    return any(word in low for word in _SHORT_WORDS) or bool(_TIME.search(low))


def lingers(said: str) -> bool:
    """Docker could not remove a container because something of it was still going: asked again, it can."""
    return bool(_LINGERS.search(said))


def hindered(what: str, why: OSError) -> Hindered | None:
    """For a call of ours in a restore: what the host lacked, None where the checkpoint itself may be at fault."""
    if why.errno in FULL:
        return Hindered(f"{what}: {why}", kept="the checkpoint", remedy="free disk space", again=False)
    return Hindered(f"{what}: {why}", kept="the checkpoint") if why.errno in SHORT else None
