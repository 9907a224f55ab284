"""Who outside of a sandbox holds the other end of something: no restore could bring that end back.

Seen from inside the sandbox's namespaces (/proc/PID/net, /proc/PID/root), not from its configuration. Costs nothing
where nothing is suspicious: the processes of the host are looked through only when a pipe lacks an end.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from envkeeper.preflight import Finding, Task, half_pipes

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_TIME_WAIT, _CLOSE, _LISTEN = "06", "07", "0A"


def find(init: int, tasks: Sequence[Task]) -> list[Finding]:
    """Blocking, some milliseconds. ``init``: the host's pid of PID 1; ``tasks``: all processes of the sandbox."""
    inside = {task.pid for task in tasks}
    out = [
        Finding("outside_peer", f"the other end of a pipe that {who} holds is outside of the sandbox, in {other}")
        for link, who in half_pipes(tasks, init).items()
        if (other := _holder_outside(link, inside))
    ]
    net = Path(f"/proc/{init}/net")
    tables = [net / name for name, stat in (("tcp", "sockstat"), ("tcp6", "sockstat6")) if _in_use(net / stat)]
    out += [
        Finding("outside_peer", f"a TCP connection to {peer}, outside of the sandbox: close it first")
        for table in tables
        for peer in outside_connections(table.read_text(), lambda: _own_addresses(net))
    ]
    return out + _queues(init)


def _in_use(stat: Path) -> bool:
    """Whether a namespace has any TCP socket. Asked first, because the tables walk the sockets of the whole host:
    18 milliseconds of every freeze here. No file: no IPv6."""
    try:
        rows = stat.read_text().splitlines()
    except FileNotFoundError:
        return False
    counts = [row.split() for row in rows if row.startswith("TCP")]
    return not counts or any(int(row[2]) for row in counts)


def outside_connections(table: str, own: Callable[[], Collection[Address]]) -> list[str]:
    """Remote ends of connections in a /proc/net/tcp table that are not in this network namespace."""
    out = []
    for row in table.splitlines()[1:]:
        fields = row.split()
        if fields[3] in (_TIME_WAIT, _CLOSE, _LISTEN):
            continue
        address, port = fields[2].split(":")
        peer = parse(address)
        if not peer.is_loopback and peer not in own():
            out.append(f"{peer} port {int(port, 16)}")
    return out


def parse(text: str) -> Address:
    """As /proc/net/tcp writes addresses: 32-bit words in the byte order of the machine."""
    words = [int(text[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _own_addresses(net: Path) -> set[Address]:
    out: set[Address] = set()
    last = ""
    for row in (net / "fib_trie").read_text().splitlines():
        words = row.split()
        if words[0] == "|--":
            last = words[1]
        elif words[0] == "/32" and words[-1] == "LOCAL":
            out.add(ipaddress.ip_address(last))
    if (net / "if_inet6").exists():
        rows = (net / "if_inet6").read_text().split("\n")
        out |= {ipaddress.ip_address(bytes.fromhex(row.split()[0])) for row in rows if row}
    return out


def _holder_outside(link: str, inside: Collection[int]) -> str:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in inside:
            continue
        try:
            if any(os.readlink(entry.path) == link for entry in os.scandir(folder / "fd")):
                return f"pid {folder.name} ({(folder / 'comm').read_text().strip()})"
        except OSError:  # ended in this moment
            continue
    return ""


def _queues(init: int) -> list[Finding]:
    """POSIX message queues are in no dump, and an unread one would be gone without a word."""
    try:
        names = os.listdir(f"/proc/{init}/root/dev/mqueue")
    except OSError:  # an image without the mount
        return []
    return [Finding("message_queue", f"POSIX message queue {name}: remove it first") for name in sorted(names)[:4]]
