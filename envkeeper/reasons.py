"""CRIU's own words for what it cannot dump, as a kind and a sentence that say what to do. Pure.

Only for what envkeeper.preflight cannot see more cheaply: a dump that fails costs nothing but its time.
"""

from __future__ import annotations

import re

_KNOWN: tuple[tuple[str, str, str], ...] = (
    (r"Unix socket \S+ not found", "outside_peer", "a unix socket is connected to a program outside of the sandbox"),
    (r"irmap|fsnotify|inotify|dump that handle", "watch", "a watched path was not found: end the watcher"),
    (r"io_uring", "io_uring", "a program uses io_uring: run it without"),
    (r"anon_inode", "unknown_descriptor", "a program holds a kind of descriptor that no dump carries"),
    (r"sk-inet|[Pp]rotocol", "socket_kind", "a socket of a kind that no dump carries (Go: GODEBUG=multipathtcp=0)"),
    (r"[Mm]ount|mnt:", "foreign_mount", "a mount made inside the sandbox: unmount it first"),
    (r"nested|namespace", "nested_namespace", "a program lives in namespaces of its own"),
    (r"rlimit", "other_user", "this host lacks CAP_SYS_RESOURCE to dump a program of another user"),
    (r"link remap|ghost", "unlinked_file", "an open file that was deleted cannot be kept"),
    (r"file lock", "file_lock", "a file lock of a kind that no dump carries"),
)  # fmt: skip


def name(words: str) -> str:
    """``kind: sentence``, or an empty string when nobody has met these words yet."""
    for pattern, kind, sentence in _KNOWN:
        if re.search(pattern, words):
            return f"{kind}: {sentence}"
    return ""
