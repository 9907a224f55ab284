"""What every server understands."""

from __future__ import annotations

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages: the tag is the class name."""


class Ping(Message, frozen=True, kw_only=True, tag=True):
    protocol: int = PROTOCOL


class Pong(Message, frozen=True, kw_only=True, tag=True):
    """``instance`` differs in each life of a daemon, so that a peer notices a restart."""

    daemon: str
    pid: int
    instance: str
    protocol: int = PROTOCOL


class Done(Message, frozen=True, kw_only=True, tag=True):
    """Done; ``ms`` is how long it took in the server, ``detail`` says what was really done."""

    ms: float = 0.0
    detail: str = ""


class ErrorReply(Message, frozen=True, kw_only=True, tag=True):
    """``code`` is an ErrorCode; unknown codes are kept as text by the receiver."""

    code: str
    message: str
    kept: str = ""
    remedy: str = ""


class FaultProof(Message, frozen=True, kw_only=True, tag=True):
    """What was broken on purpose and how it was seen to be broken (a void test is worse than none)."""

    fault: str
    target: str
    pid: int
    seen: str
    ms: float
