"""Record locks that a restore has to take again (runtime/relock.c says why, and does it before a task runs).

Counted from CRIU's own image, and compared with what the plugin says that it took: a restore that took fewer would be
"ready" and wrong (promise E4).
"""

from __future__ import annotations

from pathlib import Path

from belayer.errors import RestoreFailed
from envkeeper import pbuf

IMAGE, TAKEN = "filelocks.img", "relocked"
_POSIX = 1  # FL_POSIX of Linux; CRIU's images/file-lock.proto: 1 flag, 2 type, 3 pid, 4 fd, 5 start, 6 len
_MAGIC = 8  # bytes; then messages, each behind its size


def recorded(images: Path) -> int:
    """How many POSIX record locks the images hold. Raises RestoreFailed when the image cannot be read."""
    try:
        data = (images / IMAGE).read_bytes()
    except FileNotFoundError:
        return 0
    count, at = 0, _MAGIC
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise RestoreFailed(f"{IMAGE} ends in the middle of a lock", kept="the checkpoint")
        try:
            count += pbuf.decode(data[at - size : at]).get(1) == [_POSIX]
        except pbuf.PbufError as why:
            raise RestoreFailed(f"{IMAGE} holds something that is no lock: {why}", kept="the checkpoint") from why
    return count


def prove(images: Path) -> None:
    """After a restore from ``images``. Raises RestoreFailed unless every recorded lock was taken again."""
    wanted = recorded(images)
    if not wanted:
        return
    try:
        said = (images / TAKEN).read_text().strip()
    except FileNotFoundError:
        said = "0"
    if said != str(wanted):
        raise RestoreFailed(f"of {wanted} record locks, CRIU's plugin took again: {said}", kept="the checkpoint")
