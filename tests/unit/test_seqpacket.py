"""Descriptors that arrive over a socket are close-on-exec: one that a child inherits would keep memory for its life."""

from __future__ import annotations

import os
import socket

from belayer.seqpacket import receive, send


def test_received_descriptors_are_close_on_exec() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull, "rb") as file:
        os.set_inheritable(file.fileno(), True)
        send(ours, b"packet", (file.fileno(), file.fileno()))
        data, fds = receive(theirs)
    assert (data, len(fds)) == (b"packet", 2)
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    for fd in fds:
        os.close(fd)
