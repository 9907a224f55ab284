"""What must hold before the router spends seconds on importing vLLM. Each refusal is one sentence."""

from __future__ import annotations

import errno
import ipaddress
import socket

from belayer.config import Config, Model
from belayer.errors import ConfigInvalid, HostUnfit


def bind(host: str, port: int) -> socket.socket:
    """The listening HTTP port, taken before anything slow is done: who connects early waits instead of being
    refused. Raises HostUnfit in one sentence."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as why:
        reason = "is in use" if why.errno == errno.EADDRINUSE else f"cannot be bound: {why.strerror}"
        taken = why.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "stop what holds it, or change router.port" if taken else "change router.host"
        raise HostUnfit(f"port {port} of {host} {reason}", remedy=remedy) from why
    return sock


def bind_all(config: Config) -> tuple[socket.socket, dict[str, socket.socket]]:
    """The port of the host, and those of slots with a URL of their own."""
    host = config.router.host
    sock = bind(host, config.router.port)
    return sock, {slot.name: bind(host, slot.url_port) for slot in config.slot if slot.url_port}


def one_model(config: Config) -> Model:
    """The model of all slots. Raises ConfigInvalid when there is none or more than one."""
    names = {slot.model for slot in config.slot}
    if len(names) != 1:
        said = "no [[slot]]" if not names else f"slots of several models ({', '.join(sorted(names))})"
        raise ConfigInvalid(f"slot: {said}, and a router serves exactly one model")
    return config.model_named(names.pop())


def is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
