"""Names that CRIU made in the upper layer during a dump, read from its images.

An open file whose own name was deleted while another hard link keeps it alive gets a name `link_remap.N`, by which the
restore finds it; a dump that leaves the tasks running takes it away at its end, before anybody could copy it. So it is
added to the copy while the tasks are still stopped. (Format of the images: criu.org "Images"; u32 magic twice, then
u32 size and message; FileEntry 3 is a RegFileEntry, whose field 6 is the name.)
"""

from __future__ import annotations

from pathlib import Path

from envkeeper import pbuf

_MARK = b"link_remap."
_HEAD = 8


def names(images: Path) -> list[bytes]:
    """Paths below the sandbox's root, in the order of the image. Cheap where there are none."""
    data = (images / "files.img").read_bytes()
    if _MARK not in data:
        return []
    out, at = [], _HEAD
    while at + 4 <= len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        for reg in pbuf.decode(data[at + 4 : at + 4 + size]).get(3, []):
            name = pbuf.decode(reg)[6][0] if isinstance(reg, bytes) else b""
            if isinstance(name, bytes) and name.rsplit(b"/", 1)[-1].startswith(_MARK):
                out.append(name.lstrip(b"/"))
        at += 4 + size
    return out
